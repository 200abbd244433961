"""Generalized heavy-ball momentum at the server, with a lookahead for the clients. Keel's extension of GHBM.

It takes the momentum of GHBM (Zaccone et al., TMLR 2025) and the lookahead of FedACG (Kim et al., CVPR 2024).
"""

from collections.abc import Iterable

from torch import Tensor

from keel.algorithms.base import Algorithm, hyperparameters, weighted_mean
from keel.algorithms.ghbm import mean_step, past_models
from keel.algorithms.types import (
    ClientContext,
    Context,
    Fraction,
    Gradient,
    Message,
    NonNegative,
    Report,
    State,
    Tau,
    in_rounds,
)


@hyperparameters
class GHBMLookahead(Algorithm):
    """GHBM whose momentum the server applies; clients start where the last tau rounds lead to.

    server:  m = (theta^{t-tau-1} - theta^{t-1}) / tau, zero until tau rounds exist
             sends x = theta - kappa m, kappa = lookahead tau
    client:  from w = x:  u = g + mu (w - x)
    server:  theta <- theta - beta m - eta mean(x - w_i)

    `lookahead` is the part of the movement of the last tau rounds by which x is ahead of theta. kappa = beta is
    Nesterov's point; beta = lookahead = mu = 0 is FedAvg. Unlike with GHBM, m is not sent and does not depend on eta.
    """

    name = "ghbm_lookahead"
    title = "GHBM (look-ahead)"
    paper = "Keel, after Zaccone et al."
    mean_suffices = True

    beta: Fraction = 0.9
    tau: Tau = "period"
    lookahead: NonNegative = 0.5
    mu: NonNegative = 0.0

    def history(self, period: float) -> int:
        return in_rounds(self.tau, period)

    def broadcast(self, server: State, ctx: Context) -> Message:
        tau = ctx.rounds(self.tau)
        return {"theta": server["theta"] - self.lookahead * tau * mean_step(server, tau)}

    def direction(self, w: Tensor, gradient: Gradient, received: Message, state: State, ctx: ClientContext) -> Tensor:
        return gradient(w) + self.mu * (w - received["theta"])

    def aggregate(self, server: State, reports: Iterable[Report], ctx: Context) -> State:
        tau = ctx.rounds(self.tau)
        step = self.beta * mean_step(server, tau) + ctx.server_lr * weighted_mean(reports)["delta"]
        return {"theta": server["theta"] - step, **past_models(server, tau)}
