"""The paper's linear regression: GHBM with tau = 1/C under cyclic participation, compared with FedCM.

Each of ten clients has 640 observations of f(x) = 10 x^2 + 5 x - 1 from its part of [-10, 10]. The participation rate
is 0.2, in a fixed order of the clients, with J = 2 full-batch local steps. The initial coefficients are zero.

The paper gives neither learning rates nor the version of GHBM. Here all methods weigh the gradient by 0.3 and the
momentum by 0.7, and have the same server step: the distance that the server moves along a constant gradient of
length one. FedCM and the theory version weigh the local gradient, and their server step is J l; the practical version
sums, so that its local learning rate is 0.3 l.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from keel.algorithms.base import Algorithm
from keel.algorithms.fedcm import FedCM
from keel.algorithms.ghbm import GHBM
from keel.algorithms.ghbm_theory import GHBMTheory
from keel.core.sampling import Cyclic
from keel.paper.simulation import server_models

CLIENTS, EXAMPLES, STEPS, COHORT = 10, 640, 2, 2
WEIGHT = 0.3
COEFFICIENTS = (10.0, 5.0, -1.0)
ORDERS = 30
LEARNING_RATES = (2e-4, 4e-5)
"""Local learning rates. The server step of the theory version is stable only at the smaller one."""
NEAR, FAR = 1.25, 10.0
"""Final losses, relative to that of the baseline, up to which a method is near it and from which it is far from it."""


@dataclass(frozen=True)
class Method:
    """A method of the figure: the algorithm, its cohort, and its learning rates for a local learning rate l."""

    algorithm: Algorithm
    cohort: int
    rates: Callable[[float], tuple[float, float]]
    """Local and server learning rate."""


BASELINE = "FedCM, C = 1"
METHODS = {
    BASELINE: Method(FedCM(alpha=WEIGHT), CLIENTS, lambda lr: (lr, 1.0)),
    "FedCM, C = 0.2": Method(FedCM(alpha=WEIGHT), COHORT, lambda lr: (lr, 1.0)),
    "GHBM, C = 0.2": Method(GHBM(beta=1 - WEIGHT), COHORT, lambda lr: (WEIGHT * lr, 1.0)),
    "GHBM (theory), C = 0.2": Method(GHBMTheory(beta=WEIGHT), COHORT, lambda lr: (lr, STEPS * lr)),
}


def loss_curves(method: str, lr: float, rounds: int, orders: int) -> Tensor:
    """Return the mean loss over all observations: a row per order of the clients, a column per round from 0.

    With all clients in every round the order does not matter, and there is one row.
    """
    chosen = METHODS[method]
    rows = [_losses(chosen, lr, rounds, order) for order in range(1 if chosen.cohort == CLIENTS else orders)]
    return torch.stack(rows)


def hessians() -> Tensor:
    """Return the second derivatives of the clients' losses: a matrix per client."""
    inputs, _ = observations()
    return 2 * torch.einsum("nei,nej->nij", inputs, inputs) / EXAMPLES


def observations() -> tuple[Tensor, Tensor]:
    """Return the inputs (x^2, x, 1) and the targets f(x) of each client."""
    x = torch.linspace(-10, 10, CLIENTS * EXAMPLES, dtype=torch.float64).reshape(CLIENTS, EXAMPLES)
    inputs = torch.stack([x**2, x, torch.ones_like(x)], dim=2)
    return inputs, inputs @ torch.tensor(COEFFICIENTS, dtype=torch.float64)


@cache
def _problem() -> tuple[Tensor, Tensor]:
    return hessians(), torch.tensor(COEFFICIENTS, dtype=torch.float64)


def _losses(method: Method, lr: float, rounds: int, order: int) -> Tensor:
    curvature, best = _problem()
    local, server = method.rates(lr)
    models = server_models(
        method.algorithm,
        lambda w, clients: torch.einsum("nij,nj->ni", curvature[clients], w - best),
        Cyclic(CLIENTS, method.cohort, seed=order),
        torch.zeros(len(COEFFICIENTS), dtype=torch.float64),
        rounds=rounds,
        steps=STEPS,
        lr=local,
        server_lr=server,
    )
    return 0.5 * torch.einsum("ti,ij,tj->t", models - best, curvature.mean(dim=0), models - best)
