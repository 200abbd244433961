"""A task: the model, the data and the loss that a spec names, made ready to train."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import nn
from torch.nn.functional import cross_entropy

from keel import models
from keel.data import arrays, digits
from keel.data.federated import Examples, FederatedData, Partition
from keel.data.partition import deal
from keel.errors import KeelError
from keel.params import Loss
from keel.randomness import draws, torch_draws
from keel.runs.spec import DataSpec, Spec

VALIDATION_SHARE = 0.2


@dataclass(frozen=True)
class Task:
    """What is learned, whoever learns it."""

    module: nn.Module
    data: FederatedData
    loss: Loss


def make_task(
    spec: Spec, *, module: nn.Module | None = None, data: FederatedData | None = None, loss: Loss | None = None
) -> Task:
    """The task of a spec; a module, data or loss that is passed takes the place of the one it names."""
    data = load_data(spec) if data is None else data
    if spec.algorithm.pooled:
        data = replace(data, partition=Partition.of([data.partition.indices]))
    if module is None:
        with torch_draws(spec.seed, "model"):
            shape = tuple(data.train.inputs.shape[1:])
            module = models.build(spec.model.name, shape, data.classes, spec.model.settings)
    return Task(module, data, loss or per_example_cross_entropy)


def per_example_cross_entropy(outputs, targets):  # type: ignore[no-untyped-def]
    return cross_entropy(outputs, targets, reduction="none")


def load_data(spec: Spec) -> FederatedData:
    train, test, keys = _examples(spec.data)
    if spec.evaluation.on == "validation":
        train, test, keys = _hold_out(train, keys, spec.seed)
    partition = deal(
        train.targets.numpy(),
        draws(spec.seed, "partition"),
        keys=keys if spec.data.partition == "key" else None,
        clients=spec.data.clients,
        alpha=None if spec.data.partition == "iid" else spec.data.alpha,
    )
    classes = 1 + int(max(train.targets.max(), test.targets.max()))
    return FederatedData(spec.data.name, train, test, partition, classes)


def _examples(spec: DataSpec) -> tuple[Examples, Examples, np.ndarray | None]:
    if spec.name == "digits":
        return *digits.load(), None
    if spec.name != "arrays":
        raise KeelError("data.name: 'custom' stands for data passed in Python: keel.run(..., data=...)")
    names = ("inputs", "labels", "test_inputs", "test_labels")
    inputs, labels, test_inputs, test_labels = (arrays.read(Path(getattr(spec, n)), f"data.{n}") for n in names)
    train = arrays.examples(inputs, labels, "data.")
    test = arrays.examples(test_inputs, test_labels, "data.test_")
    if train.inputs.shape[1:] != test.inputs.shape[1:]:
        raise KeelError(
            f"data.test_inputs: shape {tuple(test.inputs.shape[1:])} of an input; "
            f"accepted: {tuple(train.inputs.shape[1:])}, as in data.inputs"
        )
    keys = arrays.read(Path(spec.keys), "data.keys") if spec.keys is not None else None
    return train, test, keys


def _hold_out(train: Examples, keys: np.ndarray | None, seed: int) -> tuple[Examples, Examples, np.ndarray | None]:
    """A part of the training examples, taken from the clients, to choose settings on."""
    order = draws(seed, "validation").permutation(len(train))
    held = int(len(train) * VALIDATION_SHARE)
    kept = np.sort(order[held:])
    return train[kept], train[order[:held]], None if keys is None else keys[kept]
