"""The findings of `keel doctor` and `keel deploy doctor`, and the checks that both make: disk, memory and GPU."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from keel.core.ram import available_ram

MIN_SPACE = 2**30
"""Bytes of disk and of memory below which a check gives a warning."""


@dataclass(frozen=True)
class Finding:
    """The result of one check. Its text says what to do if the status is not ok."""

    check: str
    status: Literal["ok", "warning", "failed"]
    text: str


def resource_findings(folder: Path) -> Iterator[Finding]:
    """Check the free disk space of a folder, the memory, and which GPUs there are."""
    yield _space("disk", shutil.disk_usage(folder).free)
    if (memory := available_ram()) is not None:
        yield _space("memory", memory)
    yield Finding("gpu", "ok", ", ".join(_accelerators()) or "none; training uses the CPU")


def _accelerators() -> list[str]:
    import torch  # not above: keel doctor also answers where it cannot be imported

    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return names or (["Apple GPU (mps)"] if torch.backends.mps.is_available() else [])


def _space(check: str, free: int) -> Finding:
    text = f"{free / 1e9:.1f} GB available"
    if free >= MIN_SPACE:
        return Finding(check, "ok", text)
    return Finding(check, "warning", f"{text}; at least 1 GB is required")
