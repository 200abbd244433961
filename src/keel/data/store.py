"""The data folder: publishers' files as they come, and beside them the arrays that were prepared from them.

Prepared arrays are memory-mapped, so that all processes of a machine share them, and are checked when they are opened.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import file_digest, sha256
from pathlib import Path
from shutil import rmtree
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from filelock import FileLock
from platformdirs import user_cache_path

from keel.errors import KeelError

FORMAT = 1
"""Raised when what is prepared from the same files changes."""
ALWAYS_HASHED = 1 << 30
"""Bytes of an array beyond which its size and time are believed: reading tens of gigabytes would take minutes."""

_mapped: WeakValueDictionary[int, np.memmap] = WeakValueDictionary()
"""The arrays that are open, by where they lie in memory."""


def file_of(array: np.ndarray) -> Path | None:
    """The prepared file that an array is a view of, from its first to its last byte."""
    mapped = _mapped.get(array.ctypes.data)
    same = mapped is not None and (mapped.shape, mapped.dtype) == (array.shape, array.dtype)
    return Path(mapped.filename) if mapped is not None and same and mapped.filename else None


def data_folder() -> Path:
    """KEEL_DATA, or a folder in the user's cache."""
    named = os.environ.get("KEEL_DATA")
    return Path(named).absolute() if named else user_cache_path("keel")


def check(path: Path, digest: str) -> None:
    """Refuses a file that is not what its publisher gives; `digest` is "md5:..." or "sha256:..."."""
    method, expected = digest.split(":")
    with path.open("rb") as file:
        found = file_digest(file, method).hexdigest()
    if found != expected:
        raise KeelError(
            f"data: {str(path)!r} is not the published file (its {method} is {found}, expected {expected}); "
            "accepted: the whole, unchanged file; remove this one, and keel data get fetches it again if it can"
        )


@dataclass(frozen=True)
class Prepared:
    """Arrays by name, small facts about them, and one hash of it all."""

    arrays: dict[str, np.ndarray]
    facts: dict[str, Any]
    sha256: str


def prepared(
    name: str, sources: Sequence[Path], settings: Mapping[str, Any], make: Callable[[Path], dict[str, Any]]
) -> Prepared:
    """What `make` wrote (NAME.npy files in the folder it is given; it returns the facts): made once, opened after.

    It is made again when a source file or a setting changes.
    """
    stamps = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in sources]
    identity = json.dumps([FORMAT, name, sorted(settings.items()), stamps])
    place = _prepared_folder() / f"{name}-{sha256(identity.encode()).hexdigest()[:12]}"
    if not place.is_dir():
        with FileLock(f"{place}.lock"):  # several runs may start at once; one prepares
            if not place.is_dir():
                _make(place, make)
    return _open(place)


def _prepared_folder() -> Path:
    """In the data folder, or in the user's cache where that is for reading only, as shared ones are."""
    folder = data_folder() / "prepared"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if not data_folder().is_dir():
            raise KeelError(f"KEEL_DATA: {str(data_folder())!r} is no folder ({error.strerror})") from error
    if not os.access(folder, os.W_OK):
        folder = user_cache_path("keel") / "prepared"
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def _make(place: Path, make: Callable[[Path], dict[str, Any]]) -> None:
    aside = place.with_name(f".{place.name}.new")
    rmtree(aside, ignore_errors=True)  # what a kill left behind
    aside.mkdir()
    try:
        facts = make(aside)
        files = sorted(aside.glob("*.npy"))
        contents = {
            "facts": facts,
            "sha256": {file.stem: _sha256(file) for file in files},
            "stamps": {file.stem: _stamp(file) for file in files},
        }
        (aside / "contents.json").write_text(json.dumps(contents), encoding="utf-8")
        aside.rename(place)
    finally:
        rmtree(aside, ignore_errors=True)


def _open(place: Path) -> Prepared:
    try:
        contents = json.loads((place / "contents.json").read_text(encoding="utf-8"))
        digests = contents["sha256"].items()
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise KeelError(f"data: {str(place)!r} is damaged ({error}); remove it and it is prepared again") from None
    arrays = {}
    for name, digest in digests:
        file = place / f"{name}.npy"
        large = file.is_file() and file.stat().st_size > ALWAYS_HASHED
        trusted = large and _stamp(file) == contents["stamps"][name]
        if not file.is_file() or not (trusted or _sha256(file) == digest):
            raise KeelError(f"data: {str(file)!r} is damaged; remove {str(place)!r} and it is prepared again")
        # Copy on write: torch wants memory it may write to, and nobody writes. The pages stay the file's own.
        array = arrays[name] = np.load(file, mmap_mode="c", allow_pickle=False)
        _mapped[array.ctypes.data] = array
    whole = sha256(json.dumps([contents["facts"], contents["sha256"]], sort_keys=True).encode())
    return Prepared(arrays, contents["facts"], whole.hexdigest())


def _stamp(file: Path) -> list[int]:
    return [file.stat().st_size, file.stat().st_mtime_ns]


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return file_digest(stream, "sha256").hexdigest()
