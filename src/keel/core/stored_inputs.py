"""Stored inputs that are not one array: several arrays per example, or items that are read when they are used.

Gathering examples returns one packed tensor, so `Examples` holds them in place of a tensor.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, default_collate

from keel.core.packing import Packing, check_values, named_tensors
from keel.core.torch_randomness import keyed_torch_rng
from keel.errors import KeelError

TRIED = 32
"""How many items are read to estimate their length, and for a fingerprint."""
HASHED = 1 << 26
"""How many bytes of an array are hashed at a time: a memory-mapped array may be larger than memory."""

Collate = Callable[[list[Any]], Any]
"""A function of a list of items (input, target) that returns a minibatch (inputs, targets), as DataLoader's."""


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

    @cached_property
    def packing(self) -> Packing:
        return Packing.of(self.arrays)

    @property
    def shape(self) -> torch.Size:
        """The number of examples, and of elements of a packed one."""
        return torch.Size([len(self), sum(tensor[:1].numel() for _, tensor in named_tensors(self.arrays))])

    def __len__(self) -> int:
        return len(named_tensors(self.arrays)[0][1])

    def index_select(self, dim: int, index: Tensor, /) -> Tensor:
        """Gather examples."""
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
            for part in byte_parts(tensor):
                content.update(part)
        return content.hexdigest()


class Items:
    """The items (input, target) of a map-style data set, read when they are used.

    Args:
        collate: Makes a minibatch from a list of items. It may pad them, so their length may differ from minibatch to
            minibatch.
        float_targets: Whether targets are numbers or several labels, which losses take as floats.
    """

    def __init__(self, items: Any, collate: Collate | None = None, float_targets: bool = False):
        self.items, self.collate, self.float_targets = items, collate or default_collate, float_targets
        self.variable = collate is not None
        singles = [self._collated([row])[0] for row in (self._tried if self.variable else self._tried[:1])]
        self.packing = None if isinstance(singles[0], Tensor) else Packing.of(singles[0], self.variable)
        longest = max((self._packed(single) for single in singles), key=lambda packed: packed[0].numel())
        self.shape = torch.Size([len(items), *longest.shape[1:]])

    def __len__(self) -> int:
        return len(self.items)

    def gather(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Read some items, as packed inputs and targets."""
        inputs, targets = self._collated(rows)
        return self._packed(inputs), targets.float() if self.float_targets else targets

    def index_select(self, dim: int, index: Tensor, /) -> Tensor:
        """Gather examples."""
        return self.gather(index.tolist())[0]

    def subset(self, rows: Tensor) -> "Items":
        collate = self.collate if self.variable else None
        return Items(Subset(self.items, rows.tolist()), collate, self.float_targets)

    def fingerprint(self) -> str:
        """Return the SHA-256 of the number of items and of some of them: reading all may take hours.

        Items that are drawn at random are left out.
        """
        content = sha256(str(len(self)).encode())
        for row in self._tried:
            with keyed_torch_rng(0, "fingerprint", row):
                first, again = self.gather([row]), self.gather([row])
            for tensor, same in zip(first, again, strict=True):
                if torch.equal(tensor, same):
                    content.update(tensor.contiguous().numpy().tobytes())
        return content.hexdigest()

    @property
    def _tried(self) -> list[int]:
        return np.unique(np.linspace(0, len(self.items) - 1, TRIED).astype(int)).tolist()

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
        if not isinstance(targets, Tensor) or len(targets) != len(rows):
            raise KeelError(
                f"data: a minibatch of {len(rows)} items must have a tensor of as many targets (got "
                f"{tuple(targets.shape) if isinstance(targets, Tensor) else type(targets).__name__})"
            )
        return inputs, targets

    def _packed(self, inputs: Any) -> Tensor:
        if isinstance(inputs, Tensor):
            return inputs.float() if inputs.is_floating_point() else inputs
        assert self.packing is not None
        check_values(inputs)
        return self.packing.pack(inputs)


def byte_parts(tensor: Tensor) -> Iterable[memoryview]:
    """Yield the bytes of a tensor in parts."""
    rows = max(1, HASHED // max(1, tensor[:1].numel() * tensor.element_size())) if tensor.dim() else 1
    for first in range(0, len(tensor) if tensor.dim() else 1, rows):
        part = tensor[first : first + rows] if tensor.dim() else tensor
        yield part.contiguous().reshape(-1).numpy().data.cast("B") if part.numel() else memoryview(b"")
