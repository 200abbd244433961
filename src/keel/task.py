"""A task: the model, the data and the loss that a spec names, checked against each other and made ready to train."""

from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keel import models
from keel.data import arrays, digits
from keel.data.federated import Examples, FederatedData, Partition
from keel.data.partition import deal
from keel.errors import KeelError
from keel.params import FlatModel, Loss
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
    if spec.evaluation.on == "validation":
        data = hold_out(data, spec.seed)
    if spec.algorithm.pooled:
        data = replace(data, partition=Partition.of([data.partition.indices]))
    if module is None:
        with torch_draws(spec.seed, "model"):
            shape = tuple(data.train.inputs.shape[1:])
            module = models.build(spec.model.name, shape, data.classes, spec.model.settings)
    if loss is not None and not callable(loss):
        raise KeelError(f"loss: {loss!r}; accepted: a function of outputs and targets that gives one loss per example")
    task = Task(module, data, loss or per_example_cross_entropy)
    _try(task)
    return task


def per_example_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets, reduction="none")


def load_data(spec: Spec) -> FederatedData:
    train, test, keys = _examples(spec.data)
    partition = deal(
        train.targets.numpy(),
        draws(spec.seed, "partition"),
        keys=keys if spec.data.partition == "key" else None,
        clients=spec.data.clients,
        alpha=None if spec.data.partition == "iid" else spec.data.alpha,
    )
    return FederatedData.of(spec.data.name, train, test, partition)


def hold_out(data: FederatedData, seed: int) -> FederatedData:
    """A fifth of each client's examples, to choose settings on in place of the test examples."""
    kept, held = [], []
    stream = draws(seed, "validation")
    for client in range(data.partition.clients):
        mine = stream.permutation(data.partition[client])
        cut = int(len(mine) * VALIDATION_SHARE)
        held.append(mine[:cut])
        kept.append(mine[cut:])
    chosen = np.concatenate(held)
    if len(chosen) == 0:
        raise KeelError("evaluation.on: no client has the five examples that a validation part needs; accepted: 'test'")
    return replace(data, test=data.train[chosen], partition=Partition.of(kept))


def _examples(spec: DataSpec) -> tuple[Examples, Examples, np.ndarray | None]:
    if spec.name == "digits":
        return *digits.load(), None
    if spec.name != "arrays":
        raise KeelError("data.name: 'custom' stands for data passed in Python: keel.run(..., data=...)")
    names = ("inputs", "labels", "test_inputs", "test_labels")
    inputs, labels, test_inputs, test_labels = (arrays.read(Path(getattr(spec, n)), f"data.{n}") for n in names)
    keys = arrays.read(Path(spec.keys), "data.keys") if spec.keys is not None else None
    return arrays.examples(inputs, labels, "data."), arrays.examples(test_inputs, test_labels, "data.test_"), keys


def _try(task: Task) -> None:
    """One forward pass before the first round: what does not fit together is said now, in the user's words."""
    FlatModel(task.module)
    few = task.data.train[np.arange(min(2, len(task.data.train)))]
    module = deepcopy(task.module).train()
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    try:
        with torch_draws(0, "trial"), torch.no_grad():
            for parameter in module.parameters():  # away from the start, where some buffers are at rest
                parameter.add_(0.1 * torch.randn_like(parameter))
            outputs = module(few.inputs)
            losses = task.loss(outputs, few.targets)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        reason = str(error).strip().splitlines()[0]
        shape = tuple(few.inputs.shape[1:])
        raise KeelError(f"model: fails on an input of shape {shape} with label {few.targets[0]} ({reason})") from error
    for name, buffer in module.named_buffers():
        if not torch.equal(buffer, buffers[name]):
            raise KeelError(
                f"model: training changes the buffer {name}, which is no parameter and would not be federated; "
                "accepted: nn.GroupNorm or nn.LayerNorm in place of normalisation with running statistics"
            )
    if not isinstance(losses, Tensor) or tuple(losses.shape) != (len(few),):
        given = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else repr(losses)
        raise KeelError(
            f"loss: gives {given} for {len(few)} examples; accepted: one loss per example, as with reduction='none'"
        )
    if task.data.classes and (outputs.dim() != 2 or outputs.shape[1] < task.data.classes):
        raise KeelError(f"model: outputs of shape {tuple(outputs.shape[1:])} for {task.data.classes} classes")
