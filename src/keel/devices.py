"""What there is to compute on: cores and devices."""

import os
import sys

import torch

from keel.errors import KeelError


def find_device(name: str) -> torch.device:
    """The device of that name; for "auto" an accelerator if there is one."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind, usable in there.items() if usable)
    if not there[name]:
        usable = ", ".join(repr(kind) for kind, usable in there.items() if usable)
        raise KeelError(f"engine.device: {name!r} is not there; accepted here: 'auto', {usable}")
    return torch.device(name)


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
