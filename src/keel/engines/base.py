"""What an engine is: a way to run the clients of a round. It knows nothing of the algorithm it carries."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from keel.algorithms.base import Algorithm, ClientContext, Memory, Message
from keel.client import ClientResult, LocalWork
from keel.randomness import draws
from keel.task import Task


@dataclass(frozen=True)
class RoundWork:
    """A round as an engine gets it: the same message for every client, one memory for each."""

    cohort: np.ndarray
    received: Message
    memories: list[Memory]
    ctx: ClientContext


@dataclass(frozen=True)
class Problem:
    """What stays the same over the rounds of a run."""

    task: Task
    algorithm: Algorithm
    work: LocalWork
    seed: int

    def minibatch_stream(self, round: int, client: int) -> np.random.Generator:
        return draws(self.seed, "minibatches", round, client)


class Engine(Protocol):
    name: str

    def probe(self, work: RoundWork) -> Iterator[Message]:
        """The clients' messages of the first phase, for algorithms that have one, in the order of the cohort."""

    def train(self, work: RoundWork) -> Iterator[ClientResult]:
        """The clients' results, in the order of the cohort, each as soon as it is needed."""
