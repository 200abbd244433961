"""Distributed low-communication training: AdamW at the clients, Nesterov momentum at the server.

A. Douillard, Q. Feng, A. A. Rusu, R. Chhaparia, Y. Donchev, A. Kuncoro, M. Ranzato, A. Szlam, J. Shen. DiLoCo:
Distributed Low-Communication Training of Language Models. 2023. arXiv:2311.08105.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from keel.algorithms.base import Algorithm, hyperparameters, weighted_mean
from keel.algorithms.types import Context, Fraction, Report, State


@hyperparameters
class DiLoCo(Algorithm):
    """FedAvg whose server takes the steps of SGD with Nesterov momentum along the mean updates.

    client:  u = g; by default the local optimiser is AdamW, whose state a client keeps between its rounds
    server:  D = mean(theta - w_i);  m <- mu m + D;  theta <- theta - eta (D + mu m)

    mu is `momentum`. FedAvgM steps along m alone. The server's step is that of torch.optim.SGD with nesterov = True and
    D in the place of the gradient.
    """

    name = "diloco"
    title = "DiLoCo"
    paper = "Douillard et al., 2023"
    mean_suffices = True

    momentum: Fraction = 0.9

    def init_server(self, theta: Tensor) -> State:
        return {"theta": theta, "m": torch.zeros_like(theta)}

    def aggregate(self, server: State, reports: Iterable[Report], ctx: Context) -> State:
        delta = weighted_mean(reports)["delta"]
        m = self.momentum * server["m"] + delta
        return {"theta": server["theta"] - ctx.server_lr * (delta + self.momentum * m), "m": m}
