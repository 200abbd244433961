"""Mechanisms between client and server: functions on a report before it leaves the client, and on the reports' mean.

A mechanism knows nothing of algorithms, engines or specs. It works on messages: dicts of tensors on the CPU, one client
at a time, so that every engine and every site computes the same bits.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from torch import Tensor

from keel.algorithms.base import ClientState, Context, Message, Report
from keel.core.flat_model import FlatModel, Loss
from keel.core.randomness import keyed_rng

MECHANISM = "keel.mechanism."
"""Begins the names of what mechanisms keep in a client's state."""
Phase = Literal["report", "probe"]


@dataclass(frozen=True)
class Sender:
    """Whose message it is: the client and the round that key every draw of a mechanism."""

    seed: int
    round: int
    client: int
    phase: Phase = "report"
    """`probe` for the first phase of a round, whose message is a full gradient."""

    def rng(self, purpose: str) -> np.random.Generator:
        """The generator of one purpose for this message."""
        return keyed_rng(self.seed, f"{purpose} {self.phase}", self.round, self.client)


class ReportMechanism(Protocol):
    """A pure function on a client's message before it is sent, and its inverse at the server."""

    name: str
    """Distinguishes its client state from that of other mechanisms."""
    changes_form: bool
    """Whether an encoded message has other names, dtypes or shapes. Clipping and noise come before it."""

    def init_client(self) -> ClientState:
        """What a client keeps for this mechanism before its first round; {} if nothing."""

    def encode(self, message: Message, state: ClientState, sender: Sender) -> tuple[Message, ClientState]:
        """The message as it travels, and the new state. In the phase `probe` both states are empty."""

    def decode(self, message: Message, sender: Sender) -> Message:
        """The message as the algorithm reads it."""


@dataclass(frozen=True)
class Mechanisms:
    """The mechanisms of a run in the order in which a client applies them; the server decodes in reverse."""

    each: tuple[ReportMechanism, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.each)

    def init_client(self) -> ClientState:
        return {
            _prefix(mechanism) + name: value
            for mechanism in self.each
            for name, value in mechanism.init_client().items()
        }

    def encode(self, message: Message, state: ClientState, sender: Sender) -> tuple[Message, ClientState]:
        """The message as it travels, and what the client keeps of the mechanisms.

        Args:
            state: The client state, of which each mechanism reads its part.
        """
        kept: ClientState = {}
        for mechanism in self.each:
            prefix = _prefix(mechanism)
            own = {n.removeprefix(prefix): value for n, value in state.items() if n.startswith(prefix)}
            message, new = mechanism.encode(message, {} if sender.phase == "probe" else own, sender)
            kept |= {prefix + name: value for name, value in new.items()}
        return message, kept

    def decode(self, message: Message, sender: Sender) -> Message:
        for mechanism in reversed(self.each):
            message = mechanism.decode(message, sender)
        return message

    def encoded_form(self, message: Message, phase: Phase = "report") -> Message:
        """A message in the form in which one like `message` travels."""
        return self.encode(message, self.init_client(), Sender(0, 0, 0, phase))[0]

    def map(self, change: Callable[[ReportMechanism], ReportMechanism]) -> "Mechanisms":
        return Mechanisms(tuple(map(change, self.each)))

    def with_protection(self, mechanism: ReportMechanism) -> "Mechanisms":
        """The mechanisms with another one after those that keep the form of a message."""
        place = next((i for i, each in enumerate(self.each) if each.changes_form), len(self.each))
        return Mechanisms((*self.each[:place], mechanism, *self.each[place:]))


class BroadcastMechanism(Protocol):
    """A pure function on the server's message before it is sent to a cohort, and its inverse at the clients."""

    def encode(self, message: Message, seed: int, round: int) -> Message:
        """The message as it travels."""

    def decode(self, message: Message, example: Message) -> Message:
        """The tensors of `example` that the message has, as the algorithm reads them."""

    def encoded_form(self, message: Message) -> Message:
        """A message in the form in which one like `message` travels."""


def _prefix(mechanism: ReportMechanism) -> str:
    return f"{MECHANISM}{mechanism.name}."


class GradientMechanism(Protocol):
    """Replaces the minibatches and the gradients of local training, for privacy of single examples."""

    def minibatches(self, examples: int, steps: int, rng: np.random.Generator) -> list[np.ndarray]:
        """The examples of each step; a minibatch may be empty."""

    def gradient(
        self, model: FlatModel, loss: Loss, point: Tensor, inputs: Tensor, targets: Tensor, sender: Sender, number: int
    ) -> tuple[Tensor, Tensor]:
        """The mean loss and the gradient of a minibatch; `number` distinguishes the gradients of a round."""


@dataclass(frozen=True)
class ServerRound:
    """What the server knows when it takes the mean of a round's reports."""

    ctx: Context
    cohort: Sequence[int]
    """The clients, in the order of the reports."""
    example: Message
    """A message like the reports, for rounds in which no client takes part."""
    state: Mapping[str, Tensor]
    """What the mechanism keeps between rounds."""
    seed: int


@dataclass(frozen=True)
class TakenMean:
    """The mean of a round's reports."""

    message: Message
    state: Mapping[str, Tensor]
    """What the mechanism keeps between rounds. Checkpoints hold it."""
    recorded: Mapping[str, Any]
    """What is added to the round's record."""


class ServerMean(Protocol):
    """Takes the mean of the reports in the place of the weighted mean, for algorithms with `mean_suffices`."""

    fixed_cohort: bool
    """Whether the algorithm has to see the expected cohort size: the real one would disclose who took part."""

    def mean(self, reports: Iterable[Report], at: ServerRound) -> TakenMean: ...
