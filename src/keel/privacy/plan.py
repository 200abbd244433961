"""What the table `[privacy]` means for a run: the noise, the account, the mechanisms, the rounds within a budget."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import ceil, inf
from typing import Any

import numpy as np

from keel.core.client import LocalTraining
from keel.core.flat_model import FlatModel
from keel.core.mechanisms import ServerMean
from keel.core.observers import Observer, RoundEnd
from keel.core.sampling import Sampler
from keel.core.task import Task
from keel.errors import KeelError
from keel.privacy.accounting import Account, combined, noise_for, rounds_within
from keel.privacy.central import AdaptiveClip, PrivateMean
from keel.privacy.clipping import ClipReport
from keel.privacy.examples import PrivateGradient
from keel.privacy.layers import is_layered
from keel.privacy.noise import Draw
from keel.privacy.robust import RobustMean, geometric_median, median, trimmed_mean
from keel.privacy.settings import SAMPLINGS, Mean, PrivacySpec

CLIP_LR = 0.2
"""The default step size of an adaptive clipping norm (Andrew et al. 2021)."""
BIT_NOISE = 20
"""The default noise on the sum of the bits is the cohort size divided by this (Andrew et al. 2021)."""
TRIM = 0.2
"""The default share of reports that a trimmed mean cuts at each end."""


class Participations:
    """The largest number of rounds that a client has taken part in, after t rounds."""

    def __init__(self, sampler: Sampler):
        self.sampler, self.counts, self.most = sampler, np.zeros(sampler.clients, np.int64), [0]

    def __call__(self, rounds: int) -> int:
        while len(self.most) <= rounds:
            self.counts[self.sampler.cohort(len(self.most))] += 1
            self.most.append(int(self.counts.max()))
        return self.most[rounds]


@dataclass(frozen=True)
class PrivacyPlan:
    """The privacy of one run.

    Args:
        steps: For example-level privacy, the local steps of each client.
        examples: Likewise, the examples of each client.
        evaluations: Likewise, the gradients that the algorithm evaluates in a local step.
    """

    settings: PrivacySpec
    sampler: Sampler
    sampler_name: str
    rounds: int
    batch: int
    steps: Sequence[int] = ()
    examples: Sequence[int] = ()
    evaluations: int = 1

    @property
    def cohort(self) -> float:
        """The expected cohort size."""
        return self.sampler.clients / self.sampler.period

    @cached_property
    def noise(self) -> float:
        """The noise multiplier of the account."""
        if self.settings.noise is not None:
            return self.settings.noise
        assert self.settings.epsilon is not None
        return noise_for(self.settings.epsilon, self._account, self.rounds)

    def __str__(self) -> str:
        """The mechanism, its noise, and epsilon at the end."""
        rounds, settings = self.allowed_rounds, self.settings
        after = f"{rounds} round{'s' * (rounds != 1)}"
        return (
            f"mechanism {settings.mechanism}, noise multiplier {self.noise:.4g}, epsilon "
            f"{self.account.epsilon(rounds):.3g} at delta {settings.delta:g} after {after}"
        )

    @cached_property
    def account(self) -> "Account | ExampleAccount":
        return self._account(self.noise)

    @cached_property
    def _participations(self) -> Participations:
        return Participations(self.sampler)

    def _account(self, noise: float) -> "Account | ExampleAccount":
        settings = self.settings
        if settings.mechanism == "example":
            return ExampleAccount(self, noise)
        make = partial(Account, noise, settings.delta, accountant=settings.accountant)
        if settings.mechanism == "local":
            return make("none", count=self._participations, relation="replace")
        period = self.sampler.period
        if settings.mechanism == "tree":
            return make("none", count=lambda t: ceil(t / period), tree=int(period))
        sampling = SAMPLINGS[self.sampler_name]
        if sampling == "none":
            return make("none", count=self._participations)
        relation: Any = "replace" if sampling == "fixed" else "add_or_remove"
        return make(sampling, 1 / period, relation=relation)

    @cached_property
    def allowed_rounds(self) -> int:
        """The number of rounds within the budget; all of them if there is none."""
        epsilon = self.settings.epsilon
        if epsilon is None or self.settings.noise is None:
            return self.rounds
        allowed = rounds_within(epsilon, self.account, self.rounds)
        if allowed == 0:
            raise KeelError(
                f"privacy.epsilon = {epsilon:g} is used up in the first round (epsilon {self.account.epsilon(1):.3g} "
                f"with privacy.noise = {self.noise:g}); use more noise"
            )
        return allowed

    def mean(self, secret: Draw | None = None) -> ServerMean | None:
        """What takes the mean at the server; `secret` draws noise that no seed determines."""
        settings = self.settings
        if settings.mechanism in ("local", "example"):
            return None
        if settings.quantile is None:
            tree = int(self.sampler.period) if settings.mechanism == "tree" else None
            return PrivateMean(settings.clip, self.noise, self.cohort, tree=tree, secret=secret)
        bit_noise = settings.bit_noise or self.cohort / BIT_NOISE
        if 2 * bit_noise <= self.noise:
            raise KeelError(
                f"privacy.bit_noise must be more than half of the noise multiplier, {self.noise / 2:.3g} "
                f"(got {bit_noise:g})"
            )
        of_sum = (self.noise**-2 - (2 * bit_noise) ** -2) ** -0.5 if self.noise else 0.0
        assert not self.noise or abs(combined(of_sum, 2 * bit_noise) / self.noise - 1) < 1e-9
        adaptive = AdaptiveClip(settings.quantile, settings.clip_lr or CLIP_LR, bit_noise)
        return PrivateMean(settings.clip, of_sum, self.cohort, adaptive)

    def schedule(self) -> list[tuple[int, float]]:
        """Epsilon after some of the rounds: those at which a tenth more of the run is done."""
        last = self.allowed_rounds
        rounds = sorted({max(1, ceil(last * part / 10)) for part in range(1, 11)})
        return [(t, self.account.epsilon(t)) for t in rounds]


class ExampleAccount:
    """The largest epsilon over the clients: DP-SGD with a Poisson sample of `batch` examples in each step."""

    def __init__(self, plan: PrivacyPlan, noise: float):
        self.plan, self.noise = plan, noise
        self._kinds = sorted(set(zip(plan.examples, plan.steps, strict=True)))
        self._of = [self._kinds.index(kind) for kind in zip(plan.examples, plan.steps, strict=True)]

    @cached_property
    def _most(self) -> Callable[[int], list[int]]:
        """By kind of client, the largest number of participations after t rounds."""
        counts, table = np.zeros(self.plan.sampler.clients, np.int64), [[0] * len(self._kinds)]

        def most(rounds: int) -> list[int]:
            while len(table) <= rounds:
                counts[self.plan.sampler.cohort(len(table))] += 1
                row = [0] * len(self._kinds)
                for client, kind in enumerate(self._of):
                    row[kind] = max(row[kind], int(counts[client]))
                table.append(row)
            return table[rounds]

        return most

    def epsilon(self, rounds: int) -> float:
        epsilons = [0.0]
        for (examples, steps), count in zip(self._kinds, self._most(rounds), strict=True):
            rate = min(1.0, self.plan.batch / examples)
            multiplier = self.noise / self.plan.evaluations**0.5
            account = Account(multiplier, self.plan.settings.delta, "poisson", rate)
            epsilons.append(account.epsilon(count * steps))
        return max(epsilons)


class PrivacyObserver(Observer):
    """Adds epsilon to every record: of all that is released up to and including the round."""

    def __init__(self, plan: PrivacyPlan):
        self.plan = plan

    def round_ended(self, event: RoundEnd) -> Mapping[str, Any]:
        epsilon = self.plan.account.epsilon(event.work.ctx.round)
        return {"epsilon": epsilon if epsilon < inf else None}


def with_client_part(
    local: LocalTraining, settings: PrivacySpec, noise: float, task: Task, secret: Draw | None = None
) -> LocalTraining:
    """The local training in which a client does its part for privacy.

    Args:
        secret: Draws the noise at a site, where the server knows the seed.
    """
    if settings.mechanism == "example":
        config = local.config
        layered = task.data.is_local and is_layered(
            FlatModel(task.module, task.moving, config.precision), task.loss, task.data.trial_minibatch(config.batch)
        )
        gradients = PrivateGradient(settings.clip, noise, config.batch, config.microbatch, layered, secret)
        return replace(local, gradients=gradients)
    if settings.quantile is not None:  # the server clips: it alone knows the norm of the round
        return local
    clip = ClipReport(settings.clip, noise if settings.mechanism == "local" else 0.0, secret)
    return replace(local, mechanisms=local.mechanisms.with_protection(clip))


def robust_mean(mean: Mean, trim: float | None) -> RobustMean:
    """The robust mean of that name."""
    if mean == "median":
        return RobustMean(median)
    if mean == "geometric_median":
        return RobustMean(geometric_median)
    return RobustMean(partial(trimmed_mean, trim=TRIM if trim is None else trim))
