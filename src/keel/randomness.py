"""Every random draw of a run, keyed: a pure function of (seed, purpose, round, client).

Nothing here keeps state, so a resumed run, another engine or another number of workers draws the same.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import numpy as np
import torch
from numpy.random import SeedSequence


def key(seed: int, purpose: str, *position: int) -> int:
    """A 128-bit number that stands for one purpose at one position of one run."""
    return int.from_bytes(_digest(seed, purpose, *position), "little")


def draws(seed: int, purpose: str, *position: int) -> np.random.Generator:
    """The stream of draws for one purpose at one position (round, client)."""
    return np.random.Generator(np.random.Philox(_Key(_digest(seed, purpose, *position))))


def rewind(seed: int, purpose: str, *position: int) -> None:
    """Puts PyTorch's stream at one position; within `torch_draws`, so that the caller's own is put back."""
    torch.manual_seed(key(seed, purpose, *position) % 2**63)


@contextmanager
def torch_draws(seed: int, purpose: str, *position: int) -> Iterator[None]:
    """Within it PyTorch's own draws (initial weights, dropout) are keyed; the caller's stream is put back after."""
    with torch.random.fork_rng(devices=[]):
        rewind(seed, purpose, *position)
        yield


class _Key(SeedSequence):
    """For Philox(key=...) in half the time: that also asks the system for a seed, and drops it."""

    def __init__(self, digest: bytes):
        self.words = np.frombuffer(digest, "<u8")

    def generate_state(self, n_words: int, dtype: object = np.uint64) -> np.ndarray:
        return self.words


def _digest(seed: int, purpose: str, *position: int) -> bytes:
    text = "\x1f".join([str(seed), purpose, *map(str, position)])
    return blake2b(text.encode(), digest_size=16).digest()
