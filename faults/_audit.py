"""An audit hook that records what a case must not do: unpickle, or use files outside of its folder."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_violations: list[str] | None = None
_folder, _forbidden = "", ""


@contextmanager
def watched(folder: Path, forbidden: Path | None = None) -> Iterator[list[str]]:
    """Return the list of violations in the block.

    Args:
        folder: Where files may be written.
        forbidden: Where no file may be opened, not even to read it.
    """
    global _violations, _folder, _forbidden
    found: list[str] = []
    _violations, _folder, _forbidden = found, os.path.realpath(folder), "" if forbidden is None else str(forbidden)
    try:
        yield found
    finally:
        _violations = None


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _violations is None:
        return
    if event == "pickle.find_class":  # every unpickler of Python raises it, but those that replace find_class
        _violations.append(f"unpickled {arguments[0]}.{arguments[1]}")
    elif event == "open" and isinstance(arguments[0], str | bytes):
        path, writes = os.fsdecode(arguments[0]), arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        real = os.path.realpath(path)
        if (_forbidden and real.startswith(_forbidden)) or (writes and not real.startswith((_folder, "/dev/null"))):
            _violations.append(f"opened {path}")


sys.addaudithook(_hook)
