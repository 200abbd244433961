"""Gaussian noise from random words: the Box-Muller transform in PyTorch's vector instructions."""

import os
from collections.abc import Callable
from math import pi

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Draw = Callable[[Tensor], Tensor]
"""Standard normal noise of a tensor's shape and type."""


def keyed_noise(rng: np.random.Generator) -> Draw:
    """Noise that the key of a 64-bit generator determines; it takes less time than NumPy's own draws."""
    return lambda like: _box_muller(rng.bit_generator.random_raw, like)


def secret_noise(like: Tensor) -> Tensor:
    """Noise from the operating system's randomness, which no seed determines."""
    return _box_muller(lambda words: np.frombuffer(bytearray(os.urandom(8 * words)), np.uint64), like)


def _box_muller(random_words: Callable[[int], NDArray[np.uint64]], like: Tensor) -> Tensor:
    """A radius takes 64 bits, so that the tails reach 9.3 standard deviations; an angle takes 32."""
    pairs = (like.numel() + 1) // 2
    words = random_words(pairs + (pairs + 1) // 2)
    noise = torch.empty(2, pairs, dtype=torch.float32, device="cpu")  # whatever PyTorch's defaults are
    radii, angles = noise
    uniform = torch.from_numpy(words[:pairs].view(np.int64)).double().abs_().clamp_(min=1).mul_(2.0**-63)
    radii.copy_(uniform.log_()).mul_(-2).sqrt_()
    angles.copy_(torch.from_numpy(words[pairs:].view(np.int32)[:pairs])).mul_(pi * 2.0**-31)
    cosines = angles.cos()
    angles.sin_().mul_(radii)
    radii.mul_(cosines)
    return noise.view(-1)[: like.numel()].to(like.dtype).view(like.shape)
