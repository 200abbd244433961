"""What an engine is: a way to run the clients of a round. It knows nothing of the algorithm it carries."""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil
from typing import Protocol, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

from keel.algorithms.base import Context, Memory, Message
from keel.client import ClientResult, Recipe
from keel.evaluation import Evaluator
from keel.params import FlatModel
from keel.task import Task

CPU = torch.device("cpu")
T = TypeVar("T")


class Each(Sequence[T]):
    """Something for each number, as of each client, made when it is asked for: so a large cohort's memories are not
    all in RAM at once."""

    def __init__(self, numbers: Sequence[int], make: Callable[[int], T]):
        self.numbers, self.make = numbers, make

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[T]:  # a sequence's own would take an IndexError of `make` for the end
        return map(self.make, self.numbers)

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> "Each[T]": ...
    def __getitem__(self, at: int | slice) -> "T | Each[T]":
        if isinstance(at, slice):
            return Each(self.numbers[at], self.make)
        return self.make(self.numbers[at])


@dataclass(frozen=True)
class RoundWork:
    """A round as an engine gets it: the same message for every client, one memory (and set of buffers) for each."""

    cohort: np.ndarray
    received: Message
    memories: Sequence[Memory]
    ctx: Context
    buffers: Sequence[Tensor | None]

    def groups(self, size: int) -> Iterator["RoundWork"]:
        """The round of a few clients after the other: as few groups as have so many at the most, as even as can be."""
        clients, count = len(self.cohort), ceil(len(self.cohort) / size)
        for first, end in pairwise(clients * group // count for group in range(count + 1)):
            yield self.part(first, end)

    def part(self, first: int, end: int) -> "RoundWork":
        some = slice(first, end)
        return replace(self, cohort=self.cohort[some], memories=self.memories[some], buffers=self.buffers[some])

    def of(self, rows: list[int], ctx: Context) -> "RoundWork":
        """The round of some of the clients, by their place in the cohort."""
        memories, buffers = [self.memories[row] for row in rows], [self.buffers[row] for row in rows]
        return replace(self, cohort=self.cohort[rows], memories=memories, buffers=buffers, ctx=ctx)


@dataclass(frozen=True)
class Absent:
    """In the place of a client's answer: why it is not there, or not used."""

    reason: str


@dataclass(frozen=True)
class Problem:
    """What stays the same over the rounds of a run."""

    task: Task
    recipe: Recipe
    local_buffers: bool = False
    compile: bool = False
    device: torch.device = CPU
    """Where clients train and models are measured. What the server and the clients keep lies in ordinary memory."""


class Engine(Protocol):
    name: str
    remote: bool
    """Whether the clients are elsewhere, where some may be absent. What clients do on this machine is certain."""
    evaluator: Evaluator

    def probe(self, work: RoundWork) -> Iterator[Message | Absent]:
        """The clients' messages of the first phase, for algorithms that have one, in the order of the cohort."""

    def train(self, work: RoundWork) -> Iterator[ClientResult | Absent]:
        """The clients' results, in the order of the cohort, each as soon as it is needed."""

    def measure(self, theta: Tensor, buffers: Tensor | None) -> Iterator[Tensor]:
        """What Evaluator.measure gives for each part of the test examples, in their order."""

    def traffic(self) -> dict[str, int]:
        """The bytes of a round as they were sent, where clients are elsewhere; counted from then on for the next."""

    def close(self) -> None:
        """Gives back what the engine holds."""


class Simulated:
    """Of engines whose clients are made up here: all of them answer, and nothing is sent but what is counted."""

    remote = False

    def traffic(self) -> dict[str, int]:
        return {}


class InProcess(Simulated):
    """Computes in this process, on one device. A worker of a pool is given a `group` of clients at a time."""

    group = 1

    def __init__(self, problem: Problem):
        self.device, task = problem.device, problem.task
        if self.device != CPU:
            task = replace(task, module=deepcopy(task.module).to(self.device))
        self.recipe, self.data = problem.recipe, task.data
        self.model = FlatModel(task.module, task.moving)
        self.evaluator = Evaluator(task, problem.local_buffers)

    def measure(self, theta: Tensor, buffers: Tensor | None) -> Iterator[Tensor]:
        self.evaluator.look_at(theta, buffers)
        return map(self.evaluator.measure, range(len(self.evaluator.parts)))

    def close(self) -> None:
        pass
