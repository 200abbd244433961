"""Keyed randomness of PyTorch's own draws: initial weights, dropout."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from keel.core.randomness import key

CPU = torch.device("cpu")


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
