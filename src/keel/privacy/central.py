"""The private mean of a trusted server: clipped reports, a fixed denominator, Gaussian noise.

H. B. McMahan, D. Ramage, K. Talwar, L. Zhang. Learning Differentially Private Recurrent Language Models. ICLR 2018.
G. Andrew, O. Thakkar, H. B. McMahan, S. Ramaswamy. Differentially Private Learning with Adaptive Clipping. NeurIPS
2021.
P. Kairouz, H. B. McMahan, S. Song, O. Thakkar, A. Thakurta, Z. Xu. Practical and Private (Deep) Learning without
Sampling or Shuffling. ICML 2021.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import exp

import torch

from keel.algorithms.base import Message, Report
from keel.core.mechanisms import ServerRound, TakenMean
from keel.core.randomness import keyed_rng
from keel.privacy.clipping import clipped, joint_norm
from keel.privacy.noise import Draw, keyed_noise

CLIP = "clip"
"""The adaptive clipping norm in the state of the mechanism."""


@dataclass(frozen=True)
class AdaptiveClip:
    """The clipping norm follows a quantile of the norms: C <- C exp(-lr (b - quantile)).

    b is the share of reports within C, with Gaussian noise of standard deviation `bit_noise` on the sum of the bits.
    """

    quantile: float
    lr: float
    bit_noise: float

    def next(self, clip: float, within: float, cohort: float, noise: float) -> float:
        """The norm of the next round.

        Args:
            within: The sum over the cohort of 1/2 for a report within `clip`, -1/2 for another.
        """
        share = (within + self.bit_noise * noise) / cohort + 0.5
        return clip * exp(-self.lr * (share - self.quantile))


@dataclass(frozen=True)
class PrivateMean:
    """(sum of the clipped reports + noise * clip * N(0, 1)) / cohort.

    Args:
        clip: The largest joint norm of a report; with `adaptive`, that of the first round.
        noise: The noise multiplier of the sum.
        cohort: The denominator: the expected cohort size, whoever takes part.
        tree: For DP-FTRL, the rounds after which a tree is restarted: the noise of a round is the difference between
            the noise of two prefix sums, so that the noise of all rounds together grows with log(t) only.
        secret: Draws the noise without a tree, where clients know the seed; by default it is keyed like every draw.
    """

    clip: float
    noise: float
    cohort: float
    adaptive: AdaptiveClip | None = None
    tree: int | None = None
    secret: Draw | None = None
    fixed_cohort = True

    def mean(self, reports: Iterable[Report], at: ServerRound) -> TakenMean:
        clip = float(at.state[CLIP]) if CLIP in at.state else self.clip
        total = {name: torch.zeros_like(value) for name, value in at.example.items()}
        within = 0.0
        for report in reports:
            within += 0.5 if joint_norm(report.message) <= clip else -0.5
            for name, value in clipped(report.message, clip).items():
                total[name].add_(value)
        scale = self.noise * clip
        for sign, key in self._noise_keys(at.ctx.round):
            draw = self.secret or keyed_noise(keyed_rng(at.seed, *key))
            for value in total.values():
                value.add_(draw(value), alpha=sign * scale)
        message: Message = {name: value.div_(self.cohort) for name, value in total.items()}
        if self.adaptive is None:
            return TakenMean(message, {}, {})
        noise = float(keyed_rng(at.seed, "privacy bits", at.ctx.round).standard_normal())
        following = self.adaptive.next(clip, within, self.cohort, noise)
        return TakenMean(message, {CLIP: torch.tensor(following, dtype=torch.float64)}, {"clip_norm": clip})

    def _noise_keys(self, round: int) -> Iterator[tuple[float, tuple[str, int, int, int]]]:
        """The signs and keys of the noise vectors of a round."""
        if self.tree is None:
            yield 1.0, ("privacy mean", round, 0, 0)
            return
        restart, step = divmod(round - 1, self.tree)
        before, now = set(_nodes(step)), set(_nodes(step + 1))
        for level, number in sorted(now - before):
            yield 1.0, ("privacy tree", restart, level, number)
        for level, number in sorted(before - now):
            yield -1.0, ("privacy tree", restart, level, number)


def _nodes(steps: int) -> Iterator[tuple[int, int]]:
    """The nodes of a binary tree that cover the first steps: (level, number within the level)."""
    end = 0
    for level in reversed(range(steps.bit_length())):
        if steps >> level & 1:
            yield level, end >> level
            end += 1 << level
