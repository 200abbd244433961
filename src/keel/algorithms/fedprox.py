"""A proximal term that holds the local model near the server's.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith. Federated Optimization in Heterogeneous Networks.
MLSys 2020.
"""

from torch import Tensor

from keel.algorithms.base import Algorithm, ClientContext, Gradient, Memory, Message, NonNegative, hyperparameters


@hyperparameters
class FedProx(Algorithm):
    """FedAvg with a pull back to the model that was received, in every local step.

    client:  u = g + mu (w - theta)
    """

    name = "fedprox"
    title = "FedProx"
    paper = "Li et al., MLSys 2020"

    mu: NonNegative = 0.01

    def direction(self, w: Tensor, gradient: Gradient, received: Message, memory: Memory, ctx: ClientContext) -> Tensor:
        return gradient(w) + self.mu * (w - received["theta"])
