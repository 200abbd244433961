"""Who takes part in a round. A cohort is a pure function of the seed and the round."""

from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Protocol

import numpy as np

from keel.randomness import draws


class Sampler(Protocol):
    @property
    def size(self) -> int:
        """Clients of a cohort, at the most."""

    @property
    def clients(self) -> int:
        """All of them."""

    @property
    def period(self) -> float:
        """Rounds between two turns of a client, expected: 1/C."""

    def cohort(self, round: int) -> np.ndarray:
        """The clients of this round, in the order in which their reports are aggregated."""


@dataclass(frozen=True)
class Uniform:
    """`size` of `clients`, uniformly, without replacement within the round."""

    clients: int
    size: int
    seed: int

    @property
    def period(self) -> float:
        return self.clients / self.size

    def cohort(self, round: int) -> np.ndarray:
        chosen = draws(self.seed, "cohort", round).choice(self.clients, self.size, replace=False)
        return np.sort(chosen)


@dataclass(frozen=True)
class Cyclic:
    """A fixed shuffled order, dealt out over a period of ceil(clients / size) rounds, then again.

    Each client takes part exactly once in a period, always in the same round of it (the paper's assumption "Cyclic
    Participation"). For this to hold where `size` does not divide `clients`, the cohorts of a period are made as even
    as they can be, and none is above `size`.
    """

    clients: int
    size: int
    seed: int

    @property
    def period(self) -> float:
        return ceil(self.clients / self.size)

    @cached_property
    def _cohorts(self) -> list[np.ndarray]:
        order = draws(self.seed, "cyclic order").permutation(self.clients)
        return [np.sort(part) for part in np.array_split(order, int(self.period))]

    def cohort(self, round: int) -> np.ndarray:
        return self._cohorts[(round - 1) % len(self._cohorts)]


@dataclass(frozen=True)
class Weighted:
    """`size` of the clients one after the other, each with a chance proportional to its weight, without replacement."""

    size: int
    weights: np.ndarray
    seed: int

    @property
    def clients(self) -> int:
        return len(self.weights)

    @property
    def period(self) -> float:
        return self.clients / self.size

    @cached_property
    def _cumulative(self) -> np.ndarray:
        return np.cumsum(self.weights, dtype=np.float64)

    def cohort(self, round: int) -> np.ndarray:
        # Drawing with replacement and passing over who is in already follows the same law as drawing
        # one after the other without replacement, and costs nothing for the clients that are not drawn.
        if self.size == self.clients:
            return np.arange(self.clients)
        stream = draws(self.seed, "cohort", round)
        chosen: dict[int, None] = {}
        while len(chosen) < self.size:
            points = stream.random(self.size) * self._cumulative[-1]
            for client in np.searchsorted(self._cumulative, points, side="right"):
                if len(chosen) < self.size:
                    chosen.setdefault(int(client))
        return np.sort(np.fromiter(chosen, dtype=np.int64))
