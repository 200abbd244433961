"""Sharpness-aware minimisation in the local steps, for solutions in flat regions of the loss.

Z. Qu, X. Li, R. Duan, Y. Liu, B. Tang, Z. Lu. Generalized Federated Learning via Sharpness Aware Minimization.
ICML 2022. arXiv:2206.02618.

D. Caldarola, B. Caputo, M. Ciccone. Improving Generalization in Federated Learning by Seeking Flat Minima. ECCV 2022.
arXiv:2203.11834. FedSAM, at the same time.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from keel.algorithms.base import Algorithm, hyperparameters, weighted_mean
from keel.algorithms.types import ClientContext, Context, Fraction, Gradient, Message, NonNegative, Report, State

SMALLEST_NORM = 1e-12
"""Of a gradient that is normalised to length one; a gradient of zero stays zero."""


@hyperparameters
class FedSAM(Algorithm):
    """FedAvg whose clients take the gradient at a point where the loss of the minibatch is higher.

    client:  u = g(w + rho g(w) / |g(w)|),  both gradients on the same minibatch

    rho = 0 is FedAvg. A local step takes two gradients.
    """

    name = "fedsam"
    title = "FedSAM"
    paper = "Qu et al., ICML 2022"
    mean_suffices = True

    rho: NonNegative = 0.05

    def direction(self, w: Tensor, gradient: Gradient, received: Message, state: State, ctx: ClientContext) -> Tensor:
        g = gradient(w)
        norm = torch.linalg.vector_norm(g, dim=-1, keepdim=True).clamp(min=SMALLEST_NORM)
        return gradient(w + self.rho * g / norm)


@hyperparameters
class MoFedSAM(FedSAM):
    """FedSAM whose gradient is mixed with the last round's mean direction, as in FedCM.

    client:  u = beta g(w + rho g(w) / |g(w)|) + (1 - beta) m
    server:  theta <- theta - eta mean(D_i);  m <- mean(D_i / (l J_i))

    beta = 1 is FedSAM; rho = 0 is FedCM, whose alpha is beta.
    """

    name = "mofedsam"
    title = "MoFedSAM"
    mean_suffices = False

    beta: Fraction = 0.1

    def init_server(self, theta: Tensor) -> State:
        return {"theta": theta, "m": torch.zeros_like(theta)}

    def broadcast(self, server: State, ctx: Context) -> Message:
        return {"theta": server["theta"], "m": server["m"]}

    def direction(self, w: Tensor, gradient: Gradient, received: Message, state: State, ctx: ClientContext) -> Tensor:
        sharpness_aware = super().direction(w, gradient, received, state, ctx)
        return self.beta * sharpness_aware + (1 - self.beta) * received["m"]

    def aggregate(self, server: State, reports: Iterable[Report], ctx: Context) -> State:
        mean = weighted_mean(
            reports, lambda report: {**report.message, "m": report.message["delta"] / (ctx.lr * report.steps)}
        )
        return {"theta": server["theta"] - ctx.server_lr * mean["delta"], "m": mean["m"]}
