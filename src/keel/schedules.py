"""Learning rates over rounds."""

from math import cos, pi
from typing import Literal

Schedule = Literal["constant", "cosine", "linear", "exponential"]


def learning_rate(initial: float, schedule: Schedule, decay: float, round: int, rounds: int) -> float:
    """The rate of this round (the first is 1). Cosine and linear fall to zero after the last round."""
    done = (round - 1) / rounds
    match schedule:
        case "constant":
            return initial
        case "cosine":
            return initial * (1 + cos(pi * done)) / 2
        case "linear":
            return initial * (1 - done)
        case "exponential":
            return initial * decay ** (round - 1)
