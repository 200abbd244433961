"""What an app gives Keel: its model, and a site's examples as arrays or as federated data of one client."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from keel.config.schema import Spec
from keel.core.examples import Examples, FederatedData, Partition
from keel.core.torch_randomness import keyed_torch_rng
from keel.data.arrays import examples
from keel.errors import KeelError

Model = Callable[[], nn.Module]
"""Returns the untrained model."""
Arrays = tuple[Any, Any]
"""(inputs, labels)"""
SiteData = FederatedData | tuple[Arrays, Arrays | None] | Arrays
"""(inputs, labels), or ((inputs, labels), (test inputs, test labels)), or federated data of one client."""
Loader = Callable[[Mapping[str, Any]], SiteData]
"""Loads a site's data; its argument is the node's configuration (`--node-config`)."""

WITHOUT_TEST = "site without test examples"
"""Name of the data of a site that has no test examples."""


def initial_model(model: Model, spec: Spec) -> nn.Module:
    """Make the model that training starts from. The seed of the spec makes it the same on every machine."""
    with keyed_torch_rng(spec.seed, "model"):
        return model()


def site_dataset(data: SiteData, module: nn.Module) -> FederatedData:
    """Return a site's data as federated data of one client. The outputs of `module` give the number of classes."""
    if isinstance(data, FederatedData):
        if data.partition.clients != 1:
            raise KeelError(f"data must have one client, the site itself (got {data.partition.clients})")
        return data
    if not isinstance(data, tuple) or len(data) != 2:
        raise KeelError(
            f"data must be (inputs, labels) or ((inputs, labels), (test inputs, test labels)) (got a "
            f"{type(data).__name__})"
        )
    train_arrays, test_arrays = data if isinstance(data[0], tuple) else (data, None)
    train = to_examples(train_arrays, "data.")
    if test_arrays is None:  # a task needs at least one test example; has_test_examples() is False
        name, test = WITHOUT_TEST, Examples(train.inputs[:1], train.targets[:1])
    else:
        name, test = "site", to_examples(test_arrays, "data.test_")
    dataset = FederatedData(name, train, test, Partition.of([np.arange(len(train))]), 0)
    with torch.no_grad():
        outputs = module.eval()(dataset.transform(train.inputs[:1]))
    module.train()
    classes = 0 if train.targets.is_floating_point() else int(outputs.shape[-1])
    return replace(dataset, classes=classes)


def all_sites(data: Sequence[FederatedData]) -> FederatedData:
    """Return the data of several sites as federated data with one client for each."""
    train = Examples(*(torch.cat([getattr(site.train, name) for site in data]) for name in ("inputs", "targets")))
    tests = [site.test for site in data if has_test_examples(site)] or [data[0].test]
    test = Examples(*(torch.cat([getattr(part, name) for part in tests]) for name in ("inputs", "targets")))
    offsets = np.cumsum([0, *(len(site.train) for site in data)])
    return replace(data[0], name="sites", train=train, test=test, partition=Partition(np.arange(len(train)), offsets))


def has_test_examples(data: FederatedData) -> bool:
    return data.name != WITHOUT_TEST


def check_labels(data: FederatedData) -> None:
    """Check that every label is a class of the model. A negative label is padding, but only in sequences."""
    for field, part in ("labels", data.train), ("test_labels", data.test):
        if not data.classes or part.targets.is_floating_point():
            continue
        lowest, highest = (int(value) for value in torch.aminmax(part.targets))
        if highest >= data.classes or (lowest < 0 and part.targets.dim() == 1):
            raise KeelError(
                f"data.{field} must be from 0 to {data.classes - 1}, the model's outputs (got {lowest} to {highest})"
            )


def to_examples(arrays: Arrays, field: str) -> Examples:
    """Check a pair of arrays and convert it. Errors start with `field`, such as "data.test_"."""
    inputs, labels = (value.numpy() if isinstance(value, Tensor) else np.asarray(value) for value in arrays)
    if inputs.dtype.kind in "iub":
        inputs = inputs.astype(np.float32)
    return examples(inputs, labels, field)
