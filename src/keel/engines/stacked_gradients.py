"""The losses and gradients of stacked clients: which program computes them, recorded or compiled."""

from typing import Protocol

import torch
from torch import Tensor

from keel.core.program import Program, simplified
from keel.core.torch_adapter import Compiled, Losses, compile_gradients, record_gradients
from keel.errors import KeelError


class Gradients(Protocol):
    """Computes each client's mean loss and gradient. All arguments have one row per client."""

    def __call__(
        self, weights: Tensor, inputs: Tensor, targets: Tensor, shares: Tensor, /
    ) -> tuple[Tensor, Tensor]: ...


Layout = tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]
"""The shapes, strides and dtypes of a program's inputs."""
MAX_PROGRAMS = 256
"""How many layouts have a program; when there are more, all are recorded again."""


class RecordedGradients:
    """Programs that are recorded when tensors of new shapes arrive, and kept for the run.

    Args:
        losses: (weights, inputs, targets) of one client -> one loss per example.
    """

    def __init__(self, losses: Losses):
        self.losses, self.programs = losses, dict[Layout, Program]()

    def for_group(self, clients: int) -> Gradients:
        """Return the gradients of one group's local training, of at most so many clients."""
        return _Bound(self)

    def program(self, layout: Layout, example: list[Tensor]) -> Program:
        if layout not in self.programs:
            if len(self.programs) >= MAX_PROGRAMS:
                self.programs.clear()
            self.programs[layout] = Program.of_clients(self.losses, example)
        return self.programs[layout]


class _Bound:
    """A program whose layers are views of one weight matrix. It is bound again when the matrix or a shape changes."""

    def __init__(self, recorded: RecordedGradients):
        self.recorded = recorded
        self.weights: Tensor | None = None
        self.layout: Layout = ()

    def __call__(self, weights: Tensor, inputs: Tensor, targets: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
        parts = [weights, inputs, targets, shares]
        layout = tuple((part.shape, part.stride(), part.dtype) for part in parts)
        if weights is not self.weights or layout != self.layout:
            self.weights, self.layout = weights, layout
            self.run = self.recorded.program(layout, parts).bind(weights)
        with torch.no_grad():
            losses, gradients = self.run(inputs, targets, shares)
        return losses, gradients


class CompiledGradients:
    """Programs that are compiled to machine code, for few shapes: compiling takes seconds.

    Args:
        losses: (weights, inputs, targets) of one client -> one loss per example.
        batch: The largest number of examples in a client's minibatch.
        chunk: The largest number of examples per pass of a full gradient.
    """

    def __init__(self, losses: Losses, batch: int, chunk: int):
        self.losses, self.batch, self.chunk = losses, batch, chunk
        self.programs: dict[tuple[torch.Size, ...], Compiled] = {}

    def for_group(self, clients: int) -> Gradients:
        """Return the gradients of one group's local training, of at most so many clients."""

        def gradients(weights: Tensor, inputs: Tensor, targets: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
            return self._padded(clients, weights, inputs, targets, shares)

        return gradients

    def _padded(
        self, clients: int, weights: Tensor, inputs: Tensor, targets: Tensor, shares: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Pad the tensors to one of a few shapes, each of which is compiled once, and run that program."""
        count, examples = shares.shape
        rows = _padded_size(count, clients)
        width = _padded_size(examples, self.batch if examples <= self.batch else self.chunk)
        padded = [_pad(weights, rows), *(_pad(part, rows, width) for part in (inputs, targets, shares))]
        shapes = tuple(part.shape for part in padded)
        if shapes not in self.programs:
            self.programs[shapes] = self._compile(padded)
        losses, gradients = self.programs[shapes](*padded)
        return losses[:count], gradients[:count]

    def _compile(self, example: list[Tensor]) -> Compiled:
        try:
            return compile_gradients(simplified(record_gradients(self.losses, example)), example)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise KeelError(f"engine.compile = true fails on this machine ({reason}); set it to false") from error


def _padded_size(count: int, largest: int) -> int:
    """Return `largest` or one of the few sizes 2, 8, 32 ... below it: the first that holds `count`."""
    size = 2
    while size < count:
        size *= 4
    return min(size, largest)


def _pad(tensor: Tensor, *sizes: int) -> Tensor:
    """Return the tensor, contiguous, with zeros appended to its rows (and columns) up to these sizes."""
    if tensor.shape[: len(sizes)] == sizes:
        return tensor.contiguous()
    padded = tensor.new_zeros(*sizes, *tensor.shape[len(sizes) :])
    padded[tuple(map(slice, tensor.shape[: len(sizes)]))] = tensor
    return padded
