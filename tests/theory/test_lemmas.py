"""The paper's lemmas, checked on Keel's samplers and algorithms."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from keel.core.sampling import Cyclic, Sampler, Uniform
from tests.conftest import small_network, uneven_data, uneven_loop

CLIENTS, COHORT = 20, 4
GRADIENTS = np.random.default_rng(0).normal(size=(CLIENTS, 6))
"""One gradient per client, at a common model."""


def deviation(sampler: Sampler, tau: int) -> tuple[float, float]:
    """Return E |g_tau - grad f|^2 and the lemma's bound on it, over many windows of tau rounds."""
    full = GRADIENTS.mean(axis=0)
    dissimilarity = ((GRADIENTS - full) ** 2).sum(axis=1).mean()
    squares, missing = [], []
    for t in range(tau, tau + 200):
        union = np.unique(np.concatenate([sampler.cohort(t - k) for k in range(tau)]))
        squares.append(((GRADIENTS[union].mean(axis=0) - full) ** 2).sum())
        missing.append(((CLIENTS - len(union)) / CLIENTS) ** 2)
    return float(np.mean(squares)), float(8 * np.mean(missing) * (dissimilarity + (full**2).sum()))


def test_under_uniform_sampling_the_deviation_is_below_its_bound_and_falls_as_tau_grows() -> None:
    measured, bounds = zip(
        *(deviation(Uniform(CLIENTS, COHORT, seed=0), tau) for tau in (1, 2, 5, 10, 20)), strict=True
    )
    assert all(0 < value <= bound for value, bound in zip(measured, bounds, strict=True))
    assert list(measured) == sorted(measured, reverse=True)
    assert measured[-1] < measured[0] / 50


@pytest.mark.parametrize("tau", [1, 2, 3, 4, 5])
def test_under_cyclic_participation_the_bound_is_that_of_the_corollary_and_zero_at_tau_one_over_c(tau: int) -> None:
    measured, bound = deviation(Cyclic(CLIENTS, COHORT, seed=0), tau)
    full = GRADIENTS.mean(axis=0)
    stated = 8 * (1 - tau * COHORT / CLIENTS) ** 2
    stated *= ((GRADIENTS - full) ** 2).sum(axis=1).mean() + (full**2).sum()
    assert bound == pytest.approx(stated)
    assert 0 < measured <= stated if tau < 5 else measured == 0.0


def test_the_corollary_holds_in_expectation_and_not_in_every_round() -> None:
    clients, tau = 20, 19
    gradients = np.full(clients, -1 / tau)
    gradients[0] = 1.0  # all dissimilarity is on one client; the mean gradient is zero
    bound = 8 * (1 - tau / clients) ** 2 * (gradients**2).mean()
    sampler = Cyclic(clients, 1, seed=0)
    cohorts = [[sampler.cohort(t - k)[0] for k in range(tau)] for t in range(tau, tau + clients)]
    deviations = [float(gradients[cohort].mean() ** 2) for cohort in cohorts]
    [worst] = [d for d, cohort in zip(deviations, cohorts, strict=True) if 0 not in cohort]
    assert (round(worst, 5), round(bound, 5)) == (0.00277, 0.00105)
    assert np.mean(deviations) < bound < worst


def models(table: dict[str, Any], rounds: int) -> list[Tensor]:
    """Return the server's model before the first round and after each round."""
    training = uneven_loop({"rounds": rounds, **table})
    state = training.start()
    thetas = [state.server["theta"].clone()]
    training.run(state, [lambda record, state, *_: thetas.append(state.server["theta"].clone())])
    return thetas


def full_gradient(theta: Tensor) -> Tensor:
    """Return the gradient of the mean loss over all clients' examples."""
    module, examples = small_network(), uneven_data().train
    vector_to_parameters(theta, module.parameters())
    loss = cross_entropy(module(examples.inputs), examples.targets)
    return parameters_to_vector(torch.autograd.grad(loss, list(module.parameters())))


@pytest.mark.parametrize("tau", [1, 3])
def test_ghbm_with_one_full_batch_step_and_all_clients_takes_heavy_ball_steps(tau: int) -> None:
    beta, lr, rounds = 0.9, 0.1, 8
    table = {
        "algorithm": {"name": "ghbm", "beta": beta, "tau": tau},
        "local": {"steps": 1, "batch": 100, "lr": lr, "weight_decay": 0.0},
        "participation": {"rate": 1.0},
    }
    thetas = models(table, rounds)
    for t in range(tau + 1, rounds + 1):
        momentum = beta / tau * (thetas[t - 1] - thetas[t - tau - 1])
        expected = thetas[t - 1] + momentum - lr * full_gradient(thetas[t - 1])
        torch.testing.assert_close(thetas[t], expected, rtol=1e-4, atol=1e-5)
        assert momentum.norm() > 1e-2


def test_the_theory_version_with_tau_one_is_fedcm() -> None:
    fedcm = models({"algorithm": {"name": "fedcm", "alpha": 0.3}, "local": {"steps": 4}}, rounds=10)
    theory = models(
        {
            "algorithm": {"name": "ghbm_theory", "beta": 0.3, "tau": 1},
            "local": {"steps": 4},
            "server": {"lr": 4 * 0.1},  # J l: the distance by which FedCM's server moves along its momentum
        },
        rounds=10,
    )
    torch.testing.assert_close(theory[-1], fedcm[-1], rtol=1e-4, atol=1e-5)
