"""Clients that mimic a centralised optimiser: its state is fixed during a round and applied in every local step.

S. P. Karimireddy, M. Jaggi, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh. Breaking the centralized
barrier for cross-device federated learning. NeurIPS 2021.
"""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from keel.algorithms.base import Algorithm, hyperparameters, weighted_mean
from keel.algorithms.types import ClientContext, Context, Fraction, Gradient, Message, Observation, Path, Report, State

Form = Literal["average", "sum"]
"""Whether the momentum is an average of gradients or their decaying sum."""


@hyperparameters
class Mime(Algorithm):
    """A first phase collects the cohort's full gradients at theta; their mean c corrects each minibatch gradient.

    probe:   full gradients at theta, c their mean
    client:  u = g(w) - g(theta, same minibatch) + c

    Clients are stateless: c is computed in each round, at the cost of a second exchange and twice the gradients.
    """

    name = "mime"
    title = "Mime"
    paper = "Karimireddy et al., NeurIPS 2021"
    mean_suffices = True
    probes = True

    def absorb(self, server: State, probes: Iterable[Report], ctx: Context) -> tuple[State, Message]:
        return server, {"c": weighted_mean(probes)["gradient"]}

    def direction(self, w: Tensor, gradient: Gradient, received: Message, state: State, ctx: ClientContext) -> Tensor:
        return gradient(w) - gradient(received["theta"]) + received["c"]


@hyperparameters
class MimeMom(Mime):
    """Mime with heavy-ball momentum as the optimiser that is mimicked.

    client:  u = (1 - beta) (g(w) - g(theta, same minibatch) + c) + beta m
    server:  m <- beta m + (1 - beta) c

    beta = 0 is Mime. This is the average of Mime's paper. With form = "sum" the factor (1 - beta) is 1 in both lines,
    as in PyTorch's SGD, and a step is up to 1 / (1 - beta) times as long.
    """

    name = "mimemom"
    title = "MimeMom"

    beta: Fraction = 0.9
    form: Form = "average"

    def init_server(self, theta: Tensor) -> State:
        return {"theta": theta, "m": torch.zeros_like(theta)}

    def broadcast(self, server: State, ctx: Context) -> Message:
        return {"theta": server["theta"], "m": server["m"]}

    def absorb(self, server: State, probes: Iterable[Report], ctx: Context) -> tuple[State, Message]:
        server, more = super().absorb(server, probes, ctx)
        return {**server, "c": more["c"]}, more

    def direction(self, w: Tensor, gradient: Gradient, received: Message, state: State, ctx: ClientContext) -> Tensor:
        corrected = super().direction(w, gradient, received, state, ctx)
        return _fresh(self) * corrected + self.beta * received["m"]

    def aggregate(self, server: State, reports: Iterable[Report], ctx: Context) -> State:
        m = self.beta * server["m"] + _fresh(self) * server["c"]
        return {**super().aggregate(server, reports, ctx), "m": m}


@hyperparameters
class MimeLiteMom(Algorithm):
    """MimeMom without the correction and so without the first phase: the full gradient is sent with the update.

    client:  u = (1 - beta) g + beta m
    server:  m <- beta m + (1 - beta) mean of the full gradients at theta

    With form = "sum" the factor (1 - beta) is 1 in both lines, as in `MimeMom`.
    """

    name = "mimelitemom"
    title = "MimeLiteMom"
    paper = "Karimireddy et al., NeurIPS 2021"
    mean_suffices = True

    beta: Fraction = 0.9
    form: Form = "average"

    @property
    def observes(self) -> frozenset[Observation]:
        return frozenset({"full_gradient"})

    def init_server(self, theta: Tensor) -> State:
        return {"theta": theta, "m": torch.zeros_like(theta)}

    def broadcast(self, server: State, ctx: Context) -> Message:
        return {"theta": server["theta"], "m": server["m"]}

    def direction(self, w: Tensor, gradient: Gradient, received: Message, state: State, ctx: ClientContext) -> Tensor:
        return _fresh(self) * gradient(w) + self.beta * received["m"]

    def report(self, path: Path, received: Message, state: State, ctx: ClientContext) -> tuple[Message, State]:
        assert path.full_gradient is not None
        return {"delta": path.start - path.end, "gradient": path.full_gradient}, state

    def aggregate(self, server: State, reports: Iterable[Report], ctx: Context) -> State:
        mean = weighted_mean(reports)
        m = self.beta * server["m"] + _fresh(self) * mean["gradient"]
        return {"theta": server["theta"] - ctx.server_lr * mean["delta"], "m": m}


def _fresh(algorithm: MimeMom | MimeLiteMom) -> float:
    """The weight of the newest gradient relative to the momentum."""
    return 1 - algorithm.beta if algorithm.form == "average" else 1.0
