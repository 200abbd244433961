"""A proximal term with a correction that cancels its bias, and gradients that look for flat minima.

Y. Sun, L. Shen, T. Huang, L. Ding, D. Tao. FedSpeed: Larger Local Interval, Less Communication Round, and Higher
Generalization Accuracy. ICLR 2023.
"""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from keel.algorithms.base import Algorithm, hyperparameters, weighted_mean
from keel.algorithms.types import (
    ClientContext,
    Context,
    Fraction,
    Gradient,
    Message,
    NonNegative,
    Path,
    Positive,
    Report,
    State,
)


@hyperparameters
class FedSpeed(Algorithm):
    """FedDyn's local objective with a mix of the gradient at w and one at a point uphill from it.

    client:  u = (1 - alpha) g(w) + alpha g(w + rho g(w), same minibatch) - g_i + (w - theta) / lambda
    state:   g_i <- g_i + D_i / lambda,  the paper's prox-correction
    server:  theta <- theta - eta mean(D_i + lambda g_i)
             with corrections = "all": h <- h + S/N mean(D_i);  theta <- theta - eta (mean(D_i) + h)

    At eta = 1 the server's model is the paper's mean of w_i - lambda g_i over the cohort. h is lambda times the mean of
    g_i over all clients, which is what the authors' code adds. With alpha = 0 or rho = 0 that is FedDyn with its
    alpha = 1 / lambda.
    """

    name = "fedspeed"
    title = "FedSpeed"
    paper = "Sun et al., ICLR 2023"
    mean_suffices = True

    lambda_: Positive = 10.0
    alpha: Fraction = 1.0
    rho: NonNegative = 0.1
    corrections: Literal["cohort", "all"] = "cohort"

    @property
    def server_sum(self) -> str | None:
        return "h" if self.corrections == "all" else None

    def init_server(self, theta: Tensor) -> State:
        return {"theta": theta} if self.corrections == "cohort" else {"theta": theta, "h": torch.zeros_like(theta)}

    def init_client(self, theta: Tensor) -> State:
        return {"g": torch.zeros_like(theta)}

    def direction(self, w: Tensor, gradient: Gradient, received: Message, state: State, ctx: ClientContext) -> Tensor:
        g = gradient(w)
        mixed = (1 - self.alpha) * g + self.alpha * gradient(w + self.rho * g)
        return mixed - state["g"] + (w - received["theta"]) / self.lambda_

    def report(self, path: Path, received: Message, state: State, ctx: ClientContext) -> tuple[Message, State]:
        delta = path.start - path.end
        g = state["g"] + delta / self.lambda_
        return {"delta": delta + self.lambda_ * g if self.corrections == "cohort" else delta}, {"g": g}

    def aggregate(self, server: State, reports: Iterable[Report], ctx: Context) -> State:
        delta = weighted_mean(reports)["delta"]
        if self.corrections == "cohort":
            return {"theta": server["theta"] - ctx.server_lr * delta}
        h = server["h"] + ctx.share * delta
        return {"theta": server["theta"] - ctx.server_lr * (delta + h), "h": h}
