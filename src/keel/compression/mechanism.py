"""Compression as a mechanism: of a client's report with error feedback, and of the server's broadcast.

Error feedback: a client adds what the last encoding of its report lost to its next report (Seide et al. 2014;
Karimireddy et al. 2019). It keeps this residual as client state.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from keel.algorithms.base import ClientState, Message
from keel.compression.codecs import Array, Codec, Draw, Parts
from keel.core.mechanisms import Phase, Sender
from keel.core.randomness import keyed_rng
from keel.errors import KeelError

LEAST = 16
"""Float tensors with fewer elements, and all integers, are sent as they are."""


@dataclass(frozen=True)
class Compression:
    """Encodes the float tensors of a client's message.

    Args:
        examples: A message of each phase, for the names and shapes of its tensors.
        feedback: Whether a client adds to a report what the last encoding lost. Probes have none: they are sent once.
    """

    codec: Codec
    probe_codec: Codec
    examples: dict[Phase, Message]
    feedback: bool
    name = "compression"
    changes_form = True

    def init_client(self) -> ClientState:
        if not self.feedback:
            return {}
        report = self.examples["report"]
        return {name: torch.zeros_like(value) for name, value in report.items() if is_encoded(value)}

    def encode(self, message: Message, state: ClientState, sender: Sender) -> tuple[Message, ClientState]:
        codec, sent, residuals = self._codec(sender.phase), Message(), ClientState()
        for name, value in message.items():
            if not is_encoded(value):
                sent[name] = value
                continue
            total = value + state[name] if name in state else value
            draw = _draw(sender, name)
            parts = codec.encode(_flat(total), draw)
            sent |= _named(name, parts)
            if name in state:
                residuals[name] = total - _decoded(codec, parts, total, draw)
        return sent, residuals

    def decode(self, message: Message, sender: Sender) -> Message:
        """The decoded message.

        Raises:
            KeelError: A tensor, of the right shape and dtype, is not what `encode` can have returned.
        """
        codec = self._codec(sender.phase)
        return decoded(codec, message, self.examples[sender.phase], lambda name: _draw(sender, name))

    def _codec(self, phase: Phase) -> Codec:
        return self.codec if phase == "report" else self.probe_codec


@dataclass(frozen=True)
class Downlink:
    """Encodes the server's broadcast. All clients of a round receive the same bytes.

    It is stateless: an idle client has no earlier model to which a difference could be added.
    """

    codec: Codec

    def encode(self, message: Message, seed: int, round: int) -> Message:
        sent = Message()
        for name, value in message.items():
            if is_encoded(value):
                sent |= _named(name, self.codec.encode(_flat(value), _broadcast_draw(seed, round, name)))
            else:
                sent[name] = value
        return sent

    def decode(self, message: Message, example: Message) -> Message:
        """The decoded tensors of `example` that the message has. Decoding draws nothing."""
        present = {name: value for name, value in example.items() if name in message or f"{name}.values" in message}
        return decoded(self.codec, message, present, lambda _: _nothing_drawn)

    def encoded_form(self, message: Message) -> Message:
        """A message in the form in which one like `message` travels."""
        return self.encode(message, 0, 0)


def is_encoded(value: Tensor) -> bool:
    return value.dtype == torch.float32 and value.numel() >= LEAST


def decoded(codec: Codec, message: Message, example: Message, draw: Callable[[str], Draw]) -> Message:
    """The message in the form of `example`."""
    result = Message()
    for name, like in example.items():
        if is_encoded(like):
            prefix = f"{name}."
            parts = {n.removeprefix(prefix): t.numpy() for n, t in message.items() if n.startswith(prefix)}
            try:
                result[name] = _decoded(codec, parts, like, draw(name))
            except KeelError as error:
                raise KeelError(f"{name}: {error}") from None
        else:
            result[name] = message[name]
    return result


def _draw(sender: Sender, name: str) -> Draw:
    return lambda: sender.rng(f"compression {name}")


def _broadcast_draw(seed: int, round: int, name: str) -> Draw:
    return lambda: keyed_rng(seed, f"broadcast compression {name}", round)


def _nothing_drawn() -> NoReturn:
    raise AssertionError("a broadcast is decoded without draws")


def _flat(value: Tensor) -> Array:
    return value.detach().reshape(-1).numpy()


def _named(name: str, parts: Parts) -> Message:
    return {f"{name}.{part}": torch.from_numpy(array) for part, array in parts.items()}


def _decoded(codec: Codec, parts: Parts, like: Tensor, draw: Draw) -> Tensor:
    return torch.from_numpy(codec.decode(parts, like.numel(), draw)).view(like.shape)
