"""JSON with a checksum as its last field, so that a changed, lost or added byte is detected when it is read."""

import errno
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from shlex import quote
from stat import S_ISREG
from typing import Any
from zlib import crc32

from keel.errors import DamagedFile

FIELD = "crc32"
TOO_MANY_OPEN = (errno.EMFILE, errno.ENFILE)
"""Errors that say nothing about a file: the process or the system has too many open."""
NOT_A_FILE = "it is not a regular file"
_KEY = f'"{FIELD}": "'.encode()


def damaged(file: Path, reason: str, run: Path | None = None) -> DamagedFile:
    """The error for a damaged file of the run folder `run`, by default the folder that holds the file."""
    folder = quote(str(file.parent if run is None else run))
    return DamagedFile(f"run: {str(file)!r} is damaged ({reason}); keel repair {folder} restores it if it can")


def seal(value: Mapping[str, Any], indent: int | None = None) -> bytes:
    """The value as JSON that ends in a newline, with the checksum of all that precedes it as the last field."""
    text = json.dumps(value, indent=indent)
    new_line = "" if indent is None else "\n"
    head = f"{text.removesuffix('}').rstrip()},{new_line}{' ' * (indent or 1)}".encode()
    return head + _KEY + f'{crc32(head):08x}"{new_line}}}\n'.encode()


def check_seal(content: bytes, required: bool = True) -> None:
    """Raise a ValueError if the content is not what was written.

    What earlier versions wrote has no checksum, and is accepted if it is not `required`.
    """
    head, key, tail = content.rpartition(_KEY)
    if key and tail.rstrip(b"\n}") != f'{crc32(head):08x}"'.encode():
        raise ValueError("its checksum is wrong")
    if required and not key:
        raise ValueError("its checksum is missing")


def seal_of(content: bytes) -> str:
    """The checksum that a sealed value ends in; empty if it has none."""
    _, key, tail = content.rpartition(_KEY)
    return (key and tail[:8]).decode("ascii", "replace")


def unseal(content: bytes, required: bool = True) -> dict[str, Any]:
    """The value that was sealed.

    Raises:
        ValueError: The content is not JSON, or not what was written.
    """
    check_seal(content, required)
    try:
        value = json.loads(content)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("it is not an object")
    value.pop(FIELD, None)
    return value


def read_sealed(file: Path, required: bool = True) -> dict[str, Any]:
    """The value in a sealed file.

    Raises:
        DamagedFile: The file is missing or damaged.
    """
    try:
        return unseal(content(file), required)
    except DamagedFile:
        raise
    except ValueError as error:
        raise damaged(file, str(error)) from None


def complete_lines(file: Path) -> list[bytes]:
    """The lines that end in a newline."""
    return content(file).split(b"\n")[:-1]


def content(file: Path) -> bytes:
    """The bytes of a regular file."""
    with opened(file) as stream:
        return stream.read()


@contextmanager
def opened(file: Path) -> Iterator[BufferedReader]:
    """Open a regular file: a pipe would block, and a folder has no content.

    Raises:
        DamagedFile: It is missing, cannot be read, or is not a regular file.
    """
    try:
        status = file.stat()
        if not S_ISREG(status.st_mode):
            raise damaged(file, NOT_A_FILE)
        with file.open("rb") as stream:
            yield stream
    except FileNotFoundError:
        raise damaged(file, "it is missing") from None
    except OSError as error:
        if error.errno in TOO_MANY_OPEN:
            raise
        raise damaged(file, error.strerror or str(error)) from None
