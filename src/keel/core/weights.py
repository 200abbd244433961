"""A cap on the weights of a cohort, so that no client dominates a mean."""

import numpy as np


def capped(weights: list[float], largest: float) -> list[float]:
    """The weights of which none exceeds `largest`: the others share the excess in proportion to their weights.

    Weights that do not exceed it are returned as they are. If the cohort has at most 1 / `largest` clients, the
    weights are uniform.

    Args:
        weights: Positive; they sum to one.
    """
    if max(weights) <= largest:
        return weights
    if len(weights) * largest <= 1:
        return [1 / len(weights)] * len(weights)
    given = np.asarray(weights)
    at_cap, result = np.zeros(len(given), dtype=bool), given
    while (result > largest).any():  # a share of the excess may lift another weight above the cap
        at_cap |= result > largest
        left, others = 1 - at_cap.sum() * largest, given[~at_cap].sum()
        result = np.where(at_cap, largest, given * (left / others if others else 0.0))
    return result.tolist()
