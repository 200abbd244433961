"""The privacy account: epsilon after t rounds, for the sampling that is really used. The adapter of dp-accounting.

| sampling | neighbouring relation | proven bound |
|---|---|---|
| poisson | one client is added or removed | subsampled Gaussian (RDP or PLD) |
| uniform, fixed size | one client's data are replaced | Gaussian under sampling without replacement (RDP) |
| cyclic | one client's report is zeroed | one Gaussian per participation, no amplification (RDP or PLD) |

Replacing a client changes a sum of clipped reports by up to twice the clipping norm: there the noise multiplier counts
half.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil, inf
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from keel.errors import KeelError

Accountant: TypeAlias = Literal["rdp", "pld"]
Sampling: TypeAlias = Literal["poisson", "fixed", "none"]
ORDERS = (*(1 + x / 10 for x in range(1, 100)), *range(11, 64), 80, 96, 128, 256, 512, 1024)
"""The Renyi orders of the account: low ones for a large epsilon, high ones for a small one."""
WHOLE_ORDERS = (*range(2, 64), 80, 96, 128, 256, 512)
"""Those of sampling without replacement, where fractional orders are slow."""
PLD_INTERVAL = 1e-4
"""The discretisation of privacy losses, that of dp-accounting; the bound is valid for any."""
PRECISION = 1e-3
"""The relative precision of a noise multiplier that is set from epsilon."""


@dataclass(frozen=True)
class Account:
    """Epsilon of a mechanism that is applied `count(t)` times in t rounds.

    Args:
        noise: The noise multiplier: the standard deviation relative to the largest norm of one report.
        sampling: How one application samples: each client with probability `rate`, `rate` of all clients exactly, or
            not at all.
        relation: What neighbouring data sets differ in: a client that is added, removed or zeroed, or one that is
            replaced, by which a sum of clipped reports changes by twice the norm.
    """

    noise: float
    delta: float
    sampling: Sampling
    rate: float = 1.0
    count: Callable[[int], int] = field(default=lambda t: t)
    relation: Literal["add_or_remove", "replace"] = "add_or_remove"
    tree: int | None = None
    """The rounds after which a tree of DP-FTRL is restarted; None without trees."""
    accountant: Accountant = "rdp"

    def epsilon(self, rounds: int) -> float:
        """Epsilon of everything that was released in the first `rounds` rounds, at `delta`."""
        count = self.count(rounds)
        if count == 0:
            return 0.0
        if self.noise == 0:
            return inf
        if self.accountant == "pld":
            return _pld_epsilon(self._multiplier, self.sampling, self.rate, count, self.delta)
        orders, rdp = _rdp(self._multiplier, self.sampling, self.rate, self.tree)
        return _epsilon(orders, rdp * count, self.delta)

    @property
    def _multiplier(self) -> float:
        return self.noise / 2 if self.relation == "replace" else self.noise


class Epsilon(Protocol):
    """An account."""

    def epsilon(self, rounds: int) -> float: ...


def rounds_within(epsilon: float, account: Epsilon, rounds: int) -> int:
    """The largest number of rounds, at most `rounds`, whose epsilon is within a budget."""
    within, beyond = 0, rounds + 1
    while beyond - within > 1:
        middle = (within + beyond) // 2
        within, beyond = (middle, beyond) if account.epsilon(middle) <= epsilon else (within, middle)
    return within


def noise_for(epsilon: float, account: Callable[[float], Epsilon], rounds: int) -> float:
    """The smallest noise multiplier, to PRECISION, with which `rounds` rounds have at most `epsilon`."""
    low, high = 0.0, 1.0
    while account(high).epsilon(rounds) > epsilon:
        low, high = high, 2 * high
        if high > 2**20:
            raise KeelError(f"privacy.epsilon = {epsilon:g} cannot be reached by any noise; use a larger one")
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        low, high = (middle, high) if account(middle).epsilon(rounds) > epsilon else (low, middle)
    return high


def combined(*multipliers: float) -> float:
    """The noise multiplier of one release that is as private as these releases of the same cohort together."""
    return sum(multiplier**-2 for multiplier in multipliers) ** -0.5


def participations(period: float) -> Callable[[int], int]:
    """How often a client has taken part after t rounds if it does once per period."""
    return lambda t: ceil(t / period)


@lru_cache(maxsize=256)
def _rdp(multiplier: float, sampling: Sampling, rate: float, tree: int | None) -> tuple[np.ndarray, np.ndarray]:
    """The Renyi divergences of one application."""
    import dp_accounting as dp
    from dp_accounting import rdp

    event: dp.DpEvent = dp.GaussianDpEvent(multiplier)
    relation, orders = dp.NeighboringRelation.ADD_OR_REMOVE_ONE, ORDERS
    if tree is not None:
        event = dp.SingleEpochTreeAggregationDpEvent(multiplier, tree)
        relation = dp.NeighboringRelation.REPLACE_SPECIAL
    elif sampling == "poisson":
        event = dp.PoissonSampledDpEvent(rate, event)
    elif sampling == "fixed":  # only the ratio of the sizes enters
        event = dp.SampledWithoutReplacementDpEvent(10**9, round(rate * 10**9), event)
        relation, orders = dp.NeighboringRelation.REPLACE_ONE, WHOLE_ORDERS
    accountant = rdp.RdpAccountant(orders, relation)
    with _quiet():
        accountant.compose(event)
    return np.array(accountant._orders), np.array(accountant._rdp)


def _epsilon(orders: np.ndarray, rdp: np.ndarray, delta: float) -> float:
    from dp_accounting.rdp import compute_epsilon

    return float(compute_epsilon(orders, rdp, delta)[0])


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides dp-accounting's warnings that it leaves out an order: the bound by the other orders is valid."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@lru_cache(maxsize=4096)
def _pld_epsilon(multiplier: float, sampling: Sampling, rate: float, count: int, delta: float) -> float:
    composed = _privacy_losses(multiplier, rate if sampling == "poisson" else 1.0).self_compose(count)
    return float(composed.get_epsilon_for_delta(delta))


@lru_cache(maxsize=16)
def _privacy_losses(multiplier: float, rate: float) -> Any:
    """The distribution of the privacy loss of one application."""
    from dp_accounting.pld import privacy_loss_distribution

    return privacy_loss_distribution.from_gaussian_mechanism(
        multiplier, value_discretization_interval=PLD_INTERVAL, sampling_prob=rate
    )
