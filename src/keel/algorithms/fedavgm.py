"""Momentum at the server.

T.-M. H. Hsu, H. Qi, M. Brown. Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification. 2019.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from keel.algorithms.base import Algorithm, hyperparameters, weighted_mean
from keel.algorithms.types import Context, Fraction, Report, State


@hyperparameters
class FedAvgM(Algorithm):
    """FedAvg whose server steps along a decaying sum of the mean updates; the clients do not use it.

    client:  u = g
    server:  m <- beta m + mean(theta - w_i);  theta <- theta - eta m
    """

    name = "fedavgm"
    title = "FedAvgM"
    paper = "Hsu et al., 2019"
    mean_suffices = True

    beta: Fraction = 0.9

    def init_server(self, theta: Tensor) -> State:
        return {"theta": theta, "m": torch.zeros_like(theta)}

    def aggregate(self, server: State, reports: Iterable[Report], ctx: Context) -> State:
        m = self.beta * server["m"] + weighted_mean(reports)["delta"]
        return {"theta": server["theta"] - ctx.server_lr * m, "m": m}
