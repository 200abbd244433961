"""Control variates against client drift.

S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh. SCAFFOLD: Stochastic Controlled
Averaging for Federated Learning. ICML 2020.
"""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from keel.algorithms.base import Algorithm, hyperparameters, weighted_mean
from keel.algorithms.types import ClientContext, Context, Gradient, Message, Observation, Path, Report, State


@hyperparameters
class Scaffold(Algorithm):
    """Each local step is corrected by the difference of the mean gradient of all clients (c) and this client's (c_i).

    client:  u = g - c_i + c
    state:   c_i' = mean minibatch gradient along the path (option 2), or the full gradient at theta (option 1)
    server:  theta <- theta - eta mean(D_i);  c <- c + S/N mean(c_i' - c_i)

    Where means are weighted by examples, S/N is the cohort's share of all examples: c stays the mean of all c_i.

    Option 2 equals the paper's c_i - c + (theta - w_i) / (J l) where there is no weight decay, and costs nothing.
    Many public implementations lack the factor S/N: without it c ignores the clients outside the cohort.
    """

    name = "scaffold"
    title = "SCAFFOLD"
    paper = "Karimireddy et al., ICML 2020"
    mean_suffices = True

    option: Literal[1, 2] = 2

    @property
    def observes(self) -> frozenset[Observation]:
        return frozenset({"full_gradient" if self.option == 1 else "mean_gradient"})

    @property
    def server_sum(self) -> str:
        return "c"

    def init_server(self, theta: Tensor) -> State:
        return {"theta": theta, "c": torch.zeros_like(theta)}

    def init_client(self, theta: Tensor) -> State:
        return {"c": torch.zeros_like(theta)}

    def broadcast(self, server: State, ctx: Context) -> Message:
        return {"theta": server["theta"], "c": server["c"]}

    def direction(self, w: Tensor, gradient: Gradient, received: Message, state: State, ctx: ClientContext) -> Tensor:
        return (gradient(w) - state["c"]).add_(received["c"])

    def report(self, path: Path, received: Message, state: State, ctx: ClientContext) -> tuple[Message, State]:
        control = path.full_gradient if self.option == 1 else path.mean_gradient
        assert control is not None
        return {"delta": path.start - path.end, "control": control - state["c"]}, {"c": control}

    def aggregate(self, server: State, reports: Iterable[Report], ctx: Context) -> State:
        mean = weighted_mean(reports)
        theta = server["theta"] - ctx.server_lr * mean["delta"]
        return {"theta": theta, "c": server["c"] + ctx.share * mean["control"]}
