"""The reference: ordinary SGD on all the data at one place. No federation, nothing sent."""

from collections.abc import Iterable

import torch
from torch import Tensor

from keel.algorithms.base import (
    Algorithm,
    ClientContext,
    Context,
    Fraction,
    Memory,
    Message,
    Path,
    Report,
    State,
    hyperparameters,
    weighted_mean,
)


@hyperparameters
class Centralized(Algorithm):
    """SGD with momentum over the clients' data taken together; a round is the local work of one client that has all.

    v <- momentum v + g + weight_decay w;  w <- w - l v

    The velocity is kept from round to round, so that with one local epoch a round is an epoch of PyTorch's SGD.
    """

    name = "centralized"
    title = "Centralized"
    paper = "reference"
    pooled = True
    mean_suffices = False  # there is nobody to aggregate

    momentum: Fraction = 0.9

    @property
    def local_momentum(self) -> float:
        return self.momentum

    def init_client(self, theta: Tensor) -> Memory:
        return {"velocity": torch.zeros_like(theta)} if self.momentum else {}

    def aggregate(self, server: State, reports: Iterable[Report], ctx: Context) -> State:
        return {"theta": server["theta"] - weighted_mean(reports)["delta"]}  # there is no server with a rate of its own

    def report(self, path: Path, received: Message, memory: Memory, ctx: ClientContext) -> tuple[Message, Memory]:
        message, _ = super().report(path, received, memory, ctx)
        return message, {} if path.velocity is None else {"velocity": path.velocity}
