"""Numbers of the records beyond the primary metric: other metrics, keys of observers, and statistics over clients."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np

from keel.core.records import Record, is_fraction, metric_label
from keel.report.loaded_run import Columns, History
from keel.units import number, percent

EPSILON = "epsilon"
"""The key of a record for the privacy loss until its round."""
CLIENT_STATISTICS = ("mean", "std", "worst_decile", "best_decile", "count", "examples")
"""The primary metric over clients, and how many clients and examples it is over: keys of a record's `clients`."""


@dataclass(frozen=True)
class Series:
    """One number of the records over rounds, for the runs of a method that recorded it."""

    name: str
    rounds: np.ndarray
    """Rounds in which each of these runs recorded it."""
    values: np.ndarray
    """One row per run, one column per round."""
    final: list[float] | None
    """The mean of each run over the last rounds; None if a run of the method did not finish or did not record it."""

    @property
    def label(self) -> str:
        return metric_label(self.name)

    @property
    def is_fraction(self) -> bool:
        """Whether it is shown in percent. A user's number may have the name of a metric."""
        return is_fraction(self.name) and bool(((self.values >= 0) & (self.values <= 1)).all())

    @property
    def mean(self) -> float | None:
        return fmean(self.final) if self.final else None

    @property
    def std(self) -> float | None:
        """Sample standard deviation over seeds; None for a single seed."""
        return stdev(self.final) if self.final and len(self.final) > 1 else None

    @property
    def text(self) -> str:
        """The mean with its standard deviation over seeds."""
        return (percent if self.is_fraction else number)(self.mean, self.std)


def other_series(histories: Sequence[History], primary: str, last: int | None) -> dict[str, Series]:
    """Return the numbers that Keel does not know, by their keys: other metrics and what observers added.

    Args:
        histories: The records of each run.
        primary: The key of the primary metric.
        last: The first of the rounds over which a final value is averaged; None if a run did not finish.
    """
    known = {primary, EPSILON, *(Record.__annotations__.keys() - {"accuracy"})}
    names = dict.fromkeys(key for history in histories for key in history.columns if key not in known)
    return _all_series(names, [history.columns for history in histories], last)


def client_series(histories: Sequence[History], last: int | None) -> dict[str, Series]:
    """Return the statistics over clients, by their names; empty if they were not recorded. See `other_series`."""
    return _all_series(CLIENT_STATISTICS, [history.over_clients for history in histories], last)


def common_rounds(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Return the rounds in which each of these columns has a number."""
    length = min(map(len, columns), default=0)
    present = np.ones(length, dtype=bool)
    for column in columns:
        present &= ~np.isnan(column[:length])
    return np.flatnonzero(present) + 1


def _all_series(names: Iterable[str], runs: Sequence[Columns], last: int | None) -> dict[str, Series]:
    """Return the series of each name that has numbers."""
    series = {name: _series(name, runs, last) for name in names}
    return {name: one for name, one in series.items() if one is not None}


def _series(name: str, runs: Sequence[Columns], last: int | None) -> Series | None:
    present = [run[name] for run in runs if name in run]
    if not present:
        return None
    rounds = common_rounds(present)
    finals = [[] if last is None else _numbers(run[name][max(0, last - 1) :]) for run in runs if name in run]
    complete = len(present) == len(runs) and all(finals)
    return Series(
        name,
        rounds,
        np.array([column[rounds - 1] for column in present]),
        [fmean(values) for values in finals] if complete else None,
    )


def _numbers(column: np.ndarray) -> list[float]:
    return column[~np.isnan(column)].tolist()
