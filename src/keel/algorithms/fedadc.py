"""Accelerated federated learning with drift control: heavy-ball or Nesterov momentum in the local steps.

E. Ozfatura, K. Ozfatura, D. Gunduz. FedADC: Accelerated Federated Learning with Drift Control. ISIT 2021.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from keel.algorithms.base import Algorithm, hyperparameters, weighted_mean
from keel.algorithms.types import ClientContext, Context, Fraction, Gradient, Message, Report, State


@hyperparameters
class FedADC(Algorithm):
    """The server's last step, spread over the local steps.

    client:  u = g, d = -l beta m / J;  with nesterov g is taken at w + d
    server:  theta <- theta - eta mean(D_i);  m <- mean(D_i) / l

    At eta = 1 the heavy-ball form is GHBM with tau = 1.
    """

    name = "fedadc"
    title = "FedADC"
    paper = "Ozfatura et al., ISIT 2021"
    mean_suffices = True

    beta: Fraction = 0.9
    nesterov: bool = False

    def init_server(self, theta: Tensor) -> State:
        return {"theta": theta, "m": torch.zeros_like(theta)}

    def broadcast(self, server: State, ctx: Context) -> Message:
        return {"theta": server["theta"], "m": server["m"]}

    def direction(self, w: Tensor, gradient: Gradient, received: Message, state: State, ctx: ClientContext) -> Tensor:
        return gradient(w + self.displacement(w, received, state, ctx) if self.nesterov else w)

    def displacement(self, w: Tensor, received: Message, state: State, ctx: ClientContext) -> Tensor:
        return received["m"] * (-ctx.lr * self.beta / ctx.steps)

    def aggregate(self, server: State, reports: Iterable[Report], ctx: Context) -> State:
        delta = weighted_mean(reports)["delta"]
        return {"theta": server["theta"] - ctx.server_lr * delta, "m": delta / ctx.lr}
