"""Keyed randomness: every random draw of a run is a pure function of (seed, purpose, round, client).

Nothing here keeps state, so that a resumed run, another engine or another number of workers draws the same numbers.
"""

from hashlib import blake2b

import numpy as np
from numpy.random import SeedSequence


def keyed_rng(seed: int, purpose: str, *position: int) -> np.random.Generator:
    """NumPy's generator for one purpose at one position (round, client)."""
    return np.random.Generator(np.random.Philox(_Key(_digest(seed, purpose, *position))))


def key(seed: int, purpose: str, *position: int) -> int:
    """The 128-bit key of one purpose at one position."""
    return int.from_bytes(_digest(seed, purpose, *position), "little")


class _Key(SeedSequence):
    """The key of Philox in half the time: Philox(key=...) would also draw a seed from the system and drop it."""

    def __init__(self, digest: bytes):
        self.words = np.frombuffer(digest, "<u8")

    def generate_state(self, n_words: int, dtype: object = np.uint64) -> np.ndarray:
        return self.words


def _digest(seed: int, purpose: str, *position: int) -> bytes:
    text = "\x1f".join([str(seed), purpose, *map(str, position)])
    return blake2b(text.encode(), digest_size=16).digest()
