"""Packs the input tensors of a model that takes several of them into one, as the engines handle one tensor per example.

Every element is stored as float32, which holds bytes, booleans, floats and whole numbers up to 2^24 exactly. The model
unpacks them again, as float32, int64 (which embeddings take) or booleans (see `adapted.py`).
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
    """The shape for one example; None for a size that differs from minibatch to minibatch."""


@dataclass(frozen=True)
class Packing:
    """How several inputs are packed into one row of numbers per example.

    If sizes differ from minibatch to minibatch, a row begins with the sizes of all parts.
    """

    parts: tuple[Part, ...]

    @classmethod
    def of(cls, batch: Any, variable: bool = False) -> "Packing":
        """Return the packing of a minibatch that is a tuple or a dict of tensors.

        Args:
            variable: Whether other minibatches may have other sizes.
        """
        parts = []
        for name, tensor in named_tensors(batch):
            dtype = torch.float32 if tensor.is_floating_point() else torch.int64
            dtype = torch.bool if tensor.dtype == torch.bool else dtype
            shape = tuple(tensor.shape[1:])
            parts.append(Part(name, dtype, (None,) * len(shape) if variable else shape))
        return cls(tuple(parts))

    @property
    def variable(self) -> bool:
        """Whether sizes differ from minibatch to minibatch."""
        return any(None in part.shape for part in self.parts)

    def pack(self, batch: Any) -> Tensor:
        """Return one row of float32 numbers per example.

        Raises:
            KeelError: The parts are not those of the packing.
        """
        tensors = [tensor for _, tensor in named_tensors(batch)]
        if not self._fits(tensors):
            shapes = ", ".join(str(tuple(tensor.shape[1:])) for tensor in tensors)
            raise KeelError(
                f"data: inputs of shape {shapes} differ in their shape from the first inputs "
                f"({', '.join(str(part.shape) for part in self.parts)}); pad them, or pass collate="
            )
        rows = [tensor.reshape(len(tensor), -1).float() for tensor in tensors]
        if self.variable:
            sizes = torch.tensor([float(size) for tensor in tensors for size in tensor.shape[1:]])
            rows.insert(0, sizes.expand(len(tensors[0]), -1))
        return torch.cat(rows, 1)

    def unpack(self, packed: Tensor) -> tuple[Tensor, ...] | dict[str, Tensor]:
        """Return the inputs that were packed, as a tuple or a dict."""
        shapes: list[tuple[int, ...]] = [tuple(size or 0 for size in part.shape) for part in self.parts]
        if self.variable:
            ranks = [len(part.shape) for part in self.parts]
            sizes = iter(packed[0, : sum(ranks)].long().tolist())
            packed, shapes = packed[:, sum(ranks) :], [tuple(next(sizes) for _ in range(rank)) for rank in ranks]
        columns = torch.split(packed, [prod(shape) for shape in shapes], dim=1)
        tensors = [
            column.reshape(len(packed), *shape).to(part.dtype)
            for part, column, shape in zip(self.parts, columns, shapes, strict=True)
        ]
        names = [part.name for part in self.parts if part.name is not None]
        return dict(zip(names, tensors, strict=True)) if names else tuple(tensors)

    def _fits(self, tensors: Sequence[Tensor]) -> bool:
        shapes = [tuple(tensor.shape[1:]) for tensor in tensors]
        if self.variable:
            return [len(shape) for shape in shapes] == [len(part.shape) for part in self.parts]
        return shapes == [part.shape for part in self.parts]


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
