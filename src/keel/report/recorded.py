"""Numbers of the records beyond the primary metric: other metrics, keys of observers, and statistics over clients."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np

from keel.core.records import Record, is_fraction, metric_label
from keel.units import number, percent

CLIENT_STATISTICS = ("mean", "std", "worst_decile", "best_decile", "count", "examples")
"""The primary metric over clients, and how many clients and examples it is over: keys of a record's `clients`."""
Tables = Mapping[int, Mapping[str, Any]]
"""What a run recorded, by round."""


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


def other_series(histories: Sequence[Sequence[Record]], primary: str, last: int | None) -> dict[str, Series]:
    """Return the numbers that Keel does not know, by their keys: other metrics and what observers added.

    Args:
        histories: The records of each run.
        primary: The key of the primary metric.
        last: The first of the rounds over which a final value is averaged; None if a run did not finish.
    """
    known = {primary, *(Record.__annotations__.keys() - {"accuracy"})}
    names = dict.fromkeys(key for history in histories for record in history for key in record if key not in known)
    return _all_series(names, [{r["round"]: r for r in history} for history in histories], last)


def client_series(histories: Sequence[Sequence[Record]], last: int | None) -> dict[str, Series]:
    """Return the statistics over clients, by their names; empty if they were not recorded. See `other_series`."""
    of_clients = [
        {r["round"]: table for r in history if isinstance(table := r.get("clients"), dict)} for history in histories
    ]
    return _all_series(CLIENT_STATISTICS, of_clients, last)


def _all_series(names: Iterable[str], runs: Sequence[Tables], last: int | None) -> dict[str, Series]:
    """Return the series of each name that has numbers."""
    series = {name: _series(name, runs, last) for name in names}
    return {name: one for name, one in series.items() if one is not None}


def _series(name: str, runs: Sequence[Tables], last: int | None) -> Series | None:
    found = [{t: table[name] for t, table in run.items() if type(table.get(name)) in (int, float)} for run in runs]
    present = [values for values in found if values]
    if not present:
        return None
    rounds = sorted(set.intersection(*map(set, present)))
    finals = [[value for t, value in values.items() if last is not None and t >= last] for values in found]
    return Series(
        name,
        np.array(rounds, dtype=np.int64),
        np.array([[values[t] for t in rounds] for values in present], dtype=np.float64),
        [fmean(values) for values in finals] if all(finals) else None,
    )
