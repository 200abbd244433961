"""Stored inputs that are not one array: several arrays per example, or items that are read when they are used.

They stand where `Examples` has a tensor, and give one packed tensor when examples are gathered.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, default_collate

from keel.core.packing import Packing, check_values, named_tensors
from keel.errors import KeelError

TRIED = 32
"""How many items are read to see which lengths vary."""

Collate = Callable[[list[Any]], Any]
"""A function of a list of items (input, target) that returns a minibatch (inputs, targets), as DataLoader's."""


class StoredInputs(Protocol):
    """The part of a tensor that stored inputs have."""

    @property
    def shape(self) -> torch.Size:
        """The number of examples, and the shape of one as it is gathered."""

    def __len__(self) -> int: ...

    def index_select(self, dim: int, index: Tensor, /) -> Tensor:
        """Gather examples."""


@dataclass(frozen=True)
class SeveralArrays:
    """Several arrays with one row per example each."""

    arrays: Any
    """A tuple or a dict of tensors, which may be memory-mapped."""

    def __post_init__(self) -> None:
        lengths = {len(tensor) if tensor.dim() else 0 for _, tensor in named_tensors(self.arrays)}
        if len(lengths) > 1:
            raise KeelError(f"data: all inputs must have one row per example (got {sorted(lengths)} rows)")
        check_values(self.arrays)

    @property
    def packing(self) -> Packing:
        return Packing.of(self.arrays)

    @property
    def shape(self) -> torch.Size:
        return torch.Size([len(self), sum(part.elements(0) for part in self.packing.parts)])

    def __len__(self) -> int:
        return len(named_tensors(self.arrays)[0][1])

    def index_select(self, dim: int, index: Tensor, /) -> Tensor:
        return self.packing.pack([tensor.index_select(0, index) for _, tensor in named_tensors(self.arrays)])

    def subset(self, rows: Tensor) -> "SeveralArrays":
        parts = [tensor.index_select(0, rows) for _, tensor in named_tensors(self.arrays)]
        names = [name for name, _ in named_tensors(self.arrays) if name is not None]
        return SeveralArrays(dict(zip(names, parts, strict=True)) if names else tuple(parts))

    def fingerprint(self) -> str:
        """Return the SHA-256 of all arrays."""
        content = sha256()
        for name, tensor in named_tensors(self.arrays):
            content.update(str(name).encode())
            content.update(tensor.contiguous().numpy().tobytes())
        return content.hexdigest()


class Items:
    """The items (input, target) of a map-style data set, read when they are used."""

    def __init__(self, items: Any, collate: Collate | None = None):
        self.items, self.collate = items, collate or default_collate
        tried = np.unique(np.linspace(0, len(items) - 1, TRIED).astype(int)).tolist()
        singles = [self._collated([row])[0] for row in (tried if collate else tried[:2])]
        self.packing = None if isinstance(singles[0], Tensor) else Packing.of(*singles)
        sizes = {self._packed(single).shape[1:] for single in singles}
        self.variable = len(sizes) > 1
        self.shape = torch.Size([len(items), *next(iter(sizes))])

    def __len__(self) -> int:
        return len(self.items)

    def gather(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Read some items, as packed inputs and targets."""
        inputs, targets = self._collated(rows)
        return self._packed(inputs), targets

    def index_select(self, dim: int, index: Tensor, /) -> Tensor:
        return self.gather(index.tolist())[0]

    def subset(self, rows: Tensor) -> "Items":
        return Items(Subset(self.items, rows.tolist()), None if self.collate is default_collate else self.collate)

    def fingerprint(self) -> str:
        """Return the SHA-256 of the number of items and of some of them: reading all may take hours."""
        content = sha256(str(len(self)).encode())
        for row in np.unique(np.linspace(0, len(self) - 1, TRIED).astype(int)).tolist():
            for tensor in self.gather([row]):
                content.update(tensor.contiguous().numpy().tobytes())
        return content.hexdigest()

    def _collated(self, rows: Sequence[int]) -> tuple[Any, Tensor]:
        items = [self.items[row] for row in rows]
        if not isinstance(items[0], tuple | list) or len(items[0]) != 2:
            raise KeelError(f"data: an item must be a pair (input, target) (got {type(items[0]).__name__})")
        try:
            inputs, targets = self.collate(items)
        except (TypeError, ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise KeelError(
                f"data: items {rows[0]} to {rows[-1]} cannot be stacked to a minibatch ({reason}); return tensors of "
                "equal shape from the data set, or pass collate="
            ) from error
        return inputs, targets

    def _packed(self, inputs: Any) -> Tensor:
        if isinstance(inputs, Tensor):
            return inputs.float() if inputs.dtype == torch.float64 else inputs
        assert self.packing is not None
        check_values(inputs)
        return self.packing.pack(inputs)
