"""Robust means: what a minority of reports cannot move arbitrarily far. Each takes the place of the weighted mean.

D. Yin, Y. Chen, R. Kannan, P. Bartlett. Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates. ICML
2018 (median, trimmed mean). K. Pillutla, S. M. Kakade, Z. Harchaoui. Robust Aggregation for Federated Learning. IEEE
Transactions on Signal Processing 2022 (geometric median, by smoothed Weiszfeld iterations).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from keel.algorithms.base import Message, Report
from keel.core.clipping import euclidean_norm
from keel.core.mechanisms import ServerRound, TakenMean

ITERATIONS = 50
"""Weiszfeld iterations at most."""
SMOOTHING = 1e-6
"""The smallest distance of a report from the geometric median, relative to the mean distance."""


@dataclass(frozen=True)
class RobustMean:
    """A mean of all reports of a round, which are held in memory.

    Args:
        take: A function of the reports.
    """

    take: Callable[[Sequence[Report]], Message]
    fixed_cohort = False

    def mean(self, reports: Iterable[Report], at: ServerRound) -> TakenMean:
        held = list(reports)
        zeros = {name: torch.zeros_like(value) for name, value in at.example.items()}
        return TakenMean(self.take(held) if held else zeros, {}, {})


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
    """The point with the smallest weighted sum of distances to the reports, over all tensors together."""
    weights = torch.tensor([report.weight for report in reports], dtype=torch.float64)
    point = _combined(reports, weights)
    for _ in range(ITERATIONS):
        squares = [
            sum(euclidean_norm(value - point[name]) ** 2 for name, value in report.message.items())
            for report in reports
        ]
        distances = torch.tensor(squares, dtype=torch.float64).sqrt()
        closeness = weights / distances.clamp_min(SMOOTHING * float(distances.mean()) + 1e-30)
        before, point = point, _combined(reports, closeness / closeness.sum())
        moved = sum(euclidean_norm(point[name] - before[name]) ** 2 for name in point) ** 0.5
        if moved <= SMOOTHING * float(distances.mean()):
            break
    return point


def _combined(reports: Sequence[Report], weights: Tensor) -> Message:
    total = {name: torch.zeros_like(value) for name, value in reports[0].message.items()}
    for report, weight in zip(reports, weights.tolist(), strict=True):
        for name, value in report.message.items():
            total[name].add_(value, alpha=weight)
    return total
