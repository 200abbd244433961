"""The audit log: a file of JSON lines, each of which has the hash of the line before it.

`verify` finds a changed, removed, inserted or reordered line. It cannot find that lines are missing at the end, or that
the whole file was written anew, unless somebody else has noted a hash of it.
"""

import json
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from filelock import FileLock

from keel.errors import KeelError

GENESIS = "0" * 64
"""What the first line has as the hash of the line before it."""
BLOCK = 2**16


@dataclass(frozen=True)
class Verification:
    """The result of `verify`: the number of valid lines from the start, the last valid hash, and the first fault."""

    lines: int
    last_hash: str
    fault: str | None = None


class AuditLog:
    """An audit log that only its owner can read. Several processes may append to it."""

    def __init__(self, path: Path):
        self.path = path

    def append(self, event: str, **fields: Any) -> str:
        """Write a line, wait until it is on disk, and return its hash.

        Raises:
            KeelError: The last line of the file is not a line of an audit log.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{self.path}.lock", mode=0o600):
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
            with os.fdopen(descriptor, "r+b") as stream:
                end, previous = self._end(stream)
                body = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **fields}
                body["previous"] = previous
                line = {**body, "hash": _hash(body)}
                stream.seek(end)
                stream.truncate()  # a part of a line that a crash has left
                stream.write((json.dumps(line) + "\n").encode())
                stream.flush()
                os.fsync(stream.fileno())
        return str(line["hash"])

    def _end(self, stream: Any) -> tuple[int, str]:
        """Return where the last complete line ends, and its hash."""
        size, tail = stream.seek(0, os.SEEK_END), b""
        start = size
        while start and tail.count(b"\n") < 2:
            step = min(BLOCK, start)
            start -= step
            stream.seek(start)
            tail = stream.read(step) + tail
        complete = tail[: tail.rfind(b"\n") + 1]
        if not complete:
            return 0, GENESIS
        try:
            previous = str(json.loads(complete.splitlines()[-1])["hash"])
        except (ValueError, KeyError, TypeError):
            raise KeelError(
                f"audit log {str(self.path)!r} is damaged: its last line has no hash; keep the file and move it away"
            ) from None
        return start + len(complete), previous


def verify(path: Path, noted: str | None = None) -> Verification:
    """Check the chain of an audit log.

    Args:
        noted: The hash of a line, noted elsewhere. It is a fault if no line has it: lines at the end were removed.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise KeelError(f"audit log {str(path)!r} cannot be read ({error.strerror})") from None
    previous, contains_noted = GENESIS, noted in (None, GENESIS)
    for number, text in enumerate(lines[:-1], start=1):
        fault = _fault(text, previous)
        if fault is not None:
            return Verification(number - 1, previous, f"line {number}: {fault}")
        previous = json.loads(text)["hash"]
        contains_noted = contains_noted or previous == noted
    count = len(lines) - 1
    if lines[-1]:
        return Verification(count, previous, f"line {count + 1}: is not complete")
    if not contains_noted:
        return Verification(count, previous, f"no line has the hash {noted}; lines at the end were removed")
    return Verification(count, previous)


def _fault(text: bytes, previous: str) -> str | None:
    try:
        line = json.loads(text)
        stated = line.pop("hash")
        if json.dumps({**line, "hash": stated}).encode() != text:
            return "was changed: it is not written as the log writes it"
        before = line["previous"]
    except (ValueError, KeyError, TypeError, AttributeError):
        return "is not a line of an audit log"
    if before != previous:
        return "does not follow the line before it; a line was removed, inserted or moved"
    return None if _hash(line) == stated else "was changed: its hash is wrong"


def _hash(body: dict[str, Any]) -> str:
    return sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
