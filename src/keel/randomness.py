"""Every random draw of a run, keyed: a pure function of (seed, purpose, round, client).

Nothing here keeps state, so a resumed run, another engine or another number of workers draws the same.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import numpy as np
import torch


def key(seed: int, purpose: str, *position: int) -> int:
    """A 128-bit number that stands for one purpose at one position of one run."""
    text = "\x1f".join([str(seed), purpose, *map(str, position)])
    return int.from_bytes(blake2b(text.encode(), digest_size=16).digest(), "little")


def draws(seed: int, purpose: str, *position: int) -> np.random.Generator:
    """The stream of draws for one purpose at one position (round, client)."""
    return np.random.Generator(np.random.Philox(key=key(seed, purpose, *position)))


def rewind(seed: int, purpose: str, *position: int) -> None:
    """Puts PyTorch's stream at one position; within `torch_draws`, so that the caller's own is put back."""
    torch.manual_seed(key(seed, purpose, *position) % 2**63)


@contextmanager
def torch_draws(seed: int, purpose: str, *position: int) -> Iterator[None]:
    """Within it PyTorch's own draws (initial weights, dropout) are keyed; the caller's stream is put back after."""
    with torch.random.fork_rng(devices=[]):
        rewind(seed, purpose, *position)
        yield
