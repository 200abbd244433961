"""Generalized heavy-ball momentum from the client's own memory: no more communication than FedAvg.

R. Zaccone, S. P. Karimireddy, C. Masone, M. Ciccone. Communication-Efficient Heterogeneous Federated Learning with
Generalized Heavy-Ball Momentum. TMLR 2025. Section "Communication Complexity of GHBM and Efficient Variants".
"""

from typing import Literal

import torch
from torch import Tensor

from keel.algorithms.base import (
    Algorithm,
    ClientContext,
    Fraction,
    Gradient,
    Memory,
    Message,
    Path,
    hyperparameters,
)


@hyperparameters
class LocalGHBM(Algorithm):
    """GHBM whose clients remember the model they received last time instead of being sent the momentum.

    client:  u = g + beta (a - theta) / (tau_i l J),  a the model received in the client's last round
    memory:  a <- theta

    tau_i is 1/C ("expected") or the rounds since the client's last turn ("actual"). A client in its first round
    has no momentum. Under cyclic participation this is GHBM with tau = 1/C.
    """

    name = "localghbm"
    title = "LocalGHBM"
    paper = "Zaccone et al., TMLR 2025"

    beta: Fraction = 0.9
    tau_i: Literal["expected", "actual"] = "expected"

    def init_client(self, theta: Tensor) -> Memory:
        never = torch.zeros(1)
        return {"anchor": theta, "seen": never, "last": never}

    def direction(self, w: Tensor, gradient: Gradient, received: Message, memory: Memory, ctx: ClientContext) -> Tensor:
        # `seen` is 0 in the first round and 1 after it: no branch, so that a cohort can run as one program.
        scale = self.beta * memory["seen"] / (self._tau(memory, ctx) * ctx.lr * ctx.steps)
        return (memory["anchor"] - self._current(w, received)).mul_(scale).add_(gradient(w))

    def report(self, path: Path, received: Message, memory: Memory, ctx: ClientContext) -> tuple[Message, Memory]:
        message, _ = super().report(path, received, memory, ctx)
        seen = torch.ones_like(memory["seen"])
        return message, {"anchor": self._anchor(path), "seen": seen, "last": ctx.round * seen}

    def _current(self, w: Tensor, received: Message) -> Tensor:
        """What the anchor is compared to."""
        return received["theta"]

    def _anchor(self, path: Path) -> Tensor:
        """What is remembered."""
        return path.start

    def _tau(self, memory: Memory, ctx: ClientContext) -> float | Tensor:
        return ctx.period if self.tau_i == "expected" else ctx.round - memory["last"]
