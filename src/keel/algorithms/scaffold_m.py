"""SCAFFOLD with momentum in the local steps.

Z. Cheng, X. Huang, P. Wu, K. Yuan. Momentum Benefits Non-IID Federated Learning Simply and Provably. ICLR 2024.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from keel.algorithms.base import hyperparameters, weighted_mean
from keel.algorithms.scaffold import Scaffold
from keel.algorithms.types import ClientContext, Context, Fraction, Gradient, Message, Report, State


@hyperparameters
class ScaffoldM(Scaffold):
    """SCAFFOLD whose corrected gradient is mixed with the last round's mean direction, as in FedCM.

    client:  u = beta (g - c_i + c) + (1 - beta) m
    server:  as SCAFFOLD;  m <- mean(D_i / (l J_i))

    beta = 1 is SCAFFOLD. The control variates make it robust to heterogeneity; momentum makes it faster.
    """

    name = "scaffold_m"
    title = "SCAFFOLD-M"
    paper = "Cheng et al., ICLR 2024"
    mean_suffices = False

    beta: Fraction = 0.1

    def init_server(self, theta: Tensor) -> State:
        return {**super().init_server(theta), "m": torch.zeros_like(theta)}

    def broadcast(self, server: State, ctx: Context) -> Message:
        return {**super().broadcast(server, ctx), "m": server["m"]}

    def direction(self, w: Tensor, gradient: Gradient, received: Message, state: State, ctx: ClientContext) -> Tensor:
        corrected = super().direction(w, gradient, received, state, ctx)
        return self.beta * corrected + (1 - self.beta) * received["m"]

    def aggregate(self, server: State, reports: Iterable[Report], ctx: Context) -> State:
        mean = weighted_mean(
            reports, lambda report: {**report.message, "m": report.message["delta"] / (ctx.lr * report.steps)}
        )
        theta = server["theta"] - ctx.server_lr * mean["delta"]
        c = server["c"] + ctx.share * mean["control"]
        return {"theta": theta, "c": c, "m": mean["m"]}
