"""Robust means: what a minority of reports cannot move arbitrarily far. Each takes the place of the weighted mean.

D. Yin, Y. Chen, R. Kannan, P. Bartlett. Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates. ICML
2018 (median, trimmed mean). K. Pillutla, S. M. Kakade, Z. Harchaoui. Robust Aggregation for Federated Learning. IEEE
Transactions on Signal Processing 2022 (geometric median, by smoothed Weiszfeld iterations).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from keel.algorithms.base import Message, Report
from keel.core.mechanisms import ServerRound, TakenMean
from keel.privacy.clipping import joint_norm

ITERATIONS = 50
"""Weiszfeld iterations at most."""
SMOOTHING = 1e-6
"""The smallest distance of a report from the geometric median, relative to the median distance."""


@dataclass(frozen=True)
class RobustMean:
    """A mean of all reports of a round, which are held in memory. Those that are not finite are left out.

    Args:
        take: A function of the reports.
    """

    take: Callable[[Sequence[Report]], Message]
    fixed_cohort = False

    def mean(self, reports: Iterable[Report], at: ServerRound) -> TakenMean:
        held = list(reports)
        finite = [report for report in held if isfinite(joint_norm(report.message))]
        zeros = {name: torch.zeros_like(value) for name, value in at.example.items()}
        return TakenMean(self.take(finite or held) if held else zeros, {}, {})


def median(reports: Sequence[Report]) -> Message:
    """The median of each coordinate; of an even number of reports, the mean of the two middle ones."""
    return trimmed_mean(reports, 0.5)


def trimmed_mean(reports: Sequence[Report], trim: float) -> Message:
    """The mean of each coordinate without its smallest and its largest `trim` of the values, at least one each."""
    cut = min(max(1, int(trim * len(reports))), (len(reports) - 1) // 2)

    def of(values: Tensor) -> Tensor:
        return values.sort(dim=0).values[cut : len(reports) - cut].mean(dim=0)

    return {name: of(torch.stack([report.message[name] for report in reports])) for name in reports[0].message}


def geometric_median(reports: Sequence[Report]) -> Message:
    """The point with the smallest weighted sum of distances to the reports, over all tensors together.

    The iterations begin at the median and measure in units of the median distance: the mean and the mean distance grow
    with a single long report.
    """
    weights = torch.tensor([report.weight for report in reports], dtype=torch.float64)
    point = median(reports)
    for _ in range(ITERATIONS):
        distances = torch.tensor([_distance(report.message, point) for report in reports], dtype=torch.float64)
        least = SMOOTHING * float(distances.median())
        closeness = weights / distances.clamp_min(least + 1e-30)
        before, point = point, _combined(reports, closeness / closeness.sum())
        if _distance(point, before) <= least:
            break
    return point


def _distance(one: Message, other: Message) -> float:
    return joint_norm({name: value - other[name] for name, value in one.items()})


def _combined(reports: Sequence[Report], weights: Tensor) -> Message:
    total = {name: torch.zeros_like(value) for name, value in reports[0].message.items()}
    for report, weight in zip(reports, weights.tolist(), strict=True):
        for name, value in report.message.items():
            total[name].add_(value, alpha=weight)
    return total
