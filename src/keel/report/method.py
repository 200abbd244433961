"""A method of a comparison: the runs that differ only in the seed, with their statistics over seeds."""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from math import inf
from statistics import fmean, stdev
from typing import Any

import numpy as np

from keel.core.records import PrimaryMetric
from keel.report.loaded_run import LoadedRun, Table
from keel.report.recorded import Series
from keel.report.significance import half_width
from keel.report.target import WINDOW, Spent, first_reached, smoothed


@dataclass(frozen=True)
class Method:
    """Runs that differ only in the seed."""

    label: str
    table: Table
    shared: Table
    """The fields that its runs share, see `LoadedRun.shared`."""
    primary: PrimaryMetric
    task: tuple[Any, ...]
    """Fingerprint of the data, the model and the loss: specs may be equal where these were passed in Python."""
    seeds: list[int]
    evaluated: list[int]
    """Seeds with at least one evaluation; a run that has just begun, or diverged early, has none."""
    rounds: np.ndarray
    """Rounds in which every run in `evaluated` was evaluated."""
    values: np.ndarray
    """The primary metric: one row per seed in `evaluated`, one column per round in `rounds`."""
    loss: np.ndarray
    """Test loss, in the same shape."""
    bytes: np.ndarray
    """Cumulative bytes, up and down, at each round in `rounds`: mean over seeds."""
    seconds: np.ndarray
    """Cumulative wall-clock time at each round in `rounds`: mean over seeds."""
    total: Spent
    """Total over the rounds that were run: mean over seeds."""
    budget: Spent
    """Total over the rounds of the spec: mean over seeds. Runs that stopped early are extrapolated."""
    final: list[float] | None
    """Final value of the primary metric of each seed, averaged over the last rounds; None if a run did not finish."""
    modelled: bool
    """Whether wall-clock time is that of a network model; otherwise it was measured."""
    other: dict[str, Series]
    """Other metrics and numbers that observers added to the records, by their keys."""
    clients: dict[str, Series]
    """Statistics of the primary metric over clients, where they were recorded."""
    status: str
    runs: list[LoadedRun]
    """The runs, in the order of `seeds`."""

    @property
    def algorithm(self) -> str:
        return self.table["algorithm"]["name"]

    @property
    def names(self) -> tuple[str, str]:
        """What a baseline may be called: the algorithm's name in the spec, and the title of the runs."""
        return self.algorithm, self.runs[0].title

    @property
    def setting(self) -> Table:
        """What two methods must share to be comparable: all but the algorithm and its learning rates."""
        local = {k: v for k, v in self.table["local"].items() if k in ("epochs", "steps", "batch", "drop_last")}
        common = ("rounds", "data", "model", "participation", "evaluation")
        return {
            **{k: self.shared[k] for k in common},
            "stop": self.shared.get("stop", {}),
            "local": local,
            "task": self.task,
            "metric": self.primary.name,
        }

    @cached_property
    def setting_key(self) -> Hashable:
        """The setting as a key of a dictionary: methods are comparable if their keys are equal."""
        return _hashable(self.setting)

    @property
    def window(self) -> int:
        """Rounds over which the primary metric is averaged before it is compared with a target."""
        return min(WINDOW, self.table["evaluation"]["last"])

    @cached_property
    def value_mean(self) -> float | None:
        return fmean(self.final) if self.final else None

    @cached_property
    def score(self) -> float:
        """The final value, larger the better; -inf if there is none."""
        return -inf if self.value_mean is None else self._sign * self.value_mean

    @cached_property
    def value_std(self) -> float | None:
        """Sample standard deviation over seeds; None for a single seed."""
        return stdev(self.final) if self.final and len(self.final) > 1 else None

    @property
    def value_interval(self) -> float | None:
        """Half the width of the 95 % confidence interval of the mean over seeds, by Student's t."""
        if self.final is None or self.value_std is None:
            return None
        return half_width(self.final)

    def reaches(self, target: float) -> Spent | None:
        """Return what was spent until the primary metric, averaged over seeds, first reaches the target, or None."""
        column = first_reached(self._levels, self._sign * target)
        return None if column is None else self._spent(column)

    def reaches_by_seed(self, target: float) -> list[int | None]:
        """Return the round in which each seed first reaches the target, in the order of `seeds`."""
        if self.status == "diverged":
            return [None] * len(self.seeds)
        columns = {
            seed: first_reached(smoothed(self.rounds, self._sign * curve, self.window), self._sign * target)
            for seed, curve in zip(self.evaluated, self.values, strict=True)
        }
        reached = [columns.get(seed) for seed in self.seeds]
        return [None if column is None else int(self.rounds[column]) for column in reached]

    @cached_property
    def milestones(self) -> list[tuple[float, Spent]]:
        """Each new best value of the smoothed primary metric, and what was spent until then.

        The first milestone that is not worse than a target is where `reaches` finds it: the page looks it up here.
        """
        best, milestones = -np.inf, []
        for column, level in enumerate(self._levels):
            if level > best:
                best = level
                milestones.append((float(self._sign * level), self._spent(column)))
        return milestones

    @cached_property
    def _levels(self) -> np.ndarray:
        """The mean over seeds, smoothed, larger the better; empty if a run diverged, which reaches no target."""
        if self.status == "diverged" or not len(self.rounds):
            return np.empty(0)
        return smoothed(self.rounds, self._sign * self.values.mean(axis=0), self.window)

    @property
    def _sign(self) -> int:
        return 1 if self.primary.maximize else -1

    def _spent(self, column: int) -> Spent:
        return Spent(int(self.rounds[column]), int(self.bytes[column]), float(self.seconds[column]))


def _hashable(value: Any) -> Hashable:
    """Return tables and lists as sets and tuples."""
    if isinstance(value, dict):
        return frozenset((key, _hashable(each)) for key, each in value.items())
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value
