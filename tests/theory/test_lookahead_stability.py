"""The linear stability of GHBM with a lookahead: the tool that computes it agrees with the algorithm and its page."""

from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
import torch

from keel.algorithms import make_algorithm
from keel.algorithms.base import Context, Report

ROOT = Path(__file__).parents[2]
CASES = [(10, 0.0), (10, 0.5), (25, 0.25), (25, 1.0)]


@pytest.fixture(scope="module")
def stability() -> dict[str, Any]:
    return run_path(str(ROOT / "tools/lookahead_stability.py"))


def distances(h: float, tau: int, lookahead: float, rounds: int) -> torch.Tensor:
    """Return |theta| after each round on a quadratic with its minimum at 0, where a round covers h of the distance."""
    algorithm = make_algorithm("ghbm_lookahead", tau=tau, lookahead=lookahead)
    ctx = Context(round=1, clients=10, cohort=1, share=0.1, period=10.0, lr=0.1, server_lr=0.5)
    server = algorithm.init_server(torch.ones(1, dtype=torch.float64))
    path = []
    for _ in range(rounds):
        x = algorithm.broadcast(server, ctx)["theta"]
        server = algorithm.aggregate(server, [Report({"delta": h / ctx.server_lr * x}, 1.0, 1)], ctx)
        path.append(server["theta"])
    return torch.cat(path).abs()


@pytest.mark.parametrize(("tau", "lookahead"), CASES)
def test_the_algorithm_converges_below_the_limit_and_diverges_above_it(
    stability: dict[str, Any], tau: int, lookahead: float
) -> None:
    limit = stability["limit"](tau, lookahead)
    below, above = (distances(factor * limit, tau, lookahead, rounds=4000) for factor in (0.95, 1.05))
    assert below[-100:].max() < 1e-6
    assert above[-100:].max() > 1e3


@pytest.mark.parametrize("lookahead", [0.0, 0.25, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("tau", [1, 3, 25])
def test_the_limit_of_an_odd_tau_has_a_closed_form(stability: dict[str, Any], tau: int, lookahead: float) -> None:
    expected = (2 + 2 * 0.9 / tau) / (1 + 2 * lookahead)
    assert stability["limit"](tau, lookahead) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("tau", "lookahead"), CASES)
def test_the_distance_falls_at_the_computed_rate(stability: dict[str, Any], tau: int, lookahead: float) -> None:
    rounds = stability["rounds_per_e"](0.1, tau, lookahead)
    path = distances(0.1, tau, lookahead, rounds=round(20 * rounds))
    # the decay between windows of one oscillation, at a third and at the end of the path
    early, late = (path[k : k + 3 * tau].max() for k in (len(path) // 3, len(path) - 3 * tau))
    span = len(path) - 3 * tau - len(path) // 3
    assert -span / torch.log(late / early).item() == pytest.approx(rounds, rel=0.15)


def test_the_variance_without_momentum_is_that_of_an_autoregression(stability: dict[str, Any]) -> None:
    assert stability["variance"](0.1, 10, 0.0, beta=0.0) == pytest.approx(1 / (0.1 * (2 - 0.1)))


def test_the_page_shows_the_computed_table(stability: dict[str, Any]) -> None:
    assert stability["table"]() in (ROOT / "docs/algorithms/ghbm_lookahead.md").read_text()
