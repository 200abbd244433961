"""Epsilon agrees with dp-accounting's and Opacus's own values on documented examples."""

import logging
from functools import partial
from math import inf, sqrt
from typing import Any

import dp_accounting as dp
import pytest
from dp_accounting import pld, rdp

from keel.errors import KeelError
from keel.privacy.accounting import Account, _rdp, combined, noise_for, participations, rounds_within

THREE_DIGITS = 5e-4
"""The relative difference within which numbers agree to three digits."""
EXAMPLES = [
    (1.1, 256 / 60_000, 14_062),
    (1.3, 256 / 60_000, 3_516),
    (1.5, 0.04, 2_250),
    (0.4, 0.01, 500),
    (0.1, 1.0, 1),
]
"""Noise multiplier, sampling rate and steps. The first is the default of DP-SGD on MNIST in TensorFlow Privacy."""


def accountant_of(noise: float, rate: float, steps: int, make: Any = rdp.RdpAccountant) -> Any:
    accountant = make()
    accountant.compose(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise)), steps)
    return accountant


def test_epsilon_is_the_value_that_opacus_documents() -> None:
    """In the tests of Opacus: noise 1.5, rate 0.04, 90 epochs."""
    assert Account(1.5, 1e-5, "poisson", 0.04).epsilon(2250) == pytest.approx(7.32911117143, rel=THREE_DIGITS)


def test_epsilon_is_the_value_that_dp_accounting_documents() -> None:
    """In the tests of dp-accounting: the noise of a Gaussian mechanism with epsilon = 1, and upper bounds of a tree."""
    assert Account(4.530877117, 1e-6, "none").epsilon(1) == pytest.approx(1.0, rel=THREE_DIGITS)
    for noise, bound in ((1.13, 19.74), (8.83, 2.04)):
        epsilon = Account(noise, 1e-6, "none", count=participations(1600), tree=1600).epsilon(1600)
        assert 0.8 * bound < epsilon < bound


def test_the_renyi_divergences_are_those_that_dp_accounting_documents() -> None:
    """In the tests of dp-accounting: noise 2.5, rate 0.01, 50 steps, the orders 1.5, 2.5, 5 and 50."""
    orders, divergences = _rdp(2.5, "poisson", 0.01, None)
    found = [50 * float(divergences[orders.tolist().index(order)]) for order in (1.5, 2.5, 5, 50)]
    assert found == pytest.approx([6.70579741e-04, 1.08548710e-03, 2.18075656e-03, 2.38460375e-02], rel=THREE_DIGITS)


@pytest.mark.parametrize(("noise", "rate", "steps"), EXAMPLES)
def test_epsilon_is_that_of_dp_accounting(noise: float, rate: float, steps: int) -> None:
    expected = accountant_of(noise, rate, steps).get_epsilon(1e-5)
    assert Account(noise, 1e-5, "poisson", rate).epsilon(steps) == pytest.approx(expected, rel=THREE_DIGITS)


@pytest.mark.parametrize(("noise", "rate", "steps"), [case for case in EXAMPLES if case[0] != 0.4])
def test_epsilon_is_that_of_opacus(noise: float, rate: float, steps: int) -> None:
    accountants = pytest.importorskip("opacus.accountants", reason="opacus is not installed")
    opacus = accountants.RDPAccountant()
    opacus.history = [(noise, rate, steps)]
    expected = opacus.get_epsilon(1e-5)
    assert Account(noise, 1e-5, "poisson", rate).epsilon(steps) == pytest.approx(expected, rel=THREE_DIGITS)


@pytest.mark.parametrize(("noise", "rate", "steps"), [(1.1, 256 / 60_000, 14_062), (1.0, 0.05, 50), (2.0, 1.0, 5)])
def test_pld_is_tighter_than_rdp_and_agrees_with_dp_accounting(noise: float, rate: float, steps: int) -> None:
    make = partial(Account, noise, 1e-5, "poisson", rate)
    expected = accountant_of(noise, rate, steps, pld.PLDAccountant).get_epsilon(1e-5)
    assert make(accountant="pld").epsilon(steps) == pytest.approx(expected, rel=THREE_DIGITS)
    assert make(accountant="pld").epsilon(steps) < make().epsilon(steps)


def test_an_order_that_is_left_out_prints_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert Account(0.4, 1e-5, "poisson", 0.013).epsilon(3) > 0
    assert not caplog.records
    assert logging.getLogger("absl").isEnabledFor(logging.WARNING)


def test_sampling_without_replacement_counts_a_replaced_client_twice() -> None:
    """Theorem 27 of Wang, Balle, Kasiviswanathan (2019) has the sensitivity of a replaced client: two norms."""
    own = rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    own.compose(dp.SampledWithoutReplacementDpEvent(1000, 100, dp.GaussianDpEvent(2.0)), 20)
    account = Account(4.0, 1e-5, "fixed", 0.1, relation="replace")
    assert account.epsilon(20) == pytest.approx(own.get_epsilon(1e-5), rel=THREE_DIGITS)


def test_without_sampling_epsilon_is_that_of_the_gaussian_mechanism() -> None:
    """Five Gaussian mechanisms are one whose noise is divided by the root of five."""
    own = rdp.RdpAccountant()
    own.compose(dp.GaussianDpEvent(2.0 / sqrt(5)))
    account = Account(2.0, 1e-5, "none", count=participations(10))
    assert account.epsilon(50) == pytest.approx(own.get_epsilon(1e-5), rel=1e-3)
    assert account.epsilon(41) == account.epsilon(50) > account.epsilon(40)


def test_a_tree_costs_the_logarithm_of_its_rounds() -> None:
    one = Account(3.0, 1e-5, "none", tree=1).epsilon(1)
    eight = Account(3.0, 1e-5, "none", count=participations(8), tree=8).epsilon(8)
    assert eight == pytest.approx(Account(3.0 / 2, 1e-5, "none").epsilon(1), rel=1e-3)  # four levels: sqrt(4)
    assert one == pytest.approx(Account(3.0, 1e-5, "none").epsilon(1), rel=1e-3)


def test_noise_is_set_from_epsilon_and_a_budget_allows_rounds() -> None:
    make = partial(Account, delta=1e-5, sampling="poisson", rate=0.01)
    noise = noise_for(2.0, make, 200)
    assert 1.99 < make(noise).epsilon(200) <= 2.0
    allowed = rounds_within(1.0, make(noise), 200)
    assert make(noise).epsilon(allowed) <= 1.0 < make(noise).epsilon(allowed + 1)
    assert rounds_within(1e9, make(noise), 200) == 200
    assert rounds_within(1e-9, make(noise), 200) == 0


def test_no_noise_is_not_private_and_no_round_costs_nothing() -> None:
    assert Account(0.0, 1e-5, "none").epsilon(1) == inf
    assert Account(0.0, 1e-5, "none").epsilon(0) == 0.0
    with pytest.raises(KeelError, match=r"privacy\.epsilon"):
        noise_for(1e-9, partial(Account, delta=1e-12, sampling="none"), 10**6)


def test_two_releases_of_a_cohort_are_one_with_less_noise() -> None:
    assert combined(2.0, 2.0) == pytest.approx(2.0 / sqrt(2))
    together = Account(combined(3.0, 4.0), 1e-5, "none").epsilon(1)
    own = rdp.RdpAccountant()
    own.compose(dp.ComposedDpEvent([dp.GaussianDpEvent(3.0), dp.GaussianDpEvent(4.0)]))
    assert together == pytest.approx(own.get_epsilon(1e-5), rel=1e-3)
