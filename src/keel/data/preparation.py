"""How stored examples become a model's inputs: tokens, pixels, and the random crops and flips of training.

What is drawn is drawn apart from what is done with it, so that any number of clients can be prepared at once.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad


class Preparation(Protocol):
    @property
    def random(self) -> bool:
        """Whether anything is drawn."""

    def draw(self, examples: int, stream: np.random.Generator) -> np.ndarray | None:
        """What training leaves to chance for so many examples, a row for each; None where nothing is."""

    def __call__(self, inputs: Tensor, choices: np.ndarray | None = None) -> Tensor:
        """Stored inputs as the model takes them; without choices (evaluation) nothing is left to chance."""


@dataclass(frozen=True)
class AsStored:
    """Float inputs that are the model's already."""

    random = False

    def draw(self, examples: int, stream: np.random.Generator) -> None:
        return None

    def __call__(self, inputs: Tensor, choices: np.ndarray | None = None) -> Tensor:
        return inputs


Layout = Literal["contiguous", "channels_last"]
"""The order in memory of an image's numbers: one channel after the other, or one pixel after the other."""


@dataclass(frozen=True)
class ChannelsLast:
    """Another preparation's images in the memory layout that convolutions are fastest on."""

    inner: Preparation

    @property
    def random(self) -> bool:
        return self.inner.random

    def draw(self, examples: int, stream: np.random.Generator) -> np.ndarray | None:
        return self.inner.draw(examples, stream)

    def __call__(self, inputs: Tensor, choices: np.ndarray | None = None) -> Tensor:
        return self.inner(inputs, choices).contiguous(memory_format=torch.channels_last)


@dataclass(frozen=True)
class Tokens:
    """Characters or words, stored in as few bytes as they need."""

    random = False

    def draw(self, examples: int, stream: np.random.Generator) -> None:
        return None

    def __call__(self, inputs: Tensor, choices: np.ndarray | None = None) -> Tensor:
        return inputs.long()


@dataclass(frozen=True)
class Pixels:
    """Images of bytes, scaled to [0, 1] and normalised by channel.

    With a `margin`, training shifts each image by up to so many pixels to each side (the border is black, as in a
    crop after padding) and mirrors every other one.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    margin: int = 0

    @property
    def random(self) -> bool:
        return self.margin > 0

    def draw(self, examples: int, stream: np.random.Generator) -> np.ndarray | None:
        if not self.margin:
            return None
        return stream.integers(0, [2 * self.margin + 1, 2 * self.margin + 1, 2], size=(examples, 3))

    def __call__(self, inputs: Tensor, choices: np.ndarray | None = None) -> Tensor:
        if choices is not None:
            inputs = self._moved(inputs, torch.from_numpy(choices))
        std = torch.tensor(self.std)[:, None, None]
        mean = torch.tensor(self.mean)[:, None, None]
        return inputs.float().mul_(1 / (255 * std)).sub_(mean / std)

    def _moved(self, images: Tensor, choices: Tensor) -> Tensor:
        """Rows of (down, right, mirrored): the image's window in the padded one."""
        height, width = images.shape[-2:]
        padded = pad(images, [self.margin] * 4)
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view: (images, channels, down, right, h, w)
        moved = windows[torch.arange(len(images)), :, choices[:, 0], choices[:, 1]]
        return torch.where(choices[:, 2, None, None, None].bool(), moved.flip(-1), moved)
