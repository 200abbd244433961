"""The protocol: what an algorithm says about a round, and nothing about where or how the round is run.

An algorithm is a frozen dataclass of hyper-parameters with a few pure functions over flat float32 vectors.
State, memory and messages are flat dicts of tensors, each as long as the model or of one element. The functions
that run on a client use arithmetic that broadcasts, and no branches on the values of tensors, so that a whole
cohort can run as one program: there a tensor has one row per client.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, dataclass_transform

import pydantic.dataclasses
from pydantic import ConfigDict, Field
from torch import Tensor

Message = dict[str, Tensor]
"""What travels. Its bytes are the communication cost; nothing else crosses."""
State = dict[str, Tensor]
Memory = dict[str, Tensor]
Gradient = Callable[[Tensor], Tensor]
"""The gradient of this step's minibatch at a point. At the local model the result is overwritten by the next call
there; at another point it is new, so that a difference of the two can be taken."""

Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Rounds = Annotated[int, Field(ge=1)]
Tau = Rounds | Literal["period"]
"""A number of rounds, or 1/C whatever the participation is."""


def in_rounds(tau: "int | str", period: float) -> int:
    """tau as a number of rounds."""
    return tau if isinstance(tau, int) else max(1, round(period))


@dataclass(frozen=True)
class Context:
    """What the server and every client know in round t."""

    round: int
    """t, from 1."""
    clients: int
    """N, all of them."""
    cohort: int
    """S, those that take part in this round."""
    share: float
    """The cohort's share of the whole federation: S/N, or of all examples where means are weighted by them."""
    period: float
    """1/C: rounds between two turns of a client, expected."""
    lr: float
    """The local learning rate of this round."""
    server_lr: float

    def rounds(self, tau: "int | str") -> int:
        """tau as a number."""
        return in_rounds(tau, self.period)

    def for_client(self, steps: "int | Tensor") -> "ClientContext":
        return ClientContext(**vars(self), steps=steps)


@dataclass(frozen=True)
class ClientContext(Context):
    """What one client knows besides."""

    steps: int | Tensor
    """J, this client's local steps in this round (a column with a row per client where a cohort runs as one)."""


Observation = Literal["mean_gradient", "full_gradient"]


@dataclass(frozen=True)
class Path:
    """What the local loop saw. What costs something is there if the algorithm asked for it in `observes`."""

    start: Tensor
    end: Tensor
    mean_gradient: Tensor | None = None
    """The mean of the minibatch gradients along the path, before the algorithm's corrections."""
    full_gradient: Tensor | None = None
    """The gradient over all of the client's examples, at `start`."""
    velocity: Tensor | None = None
    """The velocity of local SGD after the last step, where it has momentum."""


@dataclass(frozen=True)
class Report:
    """One client's message as the server receives it."""

    message: Message
    weight: float
    """This client's share in the mean; the weights of a cohort add up to one."""
    steps: int


def weighted_mean(reports: Iterable[Report], values: Callable[[Report], Message] | None = None) -> Message:
    """The mean of the messages, streamed in the order of the cohort: memory for one sum, not for a cohort.

    `values` says what is averaged where it is not the message itself.
    """
    total: Message = {}
    for report in reports:
        for name, value in (values(report) if values else report.message).items():
            if name in total:
                total[name].add_(value, alpha=report.weight)
            else:
                total[name] = value * report.weight
    return total


@dataclass_transform(frozen_default=True)
def hyperparameters(cls: type) -> Any:
    """Makes the class a frozen dataclass whose values are checked when it is made."""
    config = ConfigDict(strict=True, allow_inf_nan=False)
    return pydantic.dataclasses.dataclass(cls, frozen=True, config=config)


@hyperparameters
class Algorithm:
    """What FedAvg does; an algorithm overrides where it differs. `theta` is the model on the server."""

    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]
    probes: ClassVar[bool] = False
    """Whether a round has a first phase, in which the cohort sends full gradients at the server's model."""
    pooled: ClassVar[bool] = False
    """Whether all examples are at one place: a reference, not a federation, so nothing is sent."""

    mean_suffices: ClassVar[bool] = True
    """Whether the server needs no more of the reports than their weighted mean, so that secure aggregation can hide
    each of them. Not so where a client's own number of steps enters the mean."""

    @property
    def observes(self) -> frozenset[Observation]:
        """What `report` reads of the path besides its ends."""
        return frozenset()

    @property
    def local_momentum(self) -> float:
        """The momentum of local SGD. Above 0 the memory holds the `velocity` that a round starts with."""
        return 0.0

    def history(self, period: float) -> int:
        """How many models of earlier rounds the server comes to keep, so that the room for them is known."""
        return 0

    def init_server(self, theta: Tensor) -> State:
        """What the server keeps; `theta` in it is the model."""
        return {"theta": theta}

    def init_client(self, theta: Tensor) -> Memory:
        """What a client keeps between its rounds, before the first; here `theta` is the initial model."""
        return {}

    def broadcast(self, server: State, ctx: Context) -> Message:
        """What travels down to each client of the cohort. Local training starts at its `theta`."""
        return {"theta": server["theta"]}

    def absorb(self, server: State, probes: Iterable[Report], ctx: Context) -> tuple[State, Message]:
        """Between the phases of a round, where it `probes`: the cohort's full gradients (`gradient` in each message)
        come up, and what is added to what the clients have received goes down."""
        raise NotImplementedError(f"{type(self).__name__} probes, so it has to say what it absorbs")

    def direction(self, w: Tensor, gradient: Gradient, received: Message, memory: Memory, ctx: ClientContext) -> Tensor:
        """u of one local step, w <- w - lr (u + weight_decay w)."""
        return gradient(w)

    def report(self, path: Path, received: Message, memory: Memory, ctx: ClientContext) -> tuple[Message, Memory]:
        """What travels up, and what the client remembers."""
        return {"delta": path.start - path.end}, memory

    def aggregate(self, server: State, reports: Iterable[Report], ctx: Context) -> State:
        """The new server state. `reports` come in the order of the cohort and can be read once."""
        return {"theta": server["theta"] - ctx.server_lr * weighted_mean(reports)["delta"]}

    def settings(self) -> dict[str, Any]:
        """The hyper-parameters by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
