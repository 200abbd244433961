"""Adaptive optimisers at the server.

S. J. Reddi, Z. Charles, M. Zaheer, Z. Garrett, K. Rush, J. Konecny, S. Kumar, H. B. McMahan. Adaptive Federated
Optimization. ICLR 2021.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from keel.algorithms.base import Algorithm, hyperparameters, weighted_mean
from keel.algorithms.types import Context, Fraction, Positive, Report, State


@hyperparameters
class FedAdagrad(Algorithm):
    """FedAvg whose server divides each step by the square root of all squared updates so far.

    server:  D = mean(D_i);  m <- beta1 m + (1 - beta1) D;  v <- v + D^2
             theta <- theta - eta m / (sqrt(v) + epsilon)

    v starts at epsilon^2. epsilon is the paper's tau, the degree of adaptivity.
    """

    name = "fedadagrad"
    title = "FedAdagrad"
    paper = "Reddi et al., ICLR 2021"
    mean_suffices = True

    beta1: Fraction = 0.0
    epsilon: Positive = 1e-3

    def init_server(self, theta: Tensor) -> State:
        return {"theta": theta, "m": torch.zeros_like(theta), "v": torch.full_like(theta, self.epsilon**2)}

    def aggregate(self, server: State, reports: Iterable[Report], ctx: Context) -> State:
        delta = weighted_mean(reports)["delta"]
        m = self.beta1 * server["m"] + (1 - self.beta1) * delta
        v = self.second_moment(server["v"], delta**2)
        return {"theta": server["theta"] - ctx.server_lr * m / (v.sqrt() + self.epsilon), "m": m, "v": v}

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """The new v, from D^2."""
        return v + square


@hyperparameters
class FedAdam(FedAdagrad):
    """FedAdagrad whose second moment is a decaying mean: the server steps as Adam does, without bias correction.

    server:  v <- beta2 v + (1 - beta2) D^2
    """

    name = "fedadam"
    title = "FedAdam"

    beta1: Fraction = 0.9
    beta2: Fraction = 0.99

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * square


@hyperparameters
class FedYogi(FedAdam):
    """FedAdam whose second moment changes by at most (1 - beta2) D^2 in a round.

    server:  v <- v - (1 - beta2) D^2 sign(v - D^2)
    """

    name = "fedyogi"
    title = "FedYogi"

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * square * torch.sign(v - square)
