"""Data sets whose items are read when they are used: map-style data sets of PyTorch, rows of Hugging Face's."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from keel.core.examples import Examples, TaskKind
from keel.core.stored_inputs import TRIED, Collate, Items
from keel.data.arrays import as_dataset
from keel.data.dataset import Dataset
from keel.data.targets import convert_targets, encode_texts, infer_task
from keel.errors import KeelError

LARGE = 1 << 28
"""The size in bytes from which the rows of a Hugging Face data set are read when they are used."""


def lazy_dataset(
    train: Any,
    test: Any,
    keys: np.ndarray | None,
    task: TaskKind | None = None,
    collate: Collate | None = None,
    class_names: Sequence[str] = (),
) -> Dataset:
    """Make a data set from the items (input, target) of two map-style data sets; inputs are read when they are used.

    The targets are read once: from the data set's attribute `targets` or `labels`, otherwise item by item.

    Args:
        task: The kind of task; by default it is inferred from the targets.
        collate: Makes a minibatch (inputs, targets) from a list of items, as DataLoader's collate_fn does.
    """
    for field, dataset in ("data", train), ("data.test", test):
        check_length(dataset, field)
    targets, test_targets, texts = encode_texts(_targets(train), _targets(test))
    if texts:
        class_names = texts
        train, test = Relabelled(train, targets), Relabelled(test, test_targets)
    if targets.dtype == object or test_targets.dtype == object:  # sequences of different lengths
        kind: TaskKind = task or "sequence"
        # a placeholder: they are read with their items
        tokens = [torch.zeros(len(part), 0, dtype=torch.int64) for part in (targets, test_targets)]
    else:
        kind = task or infer_task(targets, "data: targets")
        tokens = [convert_targets(part, kind, "data: targets") for part in (targets, test_targets)]
    parts = [
        Examples(cast(Tensor, Items(items, collate, kind in ("regression", "multilabel"))), values)
        for items, values in zip((train, test), tokens, strict=True)
    ]
    if len(tokens[0].shape) > 1 and tokens[0].shape[1] == 0:
        largest = max(int(np.max(target)) for target in (*targets, *test_targets))
        return Dataset(parts[0], parts[1], 1 + largest, keys=keys, task=kind)
    return as_dataset(parts[0], parts[1], keys, kind, class_names)


def check_length(dataset: Any, field: str) -> None:
    """Raise a KeelError unless the data set has a length and items that can be read in any order."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise KeelError(
            f"{field} must be a map-style data set, whose items are read in any order (got {type(dataset).__name__}, "
            "which can only be iterated over); read its items into a list"
        )
    try:
        count = len(dataset)
    except (TypeError, NotImplementedError):
        raise KeelError(
            f"{field} must have a length (got {type(dataset).__name__} without __len__); add the method __len__"
        ) from None
    if count == 0:
        raise KeelError(f"{field} must have at least one item (got {type(dataset).__name__} with none)")


def _targets(dataset: Any) -> np.ndarray:
    """Return the targets of all items; an array of objects if their shapes differ."""
    for name in ("targets", "labels"):
        stored = getattr(dataset, name, None)
        if stored is not None and len(stored) == len(dataset) and _agrees(dataset, stored):
            return np.asarray(stored)
    targets = [np.asarray(_item(dataset, row)[1]) for row in range(len(dataset))]
    if len({target.shape for target in targets}) == 1:
        return np.stack(targets)
    ragged = np.empty(len(targets), dtype=object)
    ragged[:] = targets
    return ragged


def _agrees(dataset: Any, stored: Sequence[Any]) -> bool:
    """Return whether stored targets are those of the items, which a transform may change."""
    rows = np.unique(np.linspace(0, len(stored) - 1, TRIED).astype(int)).tolist()
    return all(np.array_equal(_item(dataset, row)[1], stored[row]) for row in rows)


def _item(dataset: Any, row: int) -> Any:
    item = dataset[row]
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise KeelError(f"data: item {row} must be a pair (input, target) (got {type(item).__name__})")
    return item


class Rows:
    """The rows of a Hugging Face data set as items (input, target), which stay in their memory-mapped files."""

    def __init__(self, dataset: Any, input: str | Sequence[str], label: str):
        self.rows, self.input = dataset.with_format("numpy"), input
        self.targets = np.asarray(self.rows[label][:])

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, row: int) -> tuple[Any, Any]:
        cells = self.rows[row]
        if isinstance(self.input, str):
            return _cell(cells[self.input]), self.targets[row]
        return {name: _cell(cells[name]) for name in self.input}, self.targets[row]


def _cell(content: Any) -> Tensor:
    """Return the content of a cell as a tensor; an image with its channels first, from 0 to 1."""
    values = np.asarray(content)
    if values.dtype == np.uint8 and values.ndim in (2, 3):
        values = (values[None] if values.ndim == 2 else values.transpose(2, 0, 1)).astype(np.float32) / 255
    return torch.tensor(values)


class Relabelled:
    """The items of a data set with other targets."""

    def __init__(self, items: Any, targets: np.ndarray):
        self.items, self.targets = items, targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, row: int) -> tuple[Any, Any]:
        return self.items[row][0], self.targets[row]


def is_large(dataset: Any, columns: Sequence[str]) -> bool:
    """Return whether columns of a Hugging Face data set would take much memory."""
    features = getattr(dataset, "features", None) or ()
    if any(column not in features for column in columns) or not len(dataset):
        return False  # the caller reports it
    first = dataset.with_format("numpy")[0]
    return sum(np.asarray(first[column]).nbytes for column in columns) * len(dataset) >= LARGE


def rows_dataset(
    train: Any,
    test: Any,
    input: str | Sequence[str],
    label: str,
    keys: np.ndarray | None,
    task: TaskKind | None = None,
    class_names: Sequence[str] = (),
) -> Dataset:
    """Make a data set whose rows are read when they are used."""
    return lazy_dataset(Rows(train, input, label), Rows(test, input, label), keys, task, class_names=class_names)
