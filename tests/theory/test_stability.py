"""The stability limits of the two versions of GHBM on a quadratic."""

import re
from math import pi
from pathlib import Path

import pytest
import torch

from keel.algorithms.base import Algorithm
from keel.algorithms.ghbm import GHBM
from keel.algorithms.ghbm_theory import GHBMTheory
from keel.core.sampling import Cyclic
from keel.paper.simulation import server_models
from keel.paper.stability import practical_limit, spectral_radius, theory_limit, theory_matrix

CURVATURE = 3.0
THEORY_PAGE = Path(__file__).parents[2] / "docs" / "theory.md"


def distance_from_the_optimum(algorithm: Algorithm, lr: float, server_lr: float, period: int, rounds: int) -> float:
    """Return the largest |theta| in the last rounds of a quadratic, relative to the initial one."""
    models = server_models(
        algorithm,
        lambda w, clients: CURVATURE * w,
        Cyclic(period, 1, seed=0),
        torch.ones(1, dtype=torch.float64),
        rounds=rounds,
        steps=1,
        lr=lr,
        server_lr=server_lr,
    )
    return float(models[-3 * period :].abs().max())


@pytest.mark.parametrize(("tau", "beta"), [(10, 0.1), (5, 0.3), (10, 1.0)])
def test_the_theory_version_converges_just_below_its_limit_and_diverges_just_above(tau: int, beta: float) -> None:
    limit = theory_limit(tau, beta) / CURVATURE
    below, above = (
        distance_from_the_optimum(GHBMTheory(beta=beta), lr=0.01, server_lr=share * limit, period=tau, rounds=3000)
        for share in (0.95, 1.05)
    )
    assert below < 1e-2
    assert above > 1e2


@pytest.mark.parametrize(("tau", "beta"), [(10, 0.1), (5, 0.3)])
def test_the_practical_version_converges_just_below_its_limit_and_diverges_just_above(tau: int, beta: float) -> None:
    lr = practical_limit(tau, beta) * beta / CURVATURE  # the limit is that of l h / (1 - momentum weight)
    below, above = (
        distance_from_the_optimum(GHBM(beta=1 - beta), lr=share * lr, server_lr=1.0, period=tau, rounds=3000)
        for share in (0.95, 1.05)
    )
    assert below < 1e-2
    assert above > 1e2


def test_the_limits_are_those_of_classical_momentum_at_tau_one() -> None:
    assert theory_limit(1, 0.1) == pytest.approx(2 * 1.9 / 0.1)
    assert practical_limit(1, 0.1) == pytest.approx(2 * 1.9 / 0.1)


def test_beyond_its_limit_the_theory_version_stays_unstable() -> None:
    limit = theory_limit(10, 0.1)
    assert all(spectral_radius(theory_matrix(share * limit, 10, 0.1)) < 1 for share in (0.01, 0.1, 0.5, 0.99))
    assert all(spectral_radius(theory_matrix(share * limit, 10, 0.1)) > 1 for share in (1.01, 2, 10, 100))


def test_at_beta_one_the_limit_falls_as_one_over_tau() -> None:
    for tau in (20, 50):
        assert tau * theory_limit(tau, 1.0) == pytest.approx(pi**2 / 2, rel=0.01)


def test_the_theorems_step_is_stable_at_tau_118_and_diverges_from_119_on() -> None:
    assert theory_limit(118, 1.0) > 1 / 24 > theory_limit(119, 1.0)
    final = distance_from_the_optimum(
        GHBMTheory(beta=1.0), lr=1e-6, server_lr=1 / (24 * CURVATURE), period=200, rounds=4000
    )
    assert final > 1e2


def test_the_table_on_the_page_has_the_limits() -> None:
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", THEORY_PAGE.read_text(), re.M)
    assert [int(row[0]) for row in rows] == [1, 2, 5, 10, 20, 50]
    for tau, *printed in rows:
        limits = [theory_limit(int(tau), beta) for beta in (0.1, 0.3, 1.0)] + [practical_limit(int(tau), 0.1)]
        assert printed == [f"{limit:.3g}" for limit in limits]
