"""A numerical check of the paper's theorem: GHBM's rate does not depend on the dissimilarity of the clients.

The objective of client i is the sum over the coordinates of

    a_i phi(x) + G c_i x,    phi(x) = x^2 / 2 + 2 (1 - cos x),

with random a_i > 0 and c_i, scaled such that their means over the clients are 1 and 0, and that of |c_i|^2 is 1.
The mean objective is the sum of phi, whatever G is. It is not convex (phi'' lies between -1 and 3), its only stationary
point is zero, and there the gradient dissimilarity is G. The gradients have no noise.

Two of ten clients take part in each round, in a fixed order; tau = 1/C = 5. The learning rates satisfy the theorem's
conditions, with 1 for the constants that it does not give. Every method gets the same server steps, and for every G and
T the best of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import cos, sin, sqrt

import numpy as np
import torch
from torch import Tensor

from keel.algorithms.base import Algorithm
from keel.algorithms.fedavg import FedAvg
from keel.algorithms.fedcm import FedCM
from keel.algorithms.ghbm_theory import GHBMTheory
from keel.core.sampling import Cyclic
from keel.paper.simulation import server_models

CLIENTS, COHORT, STEPS, DIMENSIONS = 10, 2, 2, 5
TAU = CLIENTS // COHORT
BETA = 0.3
START = 3.0
"""The initial value of every coordinate."""
DISSIMILARITIES = (1, 10, 100, 1000)
"""G."""
ORDERS = 5
FRACTIONS = [4.0**-k for k in range(6)]
"""Server steps, as fractions of the largest one that the theorem allows."""
METHODS: dict[str, Callable[[float], Algorithm]] = {
    "FedAvg": lambda beta: FedAvg(),
    "FedCM": lambda beta: FedCM(alpha=beta),
    "GHBM (theory)": lambda beta: GHBMTheory(beta=beta),
}
"""By the weight of the gradient."""


def derivative(x: Tensor) -> Tensor:
    """Return phi'."""
    return x + 2 * torch.sin(x)


@dataclass(frozen=True)
class Problem:
    """Clients whose mean objective is the same for every G. The problems of all G are the blocks of one model.

    All methods treat coordinates separately, so that the blocks do not affect each other.
    """

    curvatures: Tensor
    """a_i, a row per client."""
    slopes: Tensor
    """G c_i, a row per client."""

    def gradients(self, w: Tensor, clients: Tensor) -> Tensor:
        return self.curvatures[clients] * derivative(w) + self.slopes[clients]

    @property
    def smoothness(self) -> float:
        """L: phi'' is at most 3."""
        return 3 * float(self.curvatures.max())


def make_problem() -> Problem:
    rng = np.random.default_rng(0)
    a = rng.uniform(0.5, 1.5, size=(CLIENTS, DIMENSIONS))
    c = rng.normal(size=(CLIENTS, DIMENSIONS))
    c -= c.mean(axis=0)
    c /= sqrt((c**2).sum(axis=1).mean())
    blocks = np.concatenate([G * c for G in DISSIMILARITIES], axis=1)
    repeated = np.tile(a / a.mean(axis=0), len(DISSIMILARITIES))
    return Problem(torch.from_numpy(repeated), torch.from_numpy(blocks))


def largest_step(smoothness: float, beta: float) -> float:
    """Return the theorem's server learning rate eta = min(1 / (24 L), beta / (sqrt(8) L))."""
    return min(1 / 24, beta / sqrt(8)) / smoothness


def local_learning_rate(smoothness: float, eta: float, rounds: int, beta: float, start: float) -> float:
    """Return the theorem's bound on the local learning rate for the largest G, which is the strictest."""
    gap = DIMENSIONS * (start**2 / 2 + 2 * (1 - cos(start)))
    first = DIMENSIONS * (start + 2 * sin(start)) ** 2 + max(DISSIMILARITIES) ** 2  # G_tau
    bounds = [
        1.0,
        1 / (beta * eta * smoothness * sqrt(TAU) * rounds),
        sqrt(smoothness * gap / (beta**3 * TAU * first * rounds)),
        1 / sqrt(beta * CLIENTS),
        (1 / (beta**3 * CLIENTS * STEPS)) ** 0.25,
    ]
    return min(bounds) / (STEPS * smoothness)


def mean_squares(
    method: str, fraction: float, rounds: int, order: int, *, beta: float = BETA, start: float = START
) -> Tensor:
    """Return (1/T) sum |grad f|^2 for T = 1 to `rounds`: a row per T, a column per G.

    Args:
        method: A name in METHODS.
        fraction: The server step as a fraction of the theorem's.
        rounds: The largest T, for which the local learning rate is chosen.
        order: The seed of the order of the clients.
        beta: The weight of the gradient; the rest is that of the momentum.
        start: The initial value of every coordinate.
    """
    problem = make_problem()
    eta = fraction * largest_step(problem.smoothness, beta)
    lr = local_learning_rate(problem.smoothness, eta, rounds, beta, start)
    algorithm = METHODS[method](beta)
    models = server_models(
        algorithm,
        problem.gradients,
        Cyclic(CLIENTS, COHORT, seed=order),
        torch.full((len(DISSIMILARITIES) * DIMENSIONS,), start, dtype=torch.float64),
        rounds=rounds,
        steps=STEPS,
        lr=lr,
        # the server of FedAvg and FedCM adds the local steps up, which have the length l
        server_lr=eta if isinstance(algorithm, GHBMTheory) else eta / (STEPS * lr),
    )
    squares = derivative(models[:-1]).pow(2).reshape(rounds, len(DISSIMILARITIES), DIMENSIONS).sum(dim=2)
    return squares.cumsum(dim=0) / torch.arange(1, rounds + 1)[:, None]


def best_mean_squares(
    method: str, horizons: list[int], orders: int, *, beta: float = BETA, start: float = START
) -> Tensor:
    """Return (1/T) sum |grad f|^2 at the best server step, by order, T and G.

    For each T and G it is the server step with the least mean over the orders.
    """
    rows = [T - 1 for T in horizons]

    def by_order(fraction: float) -> Tensor:
        curves = [mean_squares(method, fraction, max(horizons), i, beta=beta, start=start) for i in range(orders)]
        return torch.stack([curve[rows] for curve in curves])

    results = torch.stack([by_order(fraction) for fraction in FRACTIONS])
    best = results.mean(dim=1).argmin(dim=0)
    return results.gather(0, best.expand(1, orders, *best.shape))[0]
