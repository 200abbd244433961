"""Client sampling. A cohort is a pure function of the seed and the round.

A sampler of your own is a class or function called as sampler(sizes=..., size=..., seed=...): the number of examples of
each client, the cohort size and the seed. It returns an object with the attributes of `Sampler`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Protocol

import numpy as np

from keel.core.randomness import keyed_rng


class Sampler(Protocol):
    @property
    def size(self) -> int:
        """The size of the largest cohort, S."""

    @property
    def clients(self) -> int:
        """The number of clients, N."""

    @property
    def period(self) -> float:
        """The expected number of rounds between two participations of a client, 1/C."""

    def cohort(self, round: int) -> np.ndarray:
        """The clients of this round, from 1 on."""


@dataclass(frozen=True)
class Uniform:
    """`size` of `clients`, drawn uniformly without replacement within the round."""

    clients: int
    size: int
    seed: int

    @property
    def period(self) -> float:
        return self.clients / self.size

    def cohort(self, round: int) -> np.ndarray:
        chosen = keyed_rng(self.seed, "cohort", round).choice(self.clients, self.size, replace=False)
        return np.sort(chosen)


@dataclass(frozen=True)
class Cyclic:
    """A fixed shuffled order, split over a period of ceil(clients / size) rounds, then repeated.

    Each client takes part exactly once per period, always in the same round of it (the paper's assumption "Cyclic
    Participation"). Where `size` does not divide `clients`, the cohorts are as equal as possible and none exceeds
    `size`.
    """

    clients: int
    size: int
    seed: int

    @property
    def period(self) -> float:
        return ceil(self.clients / self.size)

    @cached_property
    def _cohorts(self) -> list[np.ndarray]:
        order = keyed_rng(self.seed, "cyclic order").permutation(self.clients)
        return [np.sort(part) for part in np.array_split(order, int(self.period))]

    def cohort(self, round: int) -> np.ndarray:
        return self._cohorts[(round - 1) % len(self._cohorts)]


@dataclass(frozen=True)
class Weighted:
    """`size` clients drawn one after the other without replacement, with probability proportional to their weight."""

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
        # Drawing with replacement and skipping repeats has the same distribution as drawing one after the other
        # without replacement, and its cost does not grow with the number of idle clients.
        if self.size == self.clients:
            return np.arange(self.clients)
        rng = keyed_rng(self.seed, "cohort", round)
        chosen: dict[int, None] = {}
        while len(chosen) < self.size:
            points = rng.random(self.size) * self._cumulative[-1]
            for client in np.searchsorted(self._cumulative, points, side="right"):
                if len(chosen) < self.size:
                    chosen.setdefault(int(client))
        return np.sort(np.fromiter(chosen, dtype=np.int64))


@dataclass(frozen=True)
class Poisson:
    """Each client takes part with probability expected / clients, independently of the others and of other rounds.

    A cohort may be empty. Privacy accounting is tightest for this sampler.
    """

    clients: int
    expected: int
    seed: int
    may_be_empty = True

    @property
    def size(self) -> int:
        """A size that a cohort exceeds less than once in a billion rounds."""
        return min(self.clients, ceil(self.expected + 6 * self.expected**0.5 + 6))

    @property
    def period(self) -> float:
        return self.clients / self.expected

    def cohort(self, round: int) -> np.ndarray:
        return np.flatnonzero(keyed_rng(self.seed, "cohort", round).random(self.clients) < self.expected / self.clients)


def _uniform(sizes: np.ndarray, size: int, seed: int) -> Sampler:
    return Uniform(len(sizes), size, seed)


def _cyclic(sizes: np.ndarray, size: int, seed: int) -> Sampler:
    return Cyclic(len(sizes), size, seed)


def _weighted(sizes: np.ndarray, size: int, seed: int) -> Sampler:
    return Weighted(size, sizes, seed)


def _poisson(sizes: np.ndarray, size: int, seed: int) -> Sampler:
    return Poisson(len(sizes), size, seed)


SAMPLERS: dict[str, Callable[..., Sampler]] = {
    "uniform": _uniform,
    "cyclic": _cyclic,
    "weighted": _weighted,
    "poisson": _poisson,
}
"""The built-in samplers by name."""
