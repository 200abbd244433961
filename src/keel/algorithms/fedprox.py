"""A proximal term that keeps the local model near the server's.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith. Federated Optimization in Heterogeneous Networks.
MLSys 2020.
"""

from torch import Tensor

from keel.algorithms.base import Algorithm, hyperparameters
from keel.algorithms.types import ClientContext, Gradient, Message, NonNegative, State


@hyperparameters
class FedProx(Algorithm):
    """FedAvg with a proximal term to the received model in every local step.

    client:  u = g + mu (w - theta)
    """

    name = "fedprox"
    title = "FedProx"
    paper = "Li et al., MLSys 2020"
    mean_suffices = True

    mu: NonNegative = 0.01

    def direction(self, w: Tensor, gradient: Gradient, received: Message, state: State, ctx: ClientContext) -> Tensor:
        return gradient(w) + self.mu * (w - received["theta"])
