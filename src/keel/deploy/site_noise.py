"""Clipping and Gaussian noise that a site applies to its report before it leaves."""

from dataclasses import dataclass

import numpy as np

from keel.algorithms.base import ClientState, Message
from keel.core.mechanisms import Sender
from keel.deploy.site_errors import PolicyRefusal
from keel.privacy.clipping import joint_norm
from keel.privacy.noise import secret_noise


@dataclass(frozen=True)
class SiteProtection:
    """The clipping and the noise of a site's policy, as a mechanism: it comes after those of the spec that keep the
    form of a report, and before compression."""

    clip_norm: float
    noise: float
    name = "site"
    changes_form = False

    def init_client(self) -> ClientState:
        return {}

    def encode(self, message: Message, state: ClientState, sender: Sender) -> tuple[Message, ClientState]:
        return clip_and_add_noise(message, self.clip_norm, self.noise), {}

    def decode(self, message: Message, sender: Sender) -> Message:
        return message


def clip_and_add_noise(report: Message, clip_norm: float, noise: float) -> Message:
    """Scale a report to a norm of at most `clip_norm`, and add noise of standard deviation `noise * clip_norm`.

    The noise comes from the operating system's randomness, which no seed of the server determines.

    Raises:
        PolicyRefusal: The report has tensors that cannot be clipped: integers.
    """
    if not all(tensor.is_floating_point() for tensor in report.values()):
        raise unclippable()
    norm = joint_norm(report)
    if not np.isfinite(norm):
        raise ValueError("the report is not finite")
    scale = min(1.0, clip_norm / norm) if norm else 1.0
    clipped = {name: tensor * scale for name, tensor in report.items()}
    if not noise:
        return clipped
    return {name: tensor + noise * clip_norm * secret_noise(tensor) for name, tensor in clipped.items()}


def unclippable() -> PolicyRefusal:
    return PolicyRefusal("clip_norm", "is set, but the report has buffers or integers, which cannot be clipped")
