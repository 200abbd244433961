"""Generalized heavy-ball momentum, with stateless clients.

R. Zaccone, S. P. Karimireddy, C. Masone, M. Ciccone. Communication-Efficient Heterogeneous Federated Learning with
Generalized Heavy-Ball Momentum. TMLR 2025. The rule is its Eq. "ghb_fl".
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from keel.algorithms.base import Algorithm, hyperparameters
from keel.algorithms.types import ClientContext, Context, Fraction, Message, Report, State, Tau, in_rounds


def mean_step(server: State, tau: int) -> Tensor:
    """m, the server's mean step over the last tau rounds; zero until tau rounds exist."""
    theta, past = server["theta"], server.get(f"past.{tau}")
    return torch.zeros_like(theta) if past is None else (past - theta) / tau


def past_models(server: State, tau: int) -> State:
    """The tau models before the one that this round makes: `past.1` is the present one."""
    known = sum(name.startswith("past.") for name in server)
    history = [server["theta"], *(server[f"past.{k}"] for k in range(1, known + 1))]
    return {f"past.{k}": theta for k, theta in enumerate(history[:tau], start=1)}


@hyperparameters
class GHBM(Algorithm):
    """Every local step also takes 1/J of the server's mean step over the last tau rounds.

    server:  m = (theta^{t-tau-1} - theta^{t-1}) / tau, zero until tau rounds exist
    client:  u = g, d = -beta m / J

    With tau = 1/C (the default) m represents all clients, not only the last cohort; tau = 1 is classical momentum. The
    server sends m in addition to theta and keeps the last tau models.
    """

    name = "ghbm"
    title = "GHBM"
    paper = "Zaccone et al., TMLR 2025"
    mean_suffices = True

    beta: Fraction = 0.9
    tau: Tau = "period"

    def history(self, period: float) -> int:
        return in_rounds(self.tau, period)

    def broadcast(self, server: State, ctx: Context) -> Message:
        return {"theta": server["theta"], "m": mean_step(server, ctx.rounds(self.tau))}

    def displacement(self, w: Tensor, received: Message, state: State, ctx: ClientContext) -> Tensor:
        return received["m"] * (-self.beta / ctx.steps)

    def aggregate(self, server: State, reports: Iterable[Report], ctx: Context) -> State:
        return {**super().aggregate(server, reports, ctx), **past_models(server, ctx.rounds(self.tau))}
