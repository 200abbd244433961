"""What an engine is: a way to run the clients of a round. It knows nothing of the algorithm it carries."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from keel.algorithms.base import Context, Memory, Message
from keel.client import ClientResult, Recipe
from keel.task import Task


@dataclass(frozen=True)
class RoundWork:
    """A round as an engine gets it: the same message for every client, one memory (and set of buffers) for each."""

    cohort: np.ndarray
    received: Message
    memories: list[Memory]
    ctx: Context
    buffers: list[Tensor | None]


@dataclass(frozen=True)
class Problem:
    """What stays the same over the rounds of a run."""

    task: Task
    recipe: Recipe


class Engine(Protocol):
    name: str

    def probe(self, work: RoundWork) -> Iterator[Message]:
        """The clients' messages of the first phase, for algorithms that have one, in the order of the cohort."""

    def train(self, work: RoundWork) -> Iterator[ClientResult]:
        """The clients' results, in the order of the cohort, each as soon as it is needed."""
