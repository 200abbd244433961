"""The codecs a second time, one element after the other."""

import numpy as np


def largest(x: list[float], k: int) -> dict[int, float]:
    """The k largest elements by magnitude, by position."""
    order = sorted(range(len(x)), key=lambda i: -abs(x[i]))
    return {i: x[i] for i in sorted(order[:k])}


def quantised(x: np.ndarray, levels: int, draws: np.ndarray) -> tuple[list[int], list[float]]:
    """Each element's whole number, and the unit of each block of 64."""
    numbers, units = [], []
    for first in range(0, len(x), 64):
        block = x[first : first + 64]
        unit = np.float32(max(abs(float(value)) for value in block)) / np.float32(levels)
        units.append(float(unit))
        for value, draw in zip(block, draws[first : first + 64], strict=True):
            below = np.floor(value / unit) if unit else np.float32(0)
            up = unit and np.float32(value / unit) + draw >= below + 1
            numbers.append(min(levels, int(below) + int(bool(up))))
    return numbers, units


def packed_halves(numbers: list[int]) -> list[int]:
    """Two numbers from -7 to 7 per byte, the first in the upper half."""
    padded = [*numbers, 0] if len(numbers) % 2 else numbers
    return [16 * (a + 7) + (b + 7) for a, b in zip(padded[::2], padded[1::2], strict=True)]


def packed_signs(x: np.ndarray) -> list[int]:
    """Eight signs per byte, the first in the highest bit."""
    result = []
    for first in range(0, len(x), 8):
        byte = 0
        for place, value in enumerate(x[first : first + 8]):
            byte += (value >= 0) * 2 ** (7 - place)
        result.append(byte)
    return result
