"""A personal model per client, pulled towards the model that all clients train.

T. Li, S. Hu, A. Beirami, V. Smith. Ditto: Fair and Robust Federated Learning Through Personalization. ICML 2021.
"""

from collections.abc import Sequence

from torch import Tensor

from keel.algorithms.base import Algorithm, hyperparameters
from keel.algorithms.types import ClientContext, Direction, Gradient, Message, NonNegative, Path, State


@hyperparameters
class Ditto(Algorithm):
    """FedAvg, and in each local step a step of the client's personal model v_i on the same minibatch.

    client:  u = g;  v_i <- v_i - l (g(v_i, same minibatch) + lambda (v_i - theta))
    state:   v_i, the initial model before the client's first round
    server:  theta <- theta - eta mean(D_i)

    theta is the model that the client received. lambda = 0 trains v_i on the client's examples alone. The server's
    model is FedAvg's, whatever lambda is.
    """

    name = "ditto"
    title = "Ditto"
    paper = "Li et al., ICML 2021"
    mean_suffices = True

    lambda_: NonNegative = 1.0

    def init_client(self, theta: Tensor) -> State:
        return {"personal": theta}

    def init_steps(self, received: Message, state: State, ctx: ClientContext) -> State:
        return {"v": state["personal"]}

    def direction(
        self, w: Tensor, gradient: Gradient, received: Message, state: State, ctx: ClientContext
    ) -> Direction:
        u, v = gradient(w), state["v"]  # first at w: the training loss is that of the first gradient of a step
        return u, {"v": v - ctx.lr * (gradient(v) + self.lambda_ * (v - received["theta"]))}

    def report(self, path: Path, received: Message, state: State, ctx: ClientContext) -> tuple[Message, State]:
        return {"delta": path.start - path.end}, {"personal": path.step_state["v"]}

    def personal_model(self, theta: Tensor, state: State, sizes: Sequence[int]) -> Tensor:
        return state["personal"]
