"""AdamW on the clients, with a second moment that the server carries from round to round.

J. Liu, F. Shang, H. Liu, Y. Tian, Y. Liu, J. Liu, K. Zhu, Z. Lin. FedAdamW: A Communication-Efficient Optimizer with
Convergence and Generalization Guarantees for Federated Large Models. AAAI 2026.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from keel.algorithms.base import Algorithm, hyperparameters, weighted_mean
from keel.algorithms.types import (
    BelowOne,
    ClientContext,
    Context,
    Direction,
    Gradient,
    Message,
    NonNegative,
    Path,
    Positive,
    Report,
    State,
)


@hyperparameters
class FedAdamW(Algorithm):
    """Local AdamW whose second moment starts from the clients' mean, one number per block, and a global direction.

    client:  m <- beta1 m + (1 - beta1) g;  v <- beta2 v + (1 - beta2) g^2;  b, c: the same with 1 for g and g^2
             u = (m / b) / (sqrt(v / c) + epsilon) + alpha G / J
             from m = b = 0, v = vbar in each block, c = cbar
    server:  theta <- theta - eta mean(D_i);  G <- mean(D_i) / l
             vbar <- mean of the means of v_i over each block;  cbar <- mean(c_i)

    A block is a parameter tensor. b and c are the weights of all gradients in m and v, which are the paper's bias
    corrections: b = 1 - beta1^k in step k of a round and, with equal steps, c = 1 - beta2^t, t the steps of all rounds.
    G / J is the paper's Delta_G. Decoupled weight decay is `local.weight_decay`.
    """

    name = "fedadamw"
    title = "FedAdamW"
    paper = "Liu et al., AAAI 2026"
    mean_suffices = True
    unclippable = "a report has second moments and their weights, whose ratio noise on both would destroy"
    own_optimizer = True

    alpha: NonNegative = 0.5
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.999
    epsilon: Positive = 1e-8

    def init_server(self, theta: Tensor) -> State:
        zero = theta.new_zeros(1)
        return {"theta": theta, "G": torch.zeros_like(theta), "v": zero, "c": zero}

    def broadcast(self, server: State, ctx: Context) -> Message:
        return {**server, "v": server["v"].expand(len(ctx.sizes)).contiguous()}

    def init_steps(self, received: Message, state: State, ctx: ClientContext) -> State:
        theta = received["theta"]
        v = torch.cat([mean.expand(size) for mean, size in zip(torch.split(received["v"], 1), ctx.sizes, strict=True)])
        return {"m": torch.zeros_like(theta), "b": theta.new_zeros(1), "v": v, "c": received["c"]}

    def direction(
        self, w: Tensor, gradient: Gradient, received: Message, state: State, ctx: ClientContext
    ) -> Direction:
        g, one = gradient(w), torch.ones_like(state["c"])
        averages = {"m": (self.beta1, g), "b": (self.beta1, one), "v": (self.beta2, g * g), "c": (self.beta2, one)}
        new = {name: beta * state[name] + (1 - beta) * value for name, (beta, value) in averages.items()}
        step = (new["m"] / new["b"]) / ((new["v"] / new["c"]).sqrt() + self.epsilon)
        return step + self.alpha * received["G"] / ctx.steps, new

    def report(self, path: Path, received: Message, state: State, ctx: ClientContext) -> tuple[Message, State]:
        blocks = torch.split(path.step_state["v"], list(ctx.sizes), dim=-1)
        v = torch.cat([block.mean(dim=-1, keepdim=True) for block in blocks], dim=-1)
        return {"delta": path.start - path.end, "v": v, "c": path.step_state["c"]}, state

    def aggregate(self, server: State, reports: Iterable[Report], ctx: Context) -> State:
        mean = weighted_mean(reports)
        theta = server["theta"] - ctx.server_lr * mean["delta"]
        # not below 0, whatever a site sends: clients take the root of v / c
        v, c = mean["v"].clamp_min(0), mean["c"].clamp_min(0)
        return {"theta": theta, "G": mean["delta"] / ctx.lr, "v": v, "c": c}
