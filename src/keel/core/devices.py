"""Cores, devices and threads."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from keel.errors import KeelError


def find_device(name: str) -> torch.device:
    """The device of that name; for "auto" an accelerator if the machine has one."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind, usable in available.items() if usable)
    if not available[name]:
        usable = ", ".join(repr(kind) for kind, usable in available.items() if usable)
        raise KeelError(f"engine.device {name!r} is not available on this machine; use 'auto' or {usable}")
    return torch.device(name)


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


@contextmanager
def single_thread() -> Iterator[None]:
    """Run PyTorch on one thread: how it splits a sum over threads changes the rounding."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
