"""Transforms: how stored examples become a model's inputs.

A transform draws its random choices (crops, flips) in one step and applies them in another, so that the examples of
any number of clients can be transformed as one batch.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class Transform(Protocol):
    """Turns stored inputs into the tensors that the model takes."""

    @property
    def random(self) -> bool:
        """Whether training augments the inputs at random."""

    def draw(self, examples: int, rng: np.random.Generator) -> np.ndarray | None:
        """Draw the random choices for `examples` inputs, one row per input; None if the transform is deterministic."""

    def __call__(self, inputs: Tensor, choices: np.ndarray | None = None) -> Tensor:
        """Transform stored inputs. Without `choices`, as in evaluation, no augmentation is applied."""


@dataclass(frozen=True)
class Identity:
    """Pass inputs to the model unchanged."""

    random = False

    def draw(self, examples: int, rng: np.random.Generator) -> None:
        return None

    def __call__(self, inputs: Tensor, choices: np.ndarray | None = None) -> Tensor:
        return inputs


@dataclass(frozen=True)
class _Wrapping:
    """A transform that applies another one first."""

    inner: Transform

    @property
    def random(self) -> bool:
        return self.inner.random

    def draw(self, examples: int, rng: np.random.Generator) -> np.ndarray | None:
        return self.inner.draw(examples, rng)


@dataclass(frozen=True)
class AsType(_Wrapping):
    """Convert transformed tensors to a type that the model takes."""

    dtype: torch.dtype

    def __call__(self, inputs: Tensor, choices: np.ndarray | None = None) -> Tensor:
        return self.inner(inputs, choices).to(self.dtype)


@dataclass(frozen=True)
class ChannelsLast(_Wrapping):
    """Return transformed images in the channels-last memory format."""

    def __call__(self, inputs: Tensor, choices: np.ndarray | None = None) -> Tensor:
        return self.inner(inputs, choices).contiguous(memory_format=torch.channels_last)
