"""The user's own data as federated data, in Python: arrays, and tables of the `datasets` and `flwr-datasets` packages.

Neither package is imported: what they hand over is asked for arrays.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike

from keel.data.arrays import examples, pool
from keel.data.federated import Examples, FederatedData, Pool
from keel.data.partition import Way, deal_out
from keel.data.preparation import Pixels
from keel.errors import KeelError


class Dataset(Protocol):
    """What is asked of a datasets.Dataset."""

    column_names: Any

    def with_format(self, type: str, /) -> Any: ...


class Partitioner(Protocol):
    """What is asked of a partitioner of flwr-datasets."""

    @property
    def num_partitions(self) -> int: ...

    def load_partition(self, partition_id: int, /) -> Any: ...


def federate(
    inputs: ArrayLike | torch.Tensor,
    labels: ArrayLike | torch.Tensor,
    *,
    test: tuple[ArrayLike | torch.Tensor, ArrayLike | torch.Tensor],
    keys: ArrayLike | None = None,
    clients: int | None = None,
    alpha: float | None = None,
    seed: int = 0,
    name: str = "custom",
) -> FederatedData:
    """Arrays as federated data: a client for each value of `keys` (or for `clients` of them), else `clients` in all.

    Without keys, `alpha` is the concentration of Dirichlet label mixes (0: one class per client); None is IID.
    """
    train = examples(_array(inputs), _array(labels), "data.")
    held_out = examples(_array(test[0]), _array(test[1]), "data.test_")
    whole = pool(train, held_out, None if keys is None else np.atleast_1d(np.asarray(keys)))
    return _dealt(name, whole, clients, alpha, seed)


def from_dataset(
    train: Dataset,
    *,
    input: str,
    label: str,
    test: Dataset,
    client: str | None = None,
    clients: int | None = None,
    alpha: float | None = None,
    seed: int = 0,
    name: str = "custom",
) -> FederatedData:
    """A datasets.Dataset as federated data: its columns `input` and `label`, a client for each value of `client`.

    Images stay bytes until a batch needs them; other inputs become 32-bit floats. The rest is as in `federate`.
    """
    keys = None if client is None else _column(train, client)
    return _dealt(name, _pool([train], test, input, label, keys), clients, alpha, seed)


def from_partitioner(
    partitioner: Partitioner, *, input: str, label: str, test: Dataset, name: str = "custom"
) -> FederatedData:
    """The partitions of a flwr-datasets partitioner as federated data: a client for each."""
    parts = [partitioner.load_partition(number) for number in range(partitioner.num_partitions)]
    sizes = [len(part) for part in parts]
    if 0 in sizes:
        raise KeelError(f"data: partition {sizes.index(0)} has no examples; accepted: at least one in each")
    keys = np.repeat(np.arange(len(parts)), sizes)
    return _dealt(name, _pool(parts, test, input, label, keys), None, None, 0)


def _dealt(name: str, whole: Pool, clients: int | None, alpha: float | None, seed: int) -> FederatedData:
    if whole.keys is not None and alpha is not None:
        raise KeelError(f"data.alpha: {alpha} is for clients without keys; accepted: one of the two")
    way: Way = "key" if whole.keys is not None else "iid" if alpha is None else "dirichlet"
    return deal_out(name, whole, seed, way, clients=clients, alpha=alpha or 0.0)


def _pool(parts: Sequence[Dataset], test: Dataset, input: str, label: str, keys: np.ndarray | None) -> Pool:
    inputs = [_inputs(part, input) for part in [*parts, test]]
    if len({(array.shape[1:], array.dtype == np.uint8) for array in inputs}) > 1:
        raise _unequal(input)
    whole = pool(
        _examples(np.concatenate(inputs[:-1]), np.concatenate([_column(part, label) for part in parts]), "data."),
        _examples(inputs[-1], _column(test, label), "data.test_"),
        keys,
    )
    if whole.train.inputs.dtype != torch.uint8:
        return whole
    channels = whole.train.inputs.shape[1]
    return replace(whole, prepare=Pixels((0.0,) * channels, (1.0,) * channels))


def _inputs(dataset: Dataset, column: str) -> np.ndarray:
    """A column of examples; images with their channels first, as models take them."""
    values = _column(dataset, column)
    if values.dtype == object:
        raise _unequal(column)
    if values.dtype == np.uint8 and values.ndim == 3:
        return values[:, None]
    return values.transpose(0, 3, 1, 2) if values.dtype == np.uint8 and values.ndim == 4 else values


def _examples(inputs: np.ndarray, labels: np.ndarray, field: str) -> Examples:
    if inputs.dtype != np.uint8 or inputs.ndim != 4:
        return examples(inputs, labels, field)
    checked = examples(inputs[:, 0, 0, 0], labels, field)  # bytes are numbers; it is about the labels
    return Examples(torch.from_numpy(np.ascontiguousarray(inputs)), checked.targets)


def _column(dataset: Dataset, name: str) -> np.ndarray:
    if not (hasattr(dataset, "column_names") and hasattr(dataset, "with_format")):
        raise KeelError(f"data: a {type(dataset).__name__}; accepted: a datasets.Dataset (for arrays: keel.federate)")
    if name not in dataset.column_names:
        raise KeelError(f"data: no column {name!r}; accepted: {', '.join(dataset.column_names)}")
    return np.asarray(dataset.with_format("numpy")[name][:])


def _unequal(column: str) -> KeelError:
    return KeelError(
        f"data: the examples in column {column!r} are no numbers, or differ in shape or kind; "
        "accepted: numbers of one shape (images resized, all grey or all in colour)"
    )


def _array(values: ArrayLike | torch.Tensor) -> np.ndarray:
    return values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
