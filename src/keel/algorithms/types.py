"""The types of the algorithm protocol: what a round knows, what is sent, what is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import Field

if TYPE_CHECKING:  # a spec is checked before PyTorch is imported
    from torch import Tensor

Message = dict[str, "Tensor"]
"""What is sent between server and client. Its bytes are the communication cost; nothing else is sent."""
State = dict[str, "Tensor"]
"""What the server or a client keeps between rounds: float vectors as long as the model, or small tensors of any dtype.
Counters are integers."""
ClientState = State
Gradient = Callable[["Tensor"], "Tensor"]
"""The gradient of this step's minibatch at a point. At the local model the next call overwrites the result; at another
point the result is a new tensor, so that a difference of the two can be taken."""
Direction: TypeAlias = "Tensor | tuple[Tensor, State]"
"""The direction of a local step; with it the new step state, if the algorithm has one."""
Observation = Literal["mean_gradient", "full_gradient"]

Fraction = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Rounds = Annotated[int, Field(ge=1)]
Tau = Rounds | Literal["period"]
"""A number of rounds, or "period" for 1/C, whatever the participation rate is."""


def in_rounds(tau: int | str, period: float) -> int:
    """tau as a number of rounds."""
    return tau if isinstance(tau, int) else max(1, round(period))


@dataclass(frozen=True)
class Context:
    """What the server and every client know in round t."""

    round: int
    """t, from 1."""
    clients: int
    """N, the number of clients."""
    cohort: int
    """S, the number of clients in this round."""
    share: float
    """The cohort's share of the federation: S/N, or its share of all examples where means are weighted by examples."""
    period: float
    """1/C, the expected number of rounds between two participations of a client."""
    lr: float
    """l, the local learning rate of this round."""
    server_lr: float
    """eta, the server learning rate of this round."""
    sizes: tuple[int, ...] = field(default=(), kw_only=True)
    """The number of elements of each parameter tensor, in the order of the flat vector: the blocks of block-wise
    methods."""

    def rounds(self, tau: int | str) -> int:
        """tau as a number of rounds."""
        return in_rounds(tau, self.period)

    def for_client(self, steps: int | Tensor) -> ClientContext:
        """What a client with this number of local steps knows."""
        return ClientContext(**vars(self), steps=steps)


@dataclass(frozen=True)
class ClientContext(Context):
    """What one client knows in addition."""

    steps: int | Tensor
    """J, this client's local steps in this round; a column with a row per client in a batched cohort."""


@dataclass(frozen=True)
class Path:
    """The local path of a client. The gradients are None unless the algorithm names them in `observes`."""

    start: Tensor
    end: Tensor
    mean_gradient: Tensor | None = None
    """The mean of the minibatch gradients along the path, before the algorithm's corrections."""
    full_gradient: Tensor | None = None
    """The gradient over all of the client's examples, at `start`."""
    step_state: State = field(default_factory=dict)
    """The step state after the last step."""


@dataclass(frozen=True)
class Report:
    """A client's message as the server receives it."""

    message: Message
    weight: float
    """This client's share in the mean; the weights of a cohort sum to one."""
    steps: int
