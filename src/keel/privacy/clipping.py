"""Clipping of a report in joint norm and local noise: what a client does to its report before it leaves."""

from dataclasses import dataclass
from math import isfinite, sqrt

import torch

from keel.algorithms.base import ClientState, Message
from keel.core.clipping import euclidean_norm
from keel.core.mechanisms import Sender
from keel.privacy.noise import Draw, keyed_noise


def joint_norm(message: Message) -> float:
    """The Euclidean norm of all tensors of a message together."""
    return sqrt(sum(euclidean_norm(value) ** 2 for value in message.values()))


def clipped(message: Message, clip: float) -> Message:
    """The message scaled to a joint norm of at most `clip`; zeros if it is not finite."""
    norm = joint_norm(message)
    if not isfinite(norm):
        return {name: torch.zeros_like(value) for name, value in message.items()}
    return message if norm <= clip else {name: value * (clip / norm) for name, value in message.items()}


@dataclass(frozen=True)
class ClipReport:
    """Clips a report, and adds Gaussian noise of standard deviation `noise * clip` to each element.

    Args:
        noise: 0 where the server adds the noise.
        secret: Draws the noise; by default it is keyed like every draw, which at a site the server could repeat.
    """

    clip: float
    noise: float = 0.0
    secret: Draw | None = None
    name = "privacy"
    changes_form = False

    def init_client(self) -> ClientState:
        return {}

    def encode(self, message: Message, state: ClientState, sender: Sender) -> tuple[Message, ClientState]:
        message = clipped(message, self.clip)
        if self.noise:
            draw, scale = self.secret or keyed_noise(sender.rng("privacy")), self.noise * self.clip
            message = {name: value + scale * draw(value) for name, value in message.items()}
        return message, {}

    def decode(self, message: Message, sender: Sender) -> Message:
        return message
