"""The RAM that this process can have."""

import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def available_ram() -> int | None:
    """Return the bytes of RAM that this process can have; None if the system does not report it."""
    limits = []
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for file in _limit_files():
        text = file.read_text().strip() if file.is_file() else ""
        limits += [int(text)] if text.isdigit() else []
    return min((limit for limit in limits if limit > 0), default=None)


def _limit_files() -> Iterator[Path]:
    """Yield the files in which Linux lists the memory limits of this process's control group and its parents."""
    groups = Path("/proc/self/cgroup")
    for line in groups.read_text().splitlines() if groups.is_file() else []:
        _, controllers, path = line.split(":", 2)
        root = CGROUPS / controllers
        group = root / path.lstrip("/")
        if controllers in ("", "memory"):
            name = "memory.limit_in_bytes" if controllers else "memory.max"
            yield from (folder / name for folder in [group, *group.parents] if folder.is_relative_to(root))
