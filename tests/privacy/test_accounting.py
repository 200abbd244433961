"""Epsilon agrees with dp-accounting's and Opacus's own values on documented examples."""

from functools import partial
from math import inf, sqrt

import dp_accounting as dp
import pytest
from dp_accounting import pld, rdp

from keel.errors import KeelError
from keel.privacy.accounting import Account, combined, noise_for, participations, rounds_within

MNIST = {"rate": 256 / 60_000, "noise": 1.1, "steps": 60 * 60_000 // 256, "delta": 1e-5}
"""DP-SGD on MNIST: minibatches of 256, noise 1.1, 60 epochs of 60,000 examples."""


def test_epsilon_is_that_of_dp_accounting() -> None:
    account = Account(MNIST["noise"], MNIST["delta"], "poisson", MNIST["rate"])
    own = rdp.RdpAccountant()
    own.compose(dp.PoissonSampledDpEvent(MNIST["rate"], dp.GaussianDpEvent(MNIST["noise"])), int(MNIST["steps"]))
    assert account.epsilon(int(MNIST["steps"])) == pytest.approx(own.get_epsilon(MNIST["delta"]), rel=1e-3)


def test_epsilon_is_that_of_opacus() -> None:
    accountants = pytest.importorskip("opacus.accountants", reason="opacus is not installed")
    opacus = accountants.RDPAccountant()
    opacus.history = [(MNIST["noise"], MNIST["rate"], int(MNIST["steps"]))]
    account = Account(MNIST["noise"], MNIST["delta"], "poisson", MNIST["rate"])
    assert account.epsilon(int(MNIST["steps"])) == pytest.approx(opacus.get_epsilon(MNIST["delta"]), rel=1e-3)


def test_pld_is_tighter_than_rdp_and_agrees_with_dp_accounting() -> None:
    make = partial(Account, 1.0, 1e-5, "poisson", 0.05)
    own = pld.PLDAccountant()
    own.compose(dp.PoissonSampledDpEvent(0.05, dp.GaussianDpEvent(1.0)), 50)
    assert make(accountant="pld").epsilon(50) == pytest.approx(own.get_epsilon(1e-5), rel=1e-2)
    assert own.get_epsilon(1e-5) <= make(accountant="pld").epsilon(50) < make().epsilon(50)


def test_sampling_without_replacement_counts_a_replaced_client_twice() -> None:
    """Theorem 27 of Wang, Balle, Kasiviswanathan (2019) has the sensitivity of a replaced client: two norms."""
    own = rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    own.compose(dp.SampledWithoutReplacementDpEvent(1000, 100, dp.GaussianDpEvent(2.0)), 20)
    account = Account(4.0, 1e-5, "fixed", 0.1, relation="replace")
    assert account.epsilon(20) == pytest.approx(own.get_epsilon(1e-5), rel=1e-2)


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
