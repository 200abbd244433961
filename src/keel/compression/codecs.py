"""Codecs: a float32 vector as few bytes, and back. The encoded arrays have a fixed number of elements per vector.

With unbiased codecs the mean of the decoded vector is the vector. The others contract: the squared error is at most a
part below 1 of the squared norm, which is what error feedback requires. Decoding checks what a client may have sent.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from keel.errors import KeelError

Array = np.ndarray[Any, Any]
Parts = dict[str, Array]
Draw = Callable[[], np.random.Generator]
"""Returns the generator of a message's draws. The server's is equal to the client's."""

QUANTISED = 64
"""Elements that share a scale in int8 and int4."""
SIGNS = 1024
"""Elements that share a scale in `sign`."""


class Codec(Protocol):
    """One form of compression."""

    def encode(self, x: Array, draw: Draw) -> Parts:
        """The arrays that are sent for a vector."""

    def decode(self, parts: Parts, size: int, draw: Draw) -> Array:
        """The vector of `size` elements.

        Raises:
            KeelError: The arrays, whose shapes and dtypes are right, are not what `encode` can have returned.
        """


@dataclass(frozen=True)
class TopK:
    """The largest elements by magnitude, with their positions in increasing order."""

    fraction: float

    def encode(self, x: Array, draw: Draw) -> Parts:
        k = kept(len(x), self.fraction)
        indices = np.sort(np.argpartition(-np.abs(x), k - 1)[:k]).astype(np.int32)
        return {"indices": indices, "values": x[indices]}

    def decode(self, parts: Parts, size: int, draw: Draw) -> Array:
        indices = parts["indices"]
        if indices[0] < 0 or indices[-1] >= size or (np.diff(indices.astype(np.int64)) <= 0).any():
            raise KeelError(f"indices must increase from 0 or more to at most {size - 1}")
        return _scattered(indices, parts["values"], size)


@dataclass(frozen=True)
class RandomK:
    """Elements at random positions, which the server draws again: they are not sent.

    Args:
        unbiased: Whether the values are scaled by 1 / fraction, so that their mean is the vector. With error feedback
            they are not: a scaled vector does not contract.
    """

    fraction: float
    unbiased: bool

    def encode(self, x: Array, draw: Draw) -> Parts:
        return {"values": x[self._indices(len(x), draw)]}

    def decode(self, parts: Parts, size: int, draw: Draw) -> Array:
        indices = self._indices(size, draw)
        scale = np.float32(size / len(indices) if self.unbiased else 1.0)
        with np.errstate(over="ignore"):
            return _scattered(indices, parts["values"] * scale, size)

    def _indices(self, size: int, draw: Draw) -> Array:
        return np.sort(draw().choice(size, kept(size, self.fraction), replace=False, shuffle=False))


@dataclass(frozen=True)
class Quantised:
    """Whole numbers from -`levels` to `levels` in units of the largest magnitude of a block, rounded at random.

    An element is rounded up with the probability that makes its mean exact.
    """

    levels: ClassVar[int]

    def quantise(self, x: Array, draw: Draw) -> tuple[Array, Array]:
        """The whole numbers, and the unit of each block."""
        scales = np.max(np.abs(_blocks(x, QUANTISED)), axis=1) / np.float32(self.levels)
        with np.errstate(all="ignore"):  # a diverged model has values that are not finite; its scales show it
            units = x / np.repeat(np.where(scales > 0, scales, np.float32(1)), QUANTISED)[: len(x)]
            rounded = np.floor(units + draw().random(len(x), dtype=np.float32))
        return np.clip(np.nan_to_num(rounded), -self.levels, self.levels).astype(np.int8), scales

    def restore(self, numbers: Array, scales: Array) -> Array:
        if (scales < 0).any():
            raise KeelError("scales must not be negative")
        with np.errstate(all="ignore"):
            return numbers.astype(np.float32) * np.repeat(scales, QUANTISED)[: len(numbers)]


@dataclass(frozen=True)
class Int8(Quantised):
    """A byte per element."""

    levels = 127

    def encode(self, x: Array, draw: Draw) -> Parts:
        numbers, scales = self.quantise(x, draw)
        return {"values": numbers, "scales": scales}

    def decode(self, parts: Parts, size: int, draw: Draw) -> Array:
        if (parts["values"] == -128).any():
            raise KeelError("values must be from -127 to 127")
        return self.restore(parts["values"], parts["scales"])


@dataclass(frozen=True)
class Int4(Quantised):
    """Two elements per byte, the first one in the upper half."""

    levels = 7

    def encode(self, x: Array, draw: Draw) -> Parts:
        numbers, scales = self.quantise(x, draw)
        halves = np.full(len(x) + len(x) % 2, self.levels, np.uint8)
        halves[: len(x)] = (numbers + self.levels).view(np.uint8)
        return {"values": halves[::2] << 4 | halves[1::2], "scales": scales}

    def decode(self, parts: Parts, size: int, draw: Draw) -> Array:
        halves = np.stack([parts["values"] >> 4, parts["values"] & 15], axis=1).reshape(-1)
        if (halves > 2 * self.levels).any() or (halves[size:] != self.levels).any():
            raise KeelError("values must be pairs of numbers from -7 to 7")
        return self.restore(halves[:size].view(np.int8) - np.int8(self.levels), parts["scales"])


@dataclass(frozen=True)
class Sign:
    """A bit per element, times the mean magnitude of its block."""

    def encode(self, x: Array, draw: Draw) -> Parts:
        with np.errstate(all="ignore"):
            sums = np.abs(_blocks(x, SIGNS)).sum(axis=1, dtype=np.float64)
            scales = (sums / _block_sizes(len(x), SIGNS)).astype(np.float32)
        return {"bits": np.packbits(x >= 0), "scales": scales}

    def decode(self, parts: Parts, size: int, draw: Draw) -> Array:
        bits, scales = np.unpackbits(parts["bits"]), parts["scales"]
        if (scales < 0).any() or bits[size:].any():
            raise KeelError("scales must not be negative, and bits after the last element must be 0")
        return np.where(bits[:size], np.float32(1), np.float32(-1)) * np.repeat(scales, SIGNS)[:size]


def kept(size: int, fraction: float) -> int:
    """k, the number of elements of a sparse vector."""
    return min(size, max(1, round(fraction * size)))


def _scattered(indices: Array, values: Array, size: int) -> Array:
    x = np.zeros(size, np.float32)
    x[indices] = values
    return x


def _blocks(x: Array, width: int) -> Array:
    """The vector as rows of `width` elements, the last one padded with zeros."""
    padded = np.zeros(-(-len(x) // width) * width, np.float32)
    padded[: len(x)] = x
    return padded.reshape(-1, width)


def _block_sizes(size: int, width: int) -> Array:
    return np.minimum(width, size - np.arange(0, size, width))
