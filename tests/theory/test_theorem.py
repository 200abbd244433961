"""The paper's theorem: GHBM's rate under cyclic participation does not depend on the dissimilarity G."""

import pytest
import torch

from keel.paper import theorem

FIRST, LAST = 250, 4000
SMALLEST, LARGEST = 0, len(theorem.DISSIMILARITIES) - 1


def at_the_theorems_step(method: str) -> torch.Tensor:
    """Return (1/T) sum |grad f|^2 at T = FIRST and T = LAST, by G."""
    return theorem.mean_squares(method, fraction=1.0, rounds=LAST, order=0)[[FIRST - 1, LAST - 1]]


def test_the_mean_objective_does_not_depend_on_g_and_the_dissimilarity_is_g() -> None:
    problem = theorem.make_problem()
    clients = torch.arange(theorem.CLIENTS)
    blocks = len(theorem.DISSIMILARITIES), theorem.DIMENSIONS
    x = torch.linspace(-4, 4, theorem.DIMENSIONS, dtype=torch.float64).repeat(blocks[0])
    mean = problem.gradients(x.expand(theorem.CLIENTS, -1), clients).mean(dim=0)
    torch.testing.assert_close(mean, theorem.derivative(x), rtol=0.0, atol=1e-10)
    at_zero = problem.gradients(torch.zeros_like(x).expand(theorem.CLIENTS, -1), clients)
    squares = at_zero.reshape(theorem.CLIENTS, *blocks).pow(2).sum(dim=2).mean(dim=0)
    torch.testing.assert_close(squares.sqrt(), torch.tensor(theorem.DISSIMILARITIES, dtype=torch.float64))


def test_ghbm_falls_as_one_over_t_for_every_dissimilarity() -> None:
    first, last = at_the_theorems_step("GHBM (theory)")
    assert (first / last).tolist() == pytest.approx([LAST / FIRST] * (LARGEST + 1), rel=0.02)
    assert float(last.max() / last.min()) < 1.5


def test_before_tau_rounds_the_momentum_is_biased_which_costs_a_constant_that_depends_on_g() -> None:
    first, last = theorem.mean_squares("GHBM (theory)", 1.0, LAST, 0, start=0.5)[[FIRST - 1, LAST - 1]]
    assert (first / last).tolist() == pytest.approx([LAST / FIRST] * (LARGEST + 1), rel=0.02)
    assert last[LARGEST] > 3 * last[SMALLEST]


@pytest.mark.parametrize("method", ["FedAvg", "FedCM"])
def test_fedavg_and_fedcm_stall_where_the_clients_differ_much(method: str) -> None:
    first, last = at_the_theorems_step(method)
    assert first[SMALLEST] / last[SMALLEST] == pytest.approx(LAST / FIRST, rel=0.02)
    assert first[LARGEST] / last[LARGEST] < 3
    assert last[LARGEST] > 3 * last[SMALLEST]


def test_the_learning_rates_satisfy_the_theorems_conditions() -> None:
    L = theorem.make_problem().smoothness
    eta = theorem.largest_step(L, theorem.BETA)
    assert eta <= theorem.BETA / (8**0.5 * L)
    assert eta * L <= 1 / 24 + 1e-12
    short, long = (theorem.local_learning_rate(L, eta, T, theorem.BETA, theorem.START) for T in (1000, 4000))
    assert theorem.STEPS * L * short <= 1
    assert long == pytest.approx(short / 2)  # the bound that depends on G, which falls as 1 / sqrt(T)


def test_a_method_gets_its_best_server_step_for_every_t_and_g(monkeypatch: pytest.MonkeyPatch) -> None:
    means = {1.0: [[4.0, 1.0], [2.0, 8.0]], 0.25: [[3.0, 2.0], [6.0, 7.0]]}

    def fake(method: str, fraction: float, rounds: int, order: int, **problem: float) -> torch.Tensor:
        return torch.tensor(means[fraction]) + order

    monkeypatch.setattr(theorem, "mean_squares", fake)
    monkeypatch.setattr(theorem, "FRACTIONS", list(means))
    best = theorem.best_mean_squares("FedAvg", [1, 2], orders=2)
    assert best.tolist() == [[[3.0, 1.0], [2.0, 7.0]], [[4.0, 2.0], [3.0, 8.0]]]
