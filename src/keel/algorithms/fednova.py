"""Normalised averaging: clients with more local steps do not weigh more.

J. Wang, Q. Liu, H. Liang, G. Joshi, H. V. Poor. Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization. NeurIPS 2020. arXiv:2007.07481.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from keel.algorithms.base import Algorithm, hyperparameters, weighted_mean
from keel.algorithms.types import ClientContext, Context, Message, Path, Report, State
from keel.errors import KeelError


@hyperparameters
class FedNova(Algorithm):
    """FedAvg whose updates are divided by the client's number of steps before the mean, and scaled back after it.

    client:  u = g;  sends D_i / |a_i| and |a_i|
    server:  theta <- theta - eta tau_eff mean(D_i / |a_i|),  tau_eff = mean(|a_i|)

    |a_i| is the sum of the weights with which D_i / l contains the gradients of the client's J_i steps: J_i with plain
    SGD. With momentum rho in the local optimiser, which is the field `momentum`, it is
    (J_i - rho (1 - rho^J_i) / (1 - rho)) / (1 - rho). With equal J_i it is FedAvg.
    """

    name = "fednova"
    title = "FedNova"
    paper = "Wang et al., NeurIPS 2020"
    mean_suffices = True
    unclippable = "the norm |a_i| of a report is a number of steps, which clipping would scale with the update"

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def check_local(self, optimizer: str, settings: Mapping[str, Any]) -> None:
        momentum = settings.get("momentum", 0.0)
        if momentum != self.momentum:
            raise KeelError(
                f"algorithm.momentum of {self.name} must be the optimiser's local.momentum (got {self.momentum} and "
                f"{momentum}); set both"
            )

    def report(self, path: Path, received: Message, state: State, ctx: ClientContext) -> tuple[Message, State]:
        norm = self._norm(ctx.steps)
        normalised = (path.start - path.end) / norm
        return {"normalised": normalised, "norm": torch.ones_like(normalised[..., :1]) * norm}, state

    def _norm(self, steps: int | Tensor) -> float | Tensor:
        """|a_i|."""
        rho = self.momentum
        return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)

    def aggregate(self, server: State, reports: Iterable[Report], ctx: Context) -> State:
        mean = weighted_mean(reports)
        return {"theta": server["theta"] - ctx.server_lr * mean["norm"] * mean["normalised"]}
