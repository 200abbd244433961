"""The cost of reaching a target: the one definition of "rounds and bytes until the target".

A method reaches a target in the first round in which its primary metric, averaged over the last `window` rounds, is at
least as good as the target. The average makes one lucky round count for nothing. The baseline is counted by the same
rule as every other method, so that a saving compares like with like.

Levels are larger the better: those of a minimised metric, and its target, are negated.
"""

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

WINDOW = 20
"""Rounds over which the primary metric is averaged before it is compared with a target."""
MIN_EVALUATIONS = 3
"""Minimum number of evaluations in such an average."""
TOLERANCE = 1e-9
"""Relative rounding error that two means of the same numbers may have."""


@dataclass(frozen=True)
class Spent:
    """Rounds, bytes (up and down) and wall-clock seconds."""

    rounds: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Cost:
    """The cost of reaching the target, compared with the baseline (the paper's appendix on cost)."""

    share: float
    """s = r / T: rounds until the target as a share of all rounds; 1 if the target is never reached."""
    bytes: float
    seconds: float
    bytes_saved: float
    """1 - bytes / bytes of the baseline: positive for a reduction, negative for an increase."""
    seconds_saved: float


def cost(spent: Spent | None, budget: Spent, baseline: Spent) -> Cost:
    """Return the cost of a method that `spent` this much until the target (None: it never reaches the target).

    A method that never reaches the target pays for its whole budget, as in the paper.
    """
    paid = spent or budget
    return Cost(
        paid.rounds / budget.rounds,
        paid.bytes,
        paid.seconds,
        saving(paid.bytes, baseline.bytes) or 0.0,
        saving(paid.seconds, baseline.seconds) or 0.0,
    )


def saving(amount: float, baseline: float) -> float | None:
    """Return the reduction relative to the baseline, or None if the baseline is zero."""
    return 1 - amount / baseline if baseline else None


def smoothed(rounds: np.ndarray, values: np.ndarray, window: int) -> np.ndarray:
    """Return the mean over the last `window` rounds at each evaluation; -inf before there are enough.

    The mean covers at least MIN_EVALUATIONS evaluations.
    """
    columns = np.arange(len(rounds))
    firsts = np.minimum(np.searchsorted(rounds, rounds - window, side="right"), columns - MIN_EVALUATIONS + 1)
    levels = np.full(len(rounds), -np.inf)
    complete = (firsts >= 0) & (rounds >= window)
    widths = columns - firsts + 1
    for width in np.unique(widths[complete]):  # few, since evaluations are regular
        same = complete & (widths == width)
        levels[same] = sliding_window_view(values, width)[firsts[same]].mean(axis=1)
    return levels


def first_reached(levels: np.ndarray, target: float) -> int | None:
    """Return the index of the first level that is at least the target, or None."""
    reached = np.flatnonzero(levels >= target - TOLERANCE * abs(target))
    return int(reached[0]) if len(reached) else None
