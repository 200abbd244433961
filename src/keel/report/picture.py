"""A comparison as a picture of block characters, for a terminal: what differs, without reading numbers."""

from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np

from keel.report.comparison import Comparison
from keel.report.target import smoothed

BARS = " ▁▂▃▄▅▆▇█"
WIDTH = 50
"""Columns of a curve."""
LATER = 2
"""The vertical range is that of all but the first of so many parts of the rounds."""

NO_MOMENTUM = "no momentum"
"""The label of the distance 1: that of an update of zero."""

Deviation = Mapping[int, Sequence[tuple[int, float]]]
"""By tau: rounds, and the relative deviation of the mean of the last tau pseudo-gradients from that of all clients."""


def curves_picture(comparison: Comparison) -> list[str]:
    """Draw the smoothed primary metric of each method over rounds, in the range of the later rounds of all methods."""
    curves = {
        method.label: _columns(smoothed(method.rounds, method.values.mean(axis=0), method.window))
        for method in comparison.methods
        if len(method.rounds) >= WIDTH
    }
    later = [curve[len(curve) // LATER :] for curve in curves.values()]
    later = [part[np.isfinite(part)] for part in later]
    if not later or not all(len(part) for part in later):
        return []
    low, high = min(part.min() for part in later), max(part.max() for part in later)
    metric, margin = comparison.methods[0].primary, max(map(len, curves))
    title = f"{metric.heading} over rounds, from {metric.text(low)} (empty) to {metric.text(high)} (full):"
    return [title, *(f"{label:{margin}}  {_bars(curve, low, high)}" for label, curve in curves.items())]


def deviation_picture(deviation: Deviation) -> list[str]:
    """Draw a bar for each tau: the deviation of the momentum, mean over the rounds that were measured."""
    means = {tau: fmean(value for _, value in points) for tau, points in deviation.items() if points}
    if len(means) < 2:
        return []
    lengths = {f"momentum over the last {tau} round{'s' * (tau > 1)}": mean for tau, mean in means.items()}
    lengths |= {NO_MOMENTUM: 1.0}
    margin, longest = max(map(len, lengths)), max(lengths.values())
    bars = [
        f"{label:{margin}}  {'█' * max(1, round(30 * length / longest)):30}  {length:.2f}"
        for label, length in lengths.items()
    ]
    return ["Distance from the direction of all clients:", *bars]


def _columns(values: np.ndarray) -> np.ndarray:
    """Return the last value of each of WIDTH equal parts."""
    return values[np.linspace(0, len(values), WIDTH + 1).astype(int)[1:] - 1]


def _bars(curve: np.ndarray, low: float, high: float) -> str:
    heights = np.clip((np.where(np.isfinite(curve), curve, low) - low) / max(high - low, 1e-12), 0, 1)
    return "".join(BARS[round(height * (len(BARS) - 1))] for height in heights)
