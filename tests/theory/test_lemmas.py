"""The paper's lemmas, in numbers: on clients with quadratic losses, whose gradients are known exactly."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from keel.algorithms import make_algorithm
from keel.algorithms.base import ClientContext, Path, Report
from keel.sampling import Cyclic, Sampler, Uniform
from tests.algorithms.test_identities import final

CLIENTS, DIMENSIONS = 20, 6


@dataclass(frozen=True)
class Quadratics:
    """f_i(theta) = 1/2 (theta - b_i)^T A_i (theta - b_i)."""

    curvature: np.ndarray
    optimum: np.ndarray

    def gradients(self, theta: np.ndarray) -> np.ndarray:
        return np.einsum("ijk,ik->ij", self.curvature, theta - self.optimum)


@pytest.fixture
def clients() -> Quadratics:
    rng = np.random.default_rng(0)
    roots = rng.normal(size=(CLIENTS, DIMENSIONS, DIMENSIONS))
    return Quadratics(roots @ roots.transpose(0, 2, 1) / DIMENSIONS, rng.normal(size=(CLIENTS, DIMENSIONS)))


def deviation(clients: Quadratics, sampler: Sampler, tau: int) -> tuple[float, float]:
    """E |g^{t_tau} - grad f|^2, and the lemma's bound on it, over many windows of tau rounds."""
    gradients = clients.gradients(np.ones(DIMENSIONS))
    whole = gradients.mean(axis=0)
    dissimilarity = ((gradients - whole) ** 2).sum(axis=1).mean()
    squares, missing = [], []
    for t in range(tau, tau + 400):
        union = np.unique(np.concatenate([sampler.cohort(t - k) for k in range(tau)]))
        squares.append(((gradients[union].mean(axis=0) - whole) ** 2).sum())
        missing.append(((CLIENTS - len(union)) / CLIENTS) ** 2)
    return float(np.mean(squares)), float(8 * np.mean(missing) * (dissimilarity + (whole**2).sum()))


@pytest.mark.parametrize("tau", [1, 2, 5, 10, 20])
def test_lemma_deviation_of_the_tau_averaged_gradient(clients: Quadratics, tau: int) -> None:
    measured, bound = deviation(clients, Uniform(CLIENTS, 4, seed=0), tau)
    assert 0 < measured <= bound


def test_the_deviation_falls_as_tau_grows(clients: Quadratics) -> None:
    measured = [deviation(clients, Uniform(CLIENTS, 4, seed=0), tau)[0] for tau in (1, 2, 5, 10, 20)]
    assert measured == sorted(measured, reverse=True)
    assert measured[-1] < measured[0] / 50


@pytest.mark.parametrize("tau", [1, 2, 3, 4])
def test_corollary_under_cyclic_participation(clients: Quadratics, tau: int) -> None:
    measured, bound = deviation(clients, Cyclic(CLIENTS, 4, seed=0), tau)
    gradients = clients.gradients(np.ones(DIMENSIONS))
    whole = gradients.mean(axis=0)
    stated = 8 * (1 - tau * 0.2) ** 2 * (((gradients - whole) ** 2).sum(axis=1).mean() + (whole**2).sum())
    assert bound == pytest.approx(stated)
    assert 0 < measured <= stated


def test_the_deviation_is_exactly_zero_at_tau_one_over_c(clients: Quadratics) -> None:
    assert deviation(clients, Cyclic(CLIENTS, 4, seed=0), 5) == (0.0, 0.0)


def descend(clients: Quadratics, tau: int, beta: float, eta: float, heavy_ball: bool, rounds: int = 60) -> np.ndarray:
    """GHBM on the mean loss: as a decayed average of the last tau momenta, or in its heavy-ball form."""
    thetas, momenta = [np.ones(DIMENSIONS)], [np.zeros(DIMENSIONS)] * tau
    for t in range(1, rounds + 1):
        theta, g = thetas[-1], clients.gradients(thetas[-1]).mean(axis=0)
        if heavy_ball:
            past = thetas[max(0, t - tau - 1)]
            thetas.append(theta + beta / tau * (theta - past) - eta * g)
        else:
            momenta.append(beta / tau * sum(momenta[-tau:], start=np.zeros(DIMENSIONS)) + g)
            thetas.append(theta - eta * momenta[-1])
    return np.array(thetas)


@pytest.mark.parametrize("tau", [1, 2, 5, 10])
def test_lemma_heavy_ball_form_of_momentum(clients: Quadratics, tau: int) -> None:
    # tau = 1 is the classical lemma, above it the generalised one.
    averaged = descend(clients, tau, 0.9, 0.05, heavy_ball=False)
    np.testing.assert_allclose(averaged, descend(clients, tau, 0.9, 0.05, heavy_ball=True), rtol=1e-9)
    assert np.linalg.norm(averaged[-1] - averaged[0]) > 0.5


@pytest.mark.parametrize("tau", [1, 3, 5])
def test_keels_ghbm_with_one_local_step_is_the_heavy_ball_form(clients: Quadratics, tau: int) -> None:
    ghbm, lr = make_algorithm("ghbm", beta=0.9, tau=tau), 0.05
    ctx = ClientContext(round=1, clients=1, cohort=1, share=1.0, period=1.0, lr=lr, server_lr=1.0, steps=1)
    server = ghbm.init_server(torch.ones(DIMENSIONS))
    thetas, gradients = [server["theta"]], []
    for _ in range(40):
        received = ghbm.broadcast(server, ctx)
        theta = received["theta"]
        g = torch.from_numpy(clients.gradients(theta.double().numpy()).mean(axis=0)).float()
        w = theta - lr * ghbm.direction(theta, lambda _, g=g: g, received, {}, ctx)
        message, _ = ghbm.report(Path(theta, w), received, {}, ctx)
        server = ghbm.aggregate(server, [Report(message, 1.0, 1)], ctx)
        thetas.append(server["theta"])
        gradients.append(g)
    for t in range(tau + 1, 41):
        step = 0.9 / tau * (thetas[t - 1] - thetas[t - tau - 1]) - lr * gradients[t - 1]
        torch.testing.assert_close(thetas[t], thetas[t - 1] + step, rtol=1e-5, atol=1e-6)


def test_with_tau_one_the_theory_version_is_fedcm() -> None:
    fedcm = final({"algorithm": {"name": "fedcm", "alpha": 0.3}, "local": {"steps": 4}})
    theory = final(
        {
            "algorithm": {"name": "ghbm_theory", "beta": 0.3, "tau": 1},
            "local": {"steps": 4},
            "server": {"lr": 4 * 0.1},  # J l, by which FedCM's server moves along its momentum
        }
    )
    torch.testing.assert_close(theory, fedcm, rtol=1e-4, atol=1e-5)
