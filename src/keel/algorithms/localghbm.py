"""Generalized heavy-ball momentum from the client's state: no more communication than FedAvg.

R. Zaccone, S. P. Karimireddy, C. Masone, M. Ciccone. Communication-Efficient Heterogeneous Federated Learning with
Generalized Heavy-Ball Momentum. TMLR 2025. Section "Communication Complexity of GHBM and Efficient Variants".
"""

from typing import Literal

import torch
from torch import Tensor

from keel.algorithms.base import Algorithm, hyperparameters
from keel.algorithms.types import ClientContext, Fraction, Message, Path, State


@hyperparameters
class LocalGHBM(Algorithm):
    """GHBM whose clients keep the model that they received last, instead of receiving the momentum.

    client:  u = g, d = -beta (a - theta) / (tau_i J),  a the model received in the client's last round
    state:   a <- theta

    tau_i is the number of rounds since the client last took part ("actual", the paper's text) or 1/C ("expected",
    the authors' code). A client in its first round has no momentum. Under cyclic participation this is GHBM with
    tau = 1/C.
    """

    name = "localghbm"
    title = "LocalGHBM"
    paper = "Zaccone et al., TMLR 2025"
    mean_suffices = True

    beta: Fraction = 0.9
    tau_i: Literal["actual", "expected"] = "actual"

    def init_client(self, theta: Tensor) -> State:
        never = torch.zeros(1, dtype=torch.int64)
        return {"anchor": theta, "seen": never, "last": never}

    def displacement(self, w: Tensor, received: Message, state: State, ctx: ClientContext) -> Tensor:
        # `seen` is 0 in the first round and 1 after it: no branch, so that a cohort can be batched.
        scale = -self.beta * state["seen"] / (self._tau(state, ctx) * ctx.steps)
        return (state["anchor"] - self._current(w, received)).mul_(scale)

    def report(self, path: Path, received: Message, state: State, ctx: ClientContext) -> tuple[Message, State]:
        message, _ = super().report(path, received, state, ctx)
        seen = torch.ones_like(state["seen"])
        return message, {"anchor": self._anchor(path), "seen": seen, "last": ctx.round * seen}

    def _current(self, w: Tensor, received: Message) -> Tensor:
        """The model that the anchor is compared with."""
        return received["theta"]

    def _anchor(self, path: Path) -> Tensor:
        """The model that the client keeps."""
        return path.start

    def _tau(self, state: State, ctx: ClientContext) -> float | Tensor:
        return ctx.period if self.tau_i == "expected" else ctx.round - state["last"]
