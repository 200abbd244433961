"""A server step size that grows with the disagreement of the clients.

D. Jhunjhunwala, S. Wang, G. Joshi. FedExP: Speeding Up Federated Averaging via Extrapolation. ICLR 2023.
arXiv:2301.09604.
"""

from collections.abc import Iterable

from torch import Tensor

from keel.algorithms.base import Algorithm, hyperparameters, weighted_mean
from keel.algorithms.types import ClientContext, Context, Message, Path, Positive, Report, State


@hyperparameters
class FedExP(Algorithm):
    """FedAvg whose server extrapolates: the less the clients' updates agree, the longer its step.

    client:  u = g, from w = x;  sends D_i and |D_i|^2
    server:  eta_g = max(1, mean(|D_i|^2) / (2 (|D|^2 + epsilon))),  D = mean(D_i)
             x <- x - eta eta_g D;  theta is the mean of the last two x

    Training continues from x, which oscillates; theta is evaluated and exported. The paper has eta = 1.
    """

    name = "fedexp"
    title = "FedExP"
    paper = "Jhunjhunwala et al., ICLR 2023"
    mean_suffices = True

    epsilon: Positive = 0.001

    def init_server(self, theta: Tensor) -> State:
        return {"theta": theta, "x": theta}

    def broadcast(self, server: State, ctx: Context) -> Message:
        return {"theta": server["x"]}

    def report(self, path: Path, received: Message, state: State, ctx: ClientContext) -> tuple[Message, State]:
        delta = path.start - path.end
        return {"delta": delta, "square": delta.square().sum(dim=-1, keepdim=True)}, state

    def aggregate(self, server: State, reports: Iterable[Report], ctx: Context) -> State:
        mean = weighted_mean(reports)
        eta_g = mean["square"] / (2 * (mean["delta"].square().sum() + self.epsilon))
        x = server["x"] - ctx.server_lr * eta_g.clamp(min=1) * mean["delta"]
        return {"theta": (server["x"] + x) / 2, "x": x}
