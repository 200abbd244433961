"""The processes that a process has started."""

from contextlib import suppress
from pathlib import Path


def descendants(of: int) -> list[int]:
    """The processes that a process has started, those that they have started, and so on."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found, generation = [], [of]
    while generation:
        generation = [child for pid in generation for child in children.get(pid, [])]
        found += generation
    return found


def command_of(process: int) -> str:
    """The command line of a process; empty if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def is_alive(process: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
