"""The state of a run between two rounds: all that a checkpoint has to hold."""

from dataclasses import dataclass, field

from torch import Tensor

from keel.algorithms.base import State
from keel.core.client_state import ClientStates

BUFFERS = "keel.buffers"
"""The model's buffers in a client's state or in a message; no algorithm uses this name."""


@dataclass
class TrainingState:
    """All that is needed to continue: the last finished round, the server state and the client states.

    `buffers` are the model's averaged ones. A client that keeps its buffers local has them in its state, under BUFFERS.
    `observed` are tensors that observers keep between rounds. `norms` are the recorded norms of the reports of the last
    rounds, from which an adaptive clipping threshold is learned. `mean` is what a mechanism that takes the mean keeps.
    """

    round: int
    server: State
    clients: ClientStates = field(default_factory=ClientStates)
    buffers: Tensor | None = None
    observed: dict[str, Tensor] = field(default_factory=dict)
    norms: dict[str, Tensor] = field(default_factory=dict)
    mean: dict[str, Tensor] = field(default_factory=dict)
