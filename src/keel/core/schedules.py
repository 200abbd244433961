"""Learning rates over rounds."""

from dataclasses import dataclass
from math import cos, pi
from typing import Literal

Schedule = Literal["constant", "cosine", "linear", "exponential"]


@dataclass(frozen=True)
class LearningRate:
    """A learning rate as a function of the round. Cosine and linear fall to zero after the last of `rounds`.

    In the first `warmup` rounds it rises linearly to the schedule's value: round t has t / (warmup + 1) of it.
    """

    initial: float
    schedule: Schedule
    decay: float
    """The factor per round of the exponential schedule."""
    rounds: int
    warmup: int = 0

    def __call__(self, round: int) -> float:
        """The learning rate of this round; the first round is 1."""
        return self._scheduled(round) * min(1.0, round / (self.warmup + 1))

    def _scheduled(self, round: int) -> float:
        done = (round - 1) / self.rounds
        match self.schedule:
            case "constant":
                return self.initial
            case "cosine":
                return self.initial * (1 + cos(pi * done)) / 2
            case "linear":
                return self.initial * (1 - done)
            case "exponential":
                return self.initial * self.decay ** (round - 1)
