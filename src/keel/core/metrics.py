"""Metrics of a model on test examples, from chunks that any number of workers measure.

A metric turns the outputs of a chunk into a few tensors, its state, and the states of all chunks into one number. The
states are joined in the order of the chunks, so the number does not depend on the workers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from keel.errors import KeelError

DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.bool, torch.uint8)
"""The dtypes of a state, by their number in an encoded state."""


class Metric(Protocol):
    """A metric that is computed chunk by chunk."""

    @property
    def name(self) -> str:
        """The key in a record."""

    @property
    def maximize(self) -> bool | None:
        """Whether larger is better; None if that is not known."""

    def state(self, outputs: Tensor, targets: Tensor) -> list[Tensor]:
        """Return what one chunk contributes."""

    def value(self, states: Sequence[list[Tensor]]) -> float:
        """Return the metric from the contributions of all chunks, in order."""


@dataclass(frozen=True)
class FunctionMetric:
    """A user's function of all outputs and all targets."""

    name: str
    function: Callable[[Tensor, Tensor], Any]
    maximize: bool | None = None

    def state(self, outputs: Tensor, targets: Tensor) -> list[Tensor]:
        return [outputs, targets]

    def value(self, states: Sequence[list[Tensor]]) -> float:
        outputs, targets = (torch.cat(parts) for parts in zip(*states, strict=True))
        return as_number(self.name, self.function(outputs, targets))


def as_number(name: str, value: Any) -> float:
    """Return what a metric computed as a float.

    Raises:
        KeelError: It is not one number.
    """
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise KeelError(f"evaluation.metrics: {name!r} must return one number (got {shape})") from None


def counted_targets(targets: Tensor, specials: tuple[int, ...]) -> Tensor:
    """Return which targets are class labels that count: neither special nor negative."""
    return torch.isin(targets, torch.tensor(specials, device=targets.device), invert=True) & (targets >= 0)


def encode(states: Sequence[list[Tensor]]) -> Tensor:
    """Return the states of several metrics as one float64 vector, which workers can share."""
    numbers = [torch.tensor([float(len(states))], dtype=torch.float64)]
    for tensors in states:
        numbers.append(torch.tensor([float(len(tensors))], dtype=torch.float64))
        for tensor in tensors:
            if tensor.dtype not in DTYPES:
                tensor = tensor.float() if tensor.is_floating_point() else tensor.long()
            header = [float(DTYPES.index(tensor.dtype)), float(tensor.dim()), *map(float, tensor.shape)]
            numbers += [torch.tensor(header, dtype=torch.float64), tensor.reshape(-1).to("cpu", torch.float64)]
    return torch.cat(numbers)


def decode(vector: Tensor) -> list[list[Tensor]]:
    """Return the states that were encoded. The vector may be longer than they are."""
    position = 0

    def take(count: int) -> Tensor:
        nonlocal position
        position += count
        return vector[position - count : position]

    def read() -> Tensor:
        dtype, dimensions = (int(number) for number in take(2))
        shape = [int(size) for size in take(dimensions)]
        return take(int(torch.tensor(shape).prod()) if shape else 1).to(DTYPES[dtype]).reshape(shape)

    return [[read() for _ in range(int(take(1)))] for _ in range(int(take(1)))]
