"""The version of GHBM that the paper's convergence proof is about.

R. Zaccone, S. P. Karimireddy, C. Masone, M. Ciccone. Communication-Efficient Heterogeneous Federated Learning with
Generalized Heavy-Ball Momentum. TMLR 2025. Algorithm "GHBM (theory version)".
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from keel.algorithms.base import Algorithm, hyperparameters, weighted_mean
from keel.algorithms.types import ClientContext, Context, Fraction, Gradient, Message, Report, State, Tau, in_rounds


@hyperparameters
class GHBMTheory(Algorithm):
    """Momentum as the mean of the last tau pseudo-gradients, and a server that steps along it.

    client:  u = beta g + (1 - beta) m
    server:  u^t = mean(D_i / (l J_i));  bar^t = bar^{t-1} - u^t + (1 - beta) m
             m <- (1 - beta) m + (bar^{t-tau} - bar^t) / tau;  theta <- theta - eta m

    bar accumulates: bar^{t-tau} - bar^t is then the sum of tau pseudo-gradients, less the momentum that was added
    to them, as the proof needs. (The printed line starts each bar^t at theta^{t-1}, which is not that sum.) Before
    tau rounds exist the sum is over those that do. The server learning rate is the paper's eta = gamma J l.
    """

    name = "ghbm_theory"
    title = "GHBM (theory)"
    paper = "Zaccone et al., TMLR 2025"
    mean_suffices = False

    beta: Fraction = 0.1
    tau: Tau = "period"

    def history(self, period: float) -> int:
        return in_rounds(self.tau, period)

    def init_server(self, theta: Tensor) -> State:
        return {"theta": theta, "m": torch.zeros_like(theta), "bar.0": theta}

    def broadcast(self, server: State, ctx: Context) -> Message:
        return {"theta": server["theta"], "m": server["m"]}

    def direction(self, w: Tensor, gradient: Gradient, received: Message, state: State, ctx: ClientContext) -> Tensor:
        return self.beta * gradient(w) + (1 - self.beta) * received["m"]

    def aggregate(self, server: State, reports: Iterable[Report], ctx: Context) -> State:
        tau = ctx.rounds(self.tau)
        u = weighted_mean(reports, lambda r: {"u": r.message["delta"] / (ctx.lr * r.steps)})["u"]
        bars = [server[f"bar.{k}"] for k in range(len(server) - 2)]  # bar^{t-1}, bar^{t-2}, ...
        bar = bars[0] - u + (1 - self.beta) * server["m"]
        m = (1 - self.beta) * server["m"] + (bars[:tau][-1] - bar) / tau
        history = {f"bar.{k}": past for k, past in enumerate([bar, *bars][:tau])}
        return {"theta": server["theta"] - ctx.server_lr * m, "m": m, **history}
