"""Sharpness-aware minimisation whose perturbation points along the movement of the server's model.

Z. Fan, S. Hu, J. Yao, G. Niu, Y. Zhang, M. Sugiyama, Y. Wang. Locally Estimated Global Perturbations are Better than
Local Perturbations for Federated Sharpness-aware Minimization. ICML 2024.
"""

import torch
from torch import Tensor

from keel.algorithms.base import Algorithm, hyperparameters
from keel.algorithms.types import ClientContext, Gradient, Message, NonNegative, Path, State

TINY = torch.finfo(torch.float32).tiny


@hyperparameters
class FedLESAM(Algorithm):
    """FedAvg whose gradients are taken at a point ahead of w, on the line through the last two models received.

    client:  u = g(w + delta),  delta = rho (a - theta) / |a - theta|,  a the model received in the client's last round
    state:   a <- theta

    a - theta estimates the direction of the global gradient, along which SAM perturbs the model: one gradient per step
    where SAM needs two. A client in its first round has delta = 0. rho = 0 is FedAvg.
    """

    name = "fedlesam"
    title = "FedLESAM"
    paper = "Fan et al., ICML 2024"
    mean_suffices = True

    rho: NonNegative = 0.05

    def init_client(self, theta: Tensor) -> State:
        return {"anchor": theta, "seen": torch.zeros(1, dtype=torch.int64)}

    def init_steps(self, received: Message, state: State, ctx: ClientContext) -> State:
        # `seen` is 0 in the first round and 1 after it: no branch, so that a cohort can be batched.
        offset = state["anchor"] - received["theta"]
        norm = torch.linalg.vector_norm(offset, dim=-1, keepdim=True).clamp_min(TINY)
        return {"delta": offset / norm * (self.rho * state["seen"])}

    def direction(self, w: Tensor, gradient: Gradient, received: Message, state: State, ctx: ClientContext) -> Tensor:
        return gradient(w + state["delta"])

    def report(self, path: Path, received: Message, state: State, ctx: ClientContext) -> tuple[Message, State]:
        message, _ = super().report(path, received, state, ctx)
        return message, {"anchor": path.start, "seen": torch.ones_like(state["seen"])}
