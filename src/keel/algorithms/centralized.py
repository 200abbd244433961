"""The centralised reference: training on all the data in one place. Nothing is sent."""

from collections.abc import Iterable

from keel.algorithms.base import Algorithm, hyperparameters, weighted_mean
from keel.algorithms.types import Context, Report, State


@hyperparameters
class Centralized(Algorithm):
    """The local optimiser on the pooled data of all clients; a round is the local training of one client that has all.

    By default it is SGD with momentum 0.9 whose velocity is kept between rounds: with one local epoch, a round is an
    epoch of PyTorch's SGD.
    """

    name = "centralized"
    title = "Centralized"
    paper = "reference"
    pooled = True
    mean_suffices = False  # nothing is aggregated

    def aggregate(self, server: State, reports: Iterable[Report], ctx: Context) -> State:
        return {"theta": server["theta"] - weighted_mean(reports)["delta"]}  # it has no server learning rate
