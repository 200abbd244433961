"""Memory that `pool` shares with its forked workers: the broadcast of a round, and slots for groups of clients."""

from dataclasses import dataclass
from mmap import mmap

import numpy as np
import torch
from torch import Tensor

from keel.algorithms.base import ClientState, Context, Message
from keel.core.client import ClientResult
from keel.core.engine import RoundWork
from keel.errors import KeelError


@dataclass(frozen=True)
class Slot:
    """The inputs and results of one group of clients; every tensor has one row per client."""

    state_before: ClientState
    message: Message
    state_after: ClientState
    probe: Message
    steps: Tensor
    loss: Tensor
    buffers: Tensor

    def fill(self, work: RoundWork) -> None:
        """Write the client states and buffers that a group starts from."""
        for row, (state, buffers) in enumerate(zip(work.client_states, work.buffers, strict=True)):
            _write(self.state_before, row, state)
            if buffers is not None:
                self.buffers[row] = buffers

    def states(self, rows: range) -> list[ClientState]:
        return [{name: value[row] for name, value in self.state_before.items()} for row in rows]

    def buffers_of(self, rows: range) -> list[Tensor | None]:
        return [self.buffers[row] if self.buffers.numel() else None for row in rows]

    def write_result(self, row: int, result: ClientResult) -> None:
        _write(self.message, row, result.message)
        _write(self.state_after, row, result.state)
        self.steps[row], self.loss[row] = result.steps, result.loss
        if result.buffers is not None:
            self.buffers[row] = result.buffers

    def write_probe(self, row: int, message: Message) -> None:
        _write(self.probe, row, message)

    def read_probe(self, row: int) -> Message:
        return {name: value[row].clone() for name, value in self.probe.items()}

    def read_result(self, row: int) -> ClientResult:
        """Return a client's result. Its client state is a view, valid until the next result is requested."""
        buffers = self.buffers[row].clone() if self.buffers.numel() else None
        message = {name: value[row].clone() for name, value in self.message.items()}
        state = {name: value[row] for name, value in self.state_after.items()}
        return ClientResult(message, state, int(self.steps[row]), self.loss[row].clone(), buffers)


@dataclass(frozen=True)
class Shared:
    """The memory that the parent and its workers both see."""

    ctx: Tensor
    sizes: tuple[int, ...]
    received: Message
    slots: list[Slot]
    theta: Tensor
    buffers: Tensor

    @classmethod
    def for_round(
        cls,
        work: RoundWork,
        result: tuple[Message, ClientState],
        *,
        rows: int,
        slots: int,
        probe: Message,
        weights: Tensor,
        buffers: Tensor,
    ) -> "Shared":
        """Allocate memory for rounds like `work`.

        Args:
            result: A message and a client state like those that clients report.
            rows: Clients of a slot.
            probe: A message of the first phase; empty if there is none.
        """
        message, state = result

        def slot() -> Slot:
            return Slot(
                _rows_like(work.client_states[0], rows),
                _rows_like(message, rows),
                _rows_like(state, rows),
                _rows_like(probe, rows),
                _shared_like(torch.zeros(rows, dtype=torch.int64)),
                _shared_like(torch.zeros(rows)),
                _shared_like(buffers.expand(rows, -1)),
            )

        return cls(
            _shared_like(torch.zeros(len(_numbers(work.ctx)), dtype=torch.float64)),
            work.ctx.sizes,
            {name: _shared_like(value) for name, value in work.received.items()},
            [slot() for _ in range(slots)],
            _shared_like(weights),
            _shared_like(buffers),
        )

    def fits(self, received: Message, training: bool) -> bool:
        """Return whether a broadcast can replace the last one.

        For training it needs the same names, or clients would see what is left of the last broadcast. A probe reads
        theta alone.
        """
        same_names = bool(self.slots[0].message) and self.received.keys() == received.keys()
        return _has_room(self.received, received) and (same_names or not training)

    def set_round(self, ctx: Context, received: Message) -> None:
        self.ctx.copy_(torch.tensor(_numbers(ctx), dtype=torch.float64))
        for name, value in received.items():
            self.received[name].copy_(value)

    def set_model(self, theta: Tensor, buffers: Tensor | None) -> None:
        self.theta.copy_(theta)
        if buffers is not None:
            self.buffers.copy_(buffers)

    def work(self, group: np.ndarray, slot: Slot) -> RoundWork:
        """Return a group's part of the round."""
        round, clients, cohort, *rates = self.ctx.tolist()
        ctx, rows = Context(int(round), int(clients), int(cohort), *rates, sizes=self.sizes), range(len(group))
        return RoundWork(group, self.received, slot.states(rows), ctx, slot.buffers_of(rows))


def _numbers(ctx: Context) -> list[float]:
    """Return what changes from round to round."""
    return [value for name, value in vars(ctx).items() if name != "sizes"]


def _write(rows: Message, row: int, values: Message) -> None:
    targets = {name: tensor[row] for name, tensor in rows.items()}
    if targets.keys() != values.keys() or not _has_room(targets, values):
        raise KeelError(
            f"engine.name = 'pool' requires messages and client states that keep their names, types and shapes "
            f"(from {_form(targets)} to {_form(values)}); use 'serial'"
        )
    for name, value in values.items():
        targets[name].copy_(value)


def _has_room(targets: Message, values: Message) -> bool:
    return all(
        name in targets and targets[name].shape == value.shape and targets[name].dtype == value.dtype
        for name, value in values.items()
    )


def _form(tensors: Message) -> str:
    """Return the names of tensors with their types and shapes, as in `c: float32 [10, 5]`."""
    forms = [
        f"{name}: {str(tensors[name].dtype).removeprefix('torch.')} {list(tensors[name].shape)}"
        for name in sorted(tensors)
    ]
    return ", ".join(forms) or "none"


def _rows_like(tensors: Message, rows: int) -> Message:
    return {name: _shared_like(value.expand(rows, *value.shape)) for name, value in tensors.items()}


def _shared_like(tensor: Tensor) -> Tensor:
    """Return a tensor of this shape and type in memory that forked processes share."""
    if tensor.numel() == 0:
        return tensor
    memory = mmap(-1, tensor.numel() * tensor.element_size())
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
