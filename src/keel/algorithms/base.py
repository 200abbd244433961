"""The protocol of an algorithm: what it does in a round, independent of where and how the round is run.

An algorithm is a frozen dataclass of hyper-parameters with a few pure functions over flat float32 vectors. The
functions that run on a client use arithmetic that broadcasts, with no branch on tensor values and no reduction over
the client axis, so that a whole cohort can run as one batched program: there a tensor has one row per client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar, dataclass_transform

import pydantic.dataclasses
from pydantic import ConfigDict

from keel.algorithms.types import (
    ClientContext,
    ClientState,
    Context,
    Direction,
    Gradient,
    Message,
    Observation,
    Path,
    Report,
    State,
    in_rounds,
)
from keel.errors import KeelError

if TYPE_CHECKING:  # a spec is checked before PyTorch is imported
    from torch import Tensor


def weighted_mean(reports: Iterable[Report], values: Callable[[Report], Message] | None = None) -> Message:
    """The weighted mean of the messages, summed one report at a time in the order of the cohort.

    Args:
        values: What to average of a report, instead of its message.
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
    """Make the class a frozen dataclass whose values are validated when an instance is made."""
    config = ConfigDict(strict=True, allow_inf_nan=False)
    return pydantic.dataclasses.dataclass(cls, frozen=True, config=config)


@hyperparameters
class Algorithm:
    """FedAvg; a subclass overrides what it does differently. `theta` is the server's model."""

    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]
    probes: ClassVar[bool] = False
    """Whether a round has a first phase, in which the cohort sends full gradients at the server's model."""
    pooled: ClassVar[bool] = False
    """Whether all examples are pooled in one place: a reference, not a federation, so that nothing is sent."""
    mean_suffices: ClassVar[bool] = False
    """Whether the server needs only the weighted mean of the reports, so that secure aggregation can hide each of
    them. It does not suffice where a client's number of steps enters the mean."""
    unclippable: ClassVar[str] = ""
    """Why a report that is clipped in joint norm and noised breaks the rule; empty if it does not. Every tensor of a
    report counts as dependent on the client's data."""
    own_optimizer: ClassVar[bool] = False
    """Whether the direction is already an optimiser's step, so that the local optimiser has to be plain SGD."""

    def check_local(self, optimizer: str, settings: Mapping[str, Any]) -> None:
        """Raise a KeelError if the local optimiser contradicts the rule.

        Args:
            optimizer: Its name, as in `local.optimizer`.
            settings: Its settings, such as the momentum.
        """
        if self.own_optimizer and (optimizer != "sgd" or any(settings.values())):
            got = ", ".join([repr(optimizer), *(f"{name} = {value}" for name, value in settings.items())])
            raise KeelError(
                f"local.optimizer must be 'sgd' without momentum for {self.name}, whose rule is an optimiser itself "
                f"(got {got})"
            )

    @property
    def server_sum(self) -> str | None:
        """The name of the server state that is a sum over the states of all clients; None if there is none.

        It keeps the part of a client whose state is lost.
        """
        return None

    @property
    def observes(self) -> frozenset[Observation]:
        """The gradients that `report` reads from the path."""
        return frozenset()

    @property
    def personalised(self) -> bool:
        """Whether clients have models of their own, so that `personal_model` is overridden."""
        return type(self).personal_model is not Algorithm.personal_model

    def history(self, period: float) -> int:
        """The number of models of earlier rounds that the server keeps, for the resource estimate."""
        return 0

    def init_server(self, theta: Tensor) -> State:
        """The initial server state; its `theta` is the model."""
        return {"theta": theta}

    def init_client(self, theta: Tensor) -> State:
        """A client's state before its first round; `theta` is the initial model. Empty for a stateless algorithm."""
        return {}

    def broadcast(self, server: State, ctx: Context) -> Message:
        """The message to each client of the cohort. Local training starts at its `theta`, or where `start` says."""
        return {"theta": server["theta"]}

    def absorb(self, server: State, probes: Iterable[Report], ctx: Context) -> tuple[State, Message]:
        """Between the two phases of a round, if the algorithm `probes`: take the cohort's full gradients (`gradient`
        in each message), return the new server state and a second message to each client."""
        raise NotImplementedError(f"{type(self).__name__} sets probes = True, so it must define absorb()")

    def start(self, received: Message, state: State, ctx: ClientContext) -> Tensor:
        """The local model before the first step."""
        return received["theta"]

    def init_steps(self, received: Message, state: State, ctx: ClientContext) -> State:
        """The step state before the first step: what a step passes on to the next one, within one round."""
        return {}

    def direction(
        self, w: Tensor, gradient: Gradient, received: Message, state: State, ctx: ClientContext
    ) -> Direction:
        """u of one local step, which takes the place of the gradient in the local optimiser's step.

        With plain SGD the step is w <- w - lr (u + weight_decay w) + d, where d is the `displacement`.

        Args:
            state: The client state and, by their names in it, the tensors of the step state.

        Returns:
            u; an algorithm whose step state changes returns (u, new step state).
        """
        return gradient(w)

    def displacement(self, w: Tensor, received: Message, state: State, ctx: ClientContext) -> Tensor | None:
        """d, what a local step adds to the model after the optimiser's step, whatever the learning rate.

        Args:
            w: The local model before the step.
            state: As in `direction`, before the step.
        """
        return None

    def report(self, path: Path, received: Message, state: State, ctx: ClientContext) -> tuple[Message, State]:
        """The message to the server, and the client's new state."""
        return {"delta": path.start - path.end}, state

    def aggregate(self, server: State, reports: Iterable[Report], ctx: Context) -> State:
        """The new server state. `reports` come in the order of the cohort and can be iterated over once."""
        return {"theta": server["theta"] - ctx.server_lr * weighted_mean(reports)["delta"]}

    def personal_model(self, theta: Tensor, state: State, sizes: Sequence[int]) -> Tensor:
        """The model of one client, which `evaluation.clients` measures: the server's, unless the client has its own.

        Args:
            theta: The server's model.
            state: The client state; that of `init_client` for a client that has never taken part.
            sizes: The number of elements of each parameter tensor, as in `Context.sizes`.
        """
        return theta

    def settings(self) -> dict[str, Any]:
        """The hyper-parameters by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


__all__ = [
    "Algorithm",
    "ClientContext",
    "ClientState",
    "Context",
    "Direction",
    "Gradient",
    "Message",
    "Observation",
    "Path",
    "Report",
    "State",
    "hyperparameters",
    "in_rounds",
    "weighted_mean",
]
