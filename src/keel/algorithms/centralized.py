"""The centralised reference: SGD on all the data in one place. Nothing is sent."""

from collections.abc import Iterable

import torch
from torch import Tensor

from keel.algorithms.base import Algorithm, hyperparameters, weighted_mean
from keel.algorithms.types import ClientContext, Context, Fraction, Message, Path, Report, State


@hyperparameters
class Centralized(Algorithm):
    """SGD with momentum over the pooled data of all clients; a round is the local training of one client that has all.

    v <- momentum v + g + weight_decay w;  w <- w - l v

    The velocity is kept between rounds: with one local epoch, a round is an epoch of PyTorch's SGD.
    """

    name = "centralized"
    title = "Centralized"
    paper = "reference"
    pooled = True
    mean_suffices = False  # nothing is aggregated

    momentum: Fraction = 0.9

    @property
    def local_momentum(self) -> float:
        return self.momentum

    def init_client(self, theta: Tensor) -> State:
        return {"velocity": torch.zeros_like(theta)} if self.momentum else {}

    def aggregate(self, server: State, reports: Iterable[Report], ctx: Context) -> State:
        return {"theta": server["theta"] - weighted_mean(reports)["delta"]}  # it has no server learning rate

    def report(self, path: Path, received: Message, state: State, ctx: ClientContext) -> tuple[Message, State]:
        message, _ = super().report(path, received, state, ctx)
        return message, {} if path.velocity is None else {"velocity": path.velocity}
