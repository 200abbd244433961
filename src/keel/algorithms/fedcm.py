"""Client-level momentum: the last round's mean direction in every local step.

J. Xu, S. Wang, L. Wang, A. C.-C. Yao. FedCM: Federated Learning with Client-level Momentum. 2021.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from keel.algorithms.base import Algorithm, hyperparameters, weighted_mean
from keel.algorithms.types import ClientContext, Context, Fraction, Gradient, Message, Report, State


@hyperparameters
class FedCM(Algorithm):
    """Local gradients mixed with the mean direction of the last cohort.

    client:  u = alpha g + (1 - alpha) m
    server:  theta <- theta - eta mean(D_i);  m <- mean(D_i / (l J_i))

    alpha = 1 is FedAvg. m represents only the last cohort; GHBM's represents all clients.
    """

    name = "fedcm"
    title = "FedCM"
    paper = "Xu et al., 2021"
    mean_suffices = False

    alpha: Fraction = 0.1

    def init_server(self, theta: Tensor) -> State:
        return {"theta": theta, "m": torch.zeros_like(theta)}

    def broadcast(self, server: State, ctx: Context) -> Message:
        return {"theta": server["theta"], "m": server["m"]}

    def direction(self, w: Tensor, gradient: Gradient, received: Message, state: State, ctx: ClientContext) -> Tensor:
        return self.alpha * gradient(w) + (1 - self.alpha) * received["m"]

    def aggregate(self, server: State, reports: Iterable[Report], ctx: Context) -> State:
        mean = weighted_mean(
            reports, lambda report: {**report.message, "m": report.message["delta"] / (ctx.lr * report.steps)}
        )
        return {"theta": server["theta"] - ctx.server_lr * mean["delta"], "m": mean["m"]}
