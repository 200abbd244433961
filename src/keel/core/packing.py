"""Packs the input tensors of a model that takes several of them into one, as the engines handle one tensor per example.

Every element is stored as float32, which holds bytes, booleans, floats and whole numbers up to 2^24 exactly. The model
unpacks them again, with their own types (see `adapted.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from keel.errors import KeelError

LARGEST = 2**24
"""The largest whole number up to which float32 holds all of them exactly."""


@dataclass(frozen=True)
class Part:
    """One of several inputs of an example."""

    name: str | None
    """The argument of the model's forward function; None for a positional one."""
    dtype: torch.dtype
    shape: tuple[int | None, ...]
    """The shape for one example; None is the length that differs from minibatch to minibatch."""

    def elements(self, length: int) -> int:
        return prod(length if size is None else size for size in self.shape)


@dataclass(frozen=True)
class Packing:
    """How several inputs are packed into one row of numbers per example."""

    parts: tuple[Part, ...]

    @classmethod
    def of(cls, *batches: Any) -> "Packing":
        """Return the packing of minibatches that are tuples or dicts of tensors.

        Raises:
            KeelError: The minibatches have different structures, or shapes that differ in more than their length.
        """
        named = [named_tensors(batch) for batch in batches]
        structures = [[(name, tensor.dtype, tensor.dim()) for name, tensor in batch] for batch in named]
        if any(structure != structures[0] for structure in structures):
            raise KeelError("data: all inputs must have the same parts with the same types and numbers of dimensions")
        parts = []
        for position, (name, tensor) in enumerate(named[0]):
            shapes = [batch[position][1].shape[1:] for batch in named]
            sizes = zip(*shapes, strict=True)
            parts.append(Part(name, tensor.dtype, tuple(s[0] if len(set(s)) == 1 else None for s in sizes)))
        return cls(tuple(parts))

    @property
    def variable(self) -> bool:
        """Whether the length of the inputs differs from minibatch to minibatch."""
        return any(None in part.shape for part in self.parts)

    def pack(self, batch: Any) -> Tensor:
        """Return one row of float32 numbers per example."""
        return torch.cat([tensor.reshape(len(tensor), -1).float() for _, tensor in named_tensors(batch)], 1)

    def unpack(self, packed: Tensor) -> tuple[Tensor, ...] | dict[str, Tensor]:
        """Return the inputs that were packed, as a tuple or a dict."""
        length = self._length(packed.shape[1])
        columns = torch.split(packed, [part.elements(length) for part in self.parts], dim=1)
        tensors = [
            column.reshape(len(packed), *(length if size is None else size for size in part.shape)).to(part.dtype)
            for part, column in zip(self.parts, columns, strict=True)
        ]
        names = [part.name for part in self.parts if part.name is not None]
        return dict(zip(names, tensors, strict=True)) if names else tuple(tensors)

    def _length(self, width: int) -> int:
        """Return the length that varies, from the width of a packed row."""
        fixed = sum(part.elements(1) for part in self.parts if None not in part.shape)
        per_unit = sum(part.elements(1) for part in self.parts if None in part.shape)
        return (width - fixed) // per_unit if per_unit else 0


def check_values(batch: Any) -> None:
    """Raise a KeelError if a tensor of the inputs has whole numbers that float32 does not hold."""
    for position, (name, tensor) in enumerate(named_tensors(batch)):
        if tensor.dtype.is_floating_point or tensor.dtype == torch.bool or not tensor.numel():
            continue
        least, most = (int(value) for value in tensor.aminmax())
        if max(-least, most) > LARGEST:
            raise KeelError(
                f"data: input {position if name is None else name!r} must have whole numbers up to {LARGEST:,} (got "
                f"{most if most > LARGEST else least}); number its values from 0, or pass them as floats"
            )


def named_tensors(batch: Any) -> list[tuple[str | None, Tensor]]:
    """Return the tensors of a minibatch of inputs with their names; None for the parts of a tuple.

    Raises:
        KeelError: It is neither a tuple nor a dict of tensors.
    """
    pairs: Sequence[tuple[Any, Any]]
    if isinstance(batch, Mapping):
        pairs = list(batch.items())
    elif isinstance(batch, tuple | list):
        pairs = [(None, part) for part in batch]
    else:
        raise KeelError(f"data: inputs must be a tensor, a tuple or a dict of tensors (got {type(batch).__name__})")
    if not pairs:
        raise KeelError("data: inputs must have at least one part (got an empty tuple or dict)")
    for name, part in pairs:
        if not isinstance(part, Tensor):
            raise KeelError(f"data: input {name!r} must be a tensor (got {type(part).__name__})")
    return [(None if name is None else str(name), part) for name, part in pairs]
