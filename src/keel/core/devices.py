"""Cores, devices and threads."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from keel.errors import KeelError


def find_device(name: str) -> torch.device:
    """The device of that name; for "auto" an accelerator if the machine has one."""
    # without it PyTorch would initialise CUDA to answer, and forked workers could not use it
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind, usable in available.items() if usable)
    if not available[name]:
        usable = ", ".join(repr(kind) for kind, usable in available.items() if usable)
        raise KeelError(f"engine.device {name!r} is not available on this machine; use 'auto' or {usable}")
    return torch.device(name)


def same_kind(device: torch.device) -> tuple[torch.device, ...]:
    """All devices of this machine that are of the device's kind: every GPU for "cuda"."""
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    return tuple(torch.device(device.type, number) for number in range(count)) if count > 1 else (device,)


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
