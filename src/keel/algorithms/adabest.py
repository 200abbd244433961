"""Adaptive bias estimation: client and server corrections that decay with their age.

F. Varno, M. Saghayi, L. Rafiee Sevyeri, S. Gupta, S. Matwin, M. Havaei. AdaBest: Minimizing Client Drift in
Federated Learning via Adaptive Bias Estimation. ECCV 2022.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from keel.algorithms.base import Algorithm, hyperparameters, weighted_mean
from keel.algorithms.types import ClientContext, Context, Fraction, Gradient, Message, NonNegative, Path, Report, State


@hyperparameters
class AdaBest(Algorithm):
    """FedDyn's idea without its growing norms: old corrections are divided by their age in rounds.

    client:  u = g - h_i
    state:   h_i <- h_i / (t - t_i) + mu D_i,  t_i the client's last round
    server:  avg = theta - mean(D_i);  theta <- theta - eta (mean(D_i) + beta (avg_previous - avg))

    At eta = 1 the server's line is the paper's theta <- avg - beta (avg_previous - avg).
    """

    name = "adabest"
    title = "AdaBest"
    paper = "Varno et al., ECCV 2022"
    mean_suffices = True

    mu: NonNegative = 0.001
    beta: Fraction = 0.9

    def init_server(self, theta: Tensor) -> State:
        return {"theta": theta, "average": theta}

    def init_client(self, theta: Tensor) -> State:
        return {"h": torch.zeros_like(theta), "last": torch.zeros(1, dtype=torch.int64)}

    def direction(self, w: Tensor, gradient: Gradient, received: Message, state: State, ctx: ClientContext) -> Tensor:
        return gradient(w) - state["h"]

    def report(self, path: Path, received: Message, state: State, ctx: ClientContext) -> tuple[Message, State]:
        delta = path.start - path.end
        h = state["h"] / (ctx.round - state["last"]) + self.mu * delta
        return {"delta": delta}, {"h": h, "last": torch.full_like(state["last"], ctx.round)}

    def aggregate(self, server: State, reports: Iterable[Report], ctx: Context) -> State:
        delta = weighted_mean(reports)["delta"]
        average = server["theta"] - delta
        move = delta + self.beta * (server["average"] - average)
        return {"theta": server["theta"] - ctx.server_lr * move, "average": average}
