"""Transforms of tokens and pixels, with the random crops and flips of training."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Tokens:
    """Convert characters or words, stored as small integers, to int64."""

    random = False

    def draw(self, examples: int, rng: np.random.Generator) -> None:
        return None

    def __call__(self, inputs: Tensor, choices: np.ndarray | None = None) -> Tensor:
        return inputs.long()


@dataclass(frozen=True)
class Pixels:
    """Scale images of bytes to [0, 1] and normalise them per channel.

    With a `margin`, training pads each image with `margin` black pixels on every side, takes a random crop of the
    original size, and flips it horizontally with probability 1/2.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    margin: int = 0

    @property
    def random(self) -> bool:
        return self.margin > 0

    def draw(self, examples: int, rng: np.random.Generator) -> np.ndarray | None:
        if not self.margin:
            return None
        return rng.integers(0, [2 * self.margin + 1, 2 * self.margin + 1, 2], size=(examples, 3))

    def __call__(self, inputs: Tensor, choices: np.ndarray | None = None) -> Tensor:
        if choices is not None:
            inputs = self._crop_and_flip(inputs, torch.from_numpy(choices))
        std = torch.tensor(self.std)[:, None, None]
        mean = torch.tensor(self.mean)[:, None, None]
        return inputs.float().mul_(1 / (255 * std)).sub_(mean / std)

    def _crop_and_flip(self, images: Tensor, choices: Tensor) -> Tensor:
        """Crop each padded image at its row of `choices`: (top, left, whether to flip)."""
        height, width = images.shape[-2:]
        padded = pad(images, [self.margin] * 4)
        crops = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view: (images, channels, top, left, h, w)
        cropped = crops[torch.arange(len(images)), :, choices[:, 0], choices[:, 1]]
        return torch.where(choices[:, 2, None, None, None].bool(), cropped.flip(-1), cropped)
