"""Statistics of a comparison: paired differences over seeds, corrections for several comparisons, ranks over tasks.

A task is a setting in which all methods were run. Ranks and critical differences follow Demšar (2006), "Statistical
Comparisons of Classifiers over Multiple Data Sets".
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import fmean, stdev

import numpy as np
from scipy import special

CONFIDENCE = 0.95
LEVEL = 1 - CONFIDENCE
"""A corrected p value below it is significant."""


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences over seeds, with its confidence interval by Student's t."""

    mean: float
    low: float
    high: float
    p: float
    """Two-sided, for a mean of zero."""
    seeds: int

    @property
    def measured(self) -> bool:
        """Whether there is an interval, which requires two seeds."""
        return self.seeds > 1

    def map(self, function: Callable[[float], float]) -> "Difference":
        """Return the difference on another scale, given an increasing function."""
        return Difference(function(self.mean), function(self.low), function(self.high), self.p, self.seeds)


def half_width(values: Sequence[float]) -> float:
    """Return half the width of the confidence interval of the mean, by Student's t."""
    return _quantile(len(values) - 1) * stdev(values) / sqrt(len(values))


def _quantile(freedom: float) -> float:
    return float(special.stdtrit(freedom, (1 + CONFIDENCE) / 2))


def mean_difference(differences: Sequence[float]) -> Difference:
    """Return the mean of differences with its interval; a single one has an infinite interval and p = 1."""
    mean, count = fmean(differences), len(differences)
    if count < 2:
        return Difference(mean, -inf, inf, 1.0, count)
    return _difference(mean, stdev(differences) / sqrt(count), count - 1, count)


def mean_over_tasks(differences: Sequence[Difference]) -> Difference:
    """Return the mean of the differences of several tasks; its interval is over seeds, for these tasks alone.

    Each difference needs two seeds. The degrees of freedom are Welch's and Satterthwaite's.
    """
    variances = [((each.high - each.low) / 2 / _quantile(each.seeds - 1)) ** 2 for each in differences]
    weights = sum(variance**2 / (each.seeds - 1) for variance, each in zip(variances, differences, strict=True))
    freedom = sum(variances) ** 2 / weights if weights else 1.0
    mean, seeds = fmean(each.mean for each in differences), sum(each.seeds for each in differences)
    return _difference(mean, sqrt(sum(variances)) / len(differences), freedom, seeds)


def _difference(mean: float, error: float, freedom: float, seeds: int) -> Difference:
    """Return a mean with this standard error, with its interval and p value."""
    if error == 0:
        return Difference(mean, mean, mean, float(mean == 0), seeds)
    half, p = _quantile(freedom) * error, 2 * float(special.stdtr(freedom, -abs(mean) / error))
    return Difference(mean, mean - half, mean + half, p, seeds)


def paired_difference(first: Mapping[int, float], second: Mapping[int, float]) -> Difference | None:
    """Return `first` minus `second` over the seeds that both have; None if there is none."""
    common = [first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())]
    return mean_difference(common) if common else None


def holm(ps: Sequence[float]) -> list[float]:
    """Return p values corrected by Holm's procedure for the number of comparisons."""
    corrected, largest = [0.0] * len(ps), 0.0
    for place, number in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        largest = max(largest, min(1.0, (len(ps) - place) * ps[number]))
        corrected[number] = largest
    return corrected


@dataclass(frozen=True)
class Ranking:
    """Methods ranked over tasks; 1 is the best, and equal methods share the mean of their ranks."""

    ranks: dict[str, float]
    """The mean rank of each method, best first."""
    tasks: int
    chi_square: float
    """Friedman's statistic."""
    p: float
    """Of Iman and Davenport's F statistic, for methods without differences."""
    critical_difference: float
    """Nemenyi's: mean ranks that differ by less are not separated."""

    @property
    def groups(self) -> list[list[str]]:
        """The largest groups of at least two methods that are not separated, best first."""
        names = list(self.ranks)
        groups: list[list[str]] = []
        for number, first in enumerate(names):
            group = [name for name in names[number:] if self.ranks[name] - self.ranks[first] < self.critical_difference]
            if len(group) > 1 and not (groups and group[-1] == groups[-1][-1]):
                groups.append(group)
        return groups


def task_ranks(scores: Mapping[str, float]) -> dict[str, float]:
    """Return the rank of each method in one task; a larger score is better."""
    values = list(scores.values())
    return {
        name: 1 + sum(other > score for other in values) + (sum(other == score for other in values) - 1) / 2
        for name, score in scores.items()
    }


def rank_methods(tasks: Sequence[Mapping[str, float]], level: float = LEVEL) -> Ranking | None:
    """Return the ranking of the methods that have a score in every task.

    Returns:
        None if there are fewer than two tasks or three methods.
    """
    names = [name for name in tasks[0] if all(name in scores for scores in tasks)] if tasks else []
    count, methods = len(tasks), len(names)
    if count < 2 or methods < 3:
        return None
    ranked = [task_ranks({name: scores[name] for name in names}) for scores in tasks]
    means = {name: fmean(ranks[name] for ranks in ranked) for name in names}
    squares = sum(mean**2 for mean in means.values())
    chi_square = 12 * count / (methods * (methods + 1)) * (squares - methods * (methods + 1) ** 2 / 4)
    rest = count * (methods - 1) - chi_square
    f = (count - 1) * chi_square / rest if rest > 1e-9 else inf  # zero if all tasks agree
    return Ranking(
        dict(sorted(means.items(), key=lambda item: item[1])),
        count,
        chi_square,
        float(special.fdtrc(methods - 1, (methods - 1) * (count - 1), f)) if f < inf else 0.0,
        critical_difference(methods, count, level),
    )


def critical_difference(methods: int, tasks: int, level: float = LEVEL) -> float:
    """Return Nemenyi's critical difference of mean ranks."""
    from scipy.stats import studentized_range  # takes a second to import, and few commands need it

    quantile = float(studentized_range.ppf(1 - level, methods, np.inf)) / sqrt(2)
    return quantile * sqrt(methods * (methods + 1) / (6 * tasks))
