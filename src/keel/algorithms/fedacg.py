"""Momentum at the server, with a lookahead for the clients.

G. Kim, J. Kim, B. Han. Communication-Efficient Federated Learning with Accelerated Client Gradient. CVPR 2024.
"""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from keel.algorithms.base import Algorithm, hyperparameters, weighted_mean
from keel.algorithms.types import ClientContext, Context, Fraction, Gradient, Message, NonNegative, Report, State


@hyperparameters
class FedACG(Algorithm):
    """FedAvgM in Nesterov's form: clients start at the point that the momentum leads to, with a proximal term to it.

    server:  sends x = theta - eta lambda m  (lookahead = "scaled") or theta - lambda m  ("full")
    client:  from w = x:  u = g + beta (w - x)
    server:  m <- lambda m + mean(x - w_i);  theta <- theta - eta m

    lambda = beta = 0 is FedAvg. `lambda_` is lambda, a reserved word in Python.

    The paper has no server learning rate. At eta = 1 both lookaheads are its rule. At another eta, "scaled" is
    Nesterov's point, one momentum step ahead of theta; "full" is 1/eta times as far.
    """

    name = "fedacg"
    title = "FedACG"
    paper = "Kim et al., CVPR 2024"
    mean_suffices = True

    lambda_: Fraction = 0.9
    beta: NonNegative = 0.01
    lookahead: Literal["scaled", "full"] = "scaled"

    def init_server(self, theta: Tensor) -> State:
        return {"theta": theta, "m": torch.zeros_like(theta)}

    def broadcast(self, server: State, ctx: Context) -> Message:
        length = self.lambda_ * (ctx.server_lr if self.lookahead == "scaled" else 1.0)
        return {"theta": server["theta"] - length * server["m"]}

    def direction(self, w: Tensor, gradient: Gradient, received: Message, state: State, ctx: ClientContext) -> Tensor:
        return gradient(w) + self.beta * (w - received["theta"])

    def aggregate(self, server: State, reports: Iterable[Report], ctx: Context) -> State:
        m = self.lambda_ * server["m"] + weighted_mean(reports)["delta"]
        return {"theta": server["theta"] - ctx.server_lr * m, "m": m}
