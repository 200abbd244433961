"""Dynamic regularisation: local objectives that agree with the global one at its stationary points.

D. A. E. Acar, Y. Zhao, R. Matas Navarro, M. Mattina, P. N. Whatmough, V. Saligrama. Federated Learning Based on
Dynamic Regularization. ICLR 2021.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from keel.algorithms.base import Algorithm, hyperparameters, weighted_mean
from keel.algorithms.types import ClientContext, Context, Gradient, Message, Path, Positive, Report, State


@hyperparameters
class FedDyn(Algorithm):
    """A proximal term, and a linear term g_i that sums the earlier proximal terms of this client.

    client:  u = g - g_i + alpha (w - theta)
    state:   g_i <- g_i + alpha D_i
    server:  h <- h + alpha S/N mean(D_i);  theta <- theta - eta (mean(D_i) + h / alpha)

    With D_i = theta - w_i this is the paper's h <- h - alpha (1/N) sum(w_i - theta) and theta <- mean(w_i) - h/alpha
    at eta = 1.
    """

    name = "feddyn"
    title = "FedDyn"
    paper = "Acar et al., ICLR 2021"
    mean_suffices = True

    alpha: Positive = 0.001

    @property
    def server_sum(self) -> str:
        return "h"

    def init_server(self, theta: Tensor) -> State:
        return {"theta": theta, "h": torch.zeros_like(theta)}

    def init_client(self, theta: Tensor) -> State:
        return {"g": torch.zeros_like(theta)}

    def direction(self, w: Tensor, gradient: Gradient, received: Message, state: State, ctx: ClientContext) -> Tensor:
        return gradient(w) - state["g"] + self.alpha * (w - received["theta"])

    def report(self, path: Path, received: Message, state: State, ctx: ClientContext) -> tuple[Message, State]:
        delta = path.start - path.end
        return {"delta": delta}, {"g": state["g"] + self.alpha * delta}

    def aggregate(self, server: State, reports: Iterable[Report], ctx: Context) -> State:
        delta = weighted_mean(reports)["delta"]
        h = server["h"] + self.alpha * ctx.share * delta
        return {"theta": server["theta"] - ctx.server_lr * (delta + h / self.alpha), "h": h}
