"""Clients that tune their step size to the local smoothness of their loss.

J. L. Kim, M. T. Toghani, C. A. Uribe, A. Kyrillidis. Adaptive Federated Learning with Auto-Tuned Clients. ICLR 2024.
"""

import torch
from torch import Tensor

from keel.algorithms.base import Algorithm, hyperparameters
from keel.algorithms.types import ClientContext, Direction, Gradient, Message, NonNegative, Positive, State


@hyperparameters
class DeltaSGD(Algorithm):
    """FedAvg whose step size follows the inverse of the curvature that the client measures along its path.

    client:  w <- w - eta_k g_k;  eta_0 = l, and for k > 0
             eta_k = min(gamma |w_k - w_{k-1}| / (2 |g_k - g_{k-1}|), sqrt(1 + delta r_{k-1}) eta_{k-1})
             r_k = eta_k / eta_{k-1},  r_0 = 1 (the paper's theta_k)

    In the form of a direction: u = (eta_k / l) g_k. Where the first bound is 0 or 0 / 0, eta_k is the second one.
    """

    name = "delta_sgd"
    title = "Delta-SGD"
    paper = "Kim et al., ICLR 2024"
    mean_suffices = True
    own_optimizer = True

    gamma: Positive = 2.0
    delta: NonNegative = 0.1

    def init_steps(self, received: Message, state: State, ctx: ClientContext) -> State:
        # In the first step the model has not moved yet, so that eta_0 = sqrt(1 + delta 0) l.
        theta, number = received["theta"], received["theta"].new_zeros(1)
        return {"w": theta, "g": torch.zeros_like(theta), "eta": number + ctx.lr, "ratio": number}

    def direction(
        self, w: Tensor, gradient: Gradient, received: Message, state: State, ctx: ClientContext
    ) -> Direction:
        g = gradient(w)
        bound = self.gamma * _norm(w - state["w"]) / (2 * _norm(g - state["g"]))
        bound = torch.where(bound > 0, bound, torch.inf)
        eta = torch.minimum(bound, (1 + self.delta * state["ratio"]).sqrt() * state["eta"])
        return eta / ctx.lr * g, {"w": w, "g": g, "eta": eta, "ratio": eta / state["eta"]}


def _norm(vector: Tensor) -> Tensor:
    return torch.linalg.vector_norm(vector, dim=-1, keepdim=True)
