"""Keyed randomness: every random draw of a run is a pure function of (seed, purpose, round, client).

Nothing here keeps state, so that a resumed run, another engine or another number of workers draws the same numbers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.random import SeedSequence

CPU = torch.device("cpu")


def keyed_rng(seed: int, purpose: str, *position: int) -> np.random.Generator:
    """NumPy's generator for one purpose at one position (round, client)."""
    return np.random.Generator(np.random.Philox(_Key(_digest(seed, purpose, *position))))


def seed_torch(seed: int, purpose: str, *position: int, device: torch.device = CPU) -> None:
    """Seed PyTorch's generators of the CPU and of `device` for one purpose at one position.

    To be called within `keyed_torch_rng`, which restores the caller's generators. Unlike torch.manual_seed, it leaves
    the generators of other devices alone.
    """
    torch_seed = key(seed, purpose, *position) % 2**63
    torch.default_generator.manual_seed(torch_seed)
    if (module := _device_module(device)) is not None:
        module.manual_seed(torch_seed)


@contextmanager
def keyed_torch_rng(seed: int, purpose: str, *position: int, device: torch.device = CPU) -> Iterator[None]:
    """Key PyTorch's own draws (initial weights, dropout) on the CPU and on `device`, and restore the caller's after."""
    before = torch.default_generator.get_state()
    module = _device_module(device)
    device_before = None if module is None else module.get_rng_state()
    try:
        seed_torch(seed, purpose, *position, device=device)
        yield
    finally:
        torch.default_generator.set_state(before)
        if module is not None:
            module.set_rng_state(device_before)


def _device_module(device: torch.device) -> Any:
    """torch.cuda or the like; None for devices without a generator of their own."""
    return None if device.type in ("cpu", "meta") else torch.get_device_module(device)


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
