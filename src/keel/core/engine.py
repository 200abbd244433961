"""The engine protocol: an engine trains the clients of a round. It never asks which algorithm it runs.

An engine is built once per run from a `Workload` and a number of workers. In every round the loop calls `probe` (only
for algorithms with a first phase) and `train` with a `RoundWork`, and `measure` where the model is evaluated. Results
come in the order of the cohort, whichever client finished first, so that a sum over them has the same bits whatever the
number of workers.

A user's engine is a factory `(workload, workers) -> Engine`, named in a spec as "module:factory" or registered by a
package in the entry-point group "keel.engines". `EngineDefaults` implements what an engine that trains one client at a
time in this process need not change. Time estimates and reports know an engine only by its name: they read the
attributes `group`, `bit_identical` and `parallel` of the factory (see `keel.engines.EngineKind`), if it has them.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil
from typing import ClassVar, Protocol, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

from keel.algorithms.base import ClientState, Context, Message
from keel.core.client import ClientResult, LocalTraining
from keel.core.evaluation import Evaluator
from keel.core.flat_model import FlatModel
from keel.core.task import Task

CPU = torch.device("cpu")
T = TypeVar("T")


class LazySequence(Sequence[T]):
    """A sequence whose elements are made on access, one per key.

    The client states of a large cohort are read one by one instead of being in RAM all together.
    """

    def __init__(self, keys: Sequence[int], make: Callable[[int], T]):
        self.keys, self.make = keys, make

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[T]:  # Sequence's default would take an IndexError raised by `make` for the end
        return map(self.make, self.keys)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> "LazySequence[T]": ...
    def __getitem__(self, index: int | slice) -> "T | LazySequence[T]":
        if isinstance(index, slice):
            return LazySequence(self.keys[index], self.make)
        return self.make(self.keys[index])


@dataclass(frozen=True)
class RoundWork:
    """The input of an engine in one round: one broadcast for the cohort, one client state and buffers per client."""

    cohort: np.ndarray
    received: Message
    client_states: Sequence[ClientState]
    ctx: Context
    buffers: Sequence[Tensor | None]

    def groups(self, size: int) -> Iterator["RoundWork"]:
        """Split the cohort into the fewest groups of at most `size` clients, as equal in size as possible."""
        clients, count = len(self.cohort), ceil(len(self.cohort) / size)
        for first, end in pairwise(clients * group // count for group in range(count + 1)):
            yield self.part(first, end)

    def part(self, first: int, end: int) -> "RoundWork":
        """Return the work of the clients at positions `first` to `end` (exclusive) of the cohort."""
        rows = slice(first, end)
        return replace(
            self, cohort=self.cohort[rows], client_states=self.client_states[rows], buffers=self.buffers[rows]
        )

    def of(self, rows: list[int], ctx: Context) -> "RoundWork":
        """Return the work of the clients at these positions of the cohort."""
        states, buffers = [self.client_states[row] for row in rows], [self.buffers[row] for row in rows]
        return replace(self, cohort=self.cohort[rows], client_states=states, buffers=buffers, ctx=ctx)


@dataclass(frozen=True)
class Dropped:
    """Takes the place of a client's reply that is missing or was rejected."""

    reason: str


@dataclass(frozen=True)
class Workload:
    """Everything that an engine needs and that does not change during a run."""

    task: Task
    local: LocalTraining
    local_buffers: bool = False
    compile: bool = False
    device: torch.device = CPU
    """The device of training and evaluation. Server state and client states stay in host memory."""
    devices: tuple[torch.device, ...] = ()
    """The accelerators that share the clients of a round, one worker process each; empty if there is only one."""

    def on(self, device: torch.device) -> "Workload":
        """Return the same workload for a single device."""
        return replace(self, device=device, devices=())


@dataclass(frozen=True)
class RoundSize:
    """The sizes from which an engine estimates its memory footprint; all but the cohort in bytes."""

    cohort: int
    model: int
    client_state: int
    """One client's state, its buffers included, as an engine holds it (float32)."""
    activations: int
    """What the forward pass of one client's minibatch keeps for the backward pass."""
    steps: int = 0
    """What one client passes from step to step within a round: optimiser state and step state."""


class Engine(Protocol):
    """Trains the clients of a round."""

    name: str
    """The name in the run's record. `keel resume` uses it as `engine.name`."""
    remote: bool
    """Whether clients are on other machines and may not reply. Simulated clients always reply."""
    group: int
    """The largest number of clients that are trained as one batched program; 1 for one client at a time."""
    bit_identical: bool
    """Whether results equal those of the engine `serial` to the bit, and not only to rounding."""
    reason: str
    """Why `auto` chose to train one client at a time; empty if it did not."""
    evaluator: Evaluator

    def processes(self, cohort: int) -> int:
        """Return how many processes train concurrently in a round of `cohort` clients."""

    def footprint(self, size: RoundSize) -> int:
        """Return the peak bytes of this machine's RAM that a round takes."""

    def probe(self, work: RoundWork) -> Iterator[Message | Dropped]:
        """Yield the messages of the first phase in the order of the cohort, for algorithms that have one."""

    def train(self, work: RoundWork) -> Iterator[ClientResult | Dropped]:
        """Yield the clients' results in the order of the cohort, each as soon as it is available."""

    def measure(self, theta: Tensor, buffers: Tensor | None) -> Iterator[Tensor]:
        """Yield the result of Evaluator.measure for each part of the test examples, in order."""

    def traffic(self) -> dict[str, int]:
        """Return the bytes sent since the last call, where clients are remote; {} elsewhere."""

    def close(self) -> None:
        """Release processes and connections. May be called at any time and repeatedly; the next round reopens them."""


def one_client_footprint(size: RoundSize) -> int:
    """Return the peak bytes of training one client at a time in one process, as measured, rounded up."""
    return 14 * size.model + 9 * size.client_state + 2 * size.activations + size.steps


class EngineDefaults:
    """What holds for an engine that trains one client at a time in this process."""

    remote = False
    group: int = 1
    bit_identical: bool = False
    reason: str = ""
    parallel: ClassVar[bool] = False
    """Whether the groups of a cohort are distributed over the workers."""

    def processes(self, cohort: int) -> int:
        return 1

    def footprint(self, size: RoundSize) -> int:
        return one_client_footprint(size)

    def traffic(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        pass


class InProcess(EngineDefaults):
    """An engine that computes in this process, on one device. A worker of `pool` or `ray` runs one, group by group."""

    def __init__(self, workload: Workload):
        self.device, task = workload.device, workload.task
        if self.device != CPU:
            task = replace(task, module=deepcopy(task.module).to(self.device))
        self.local, self.data, self.moving = workload.local, task.data, task.moving
        self.model = FlatModel(task.module, task.moving, workload.local.config.precision)
        self.evaluator = Evaluator(task, workload.local_buffers, workload.local)

    def footprint(self, size: RoundSize) -> int:
        rows = min(size.cohort, self.group)
        if rows == 1:
            return one_client_footprint(size)
        return rows * (9 * size.model + 8 * size.client_state + 2 * size.activations + size.steps)

    def measure(self, theta: Tensor, buffers: Tensor | None) -> Iterator[Tensor]:
        self.evaluator.load_weights(theta, buffers)
        return map(self.evaluator.measure, range(self.evaluator.parts))
