"""The data folder: the publishers' files, and the arrays that were prepared from them.

Prepared arrays are memory-mapped, so that all processes of a machine share them, and are verified when they are opened.
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
"""The version of the prepared arrays. Increase it if the same files give other arrays."""
ALWAYS_HASHED = 1 << 30
"""The size in bytes above which an array is verified by its size and modification time: hashing would take minutes."""

_mapped: WeakValueDictionary[int, np.memmap] = WeakValueDictionary()
"""The open arrays by their address in memory."""


def file_of(array: np.ndarray) -> Path | None:
    """Return the prepared file that this array maps completely, or None."""
    mapped = _mapped.get(array.ctypes.data)
    same = mapped is not None and (mapped.shape, mapped.dtype) == (array.shape, array.dtype)
    return Path(mapped.filename) if mapped is not None and same and mapped.filename else None


def data_folder() -> Path:
    """Return the folder that KEEL_DATA names, or a folder in the user's cache."""
    named = os.environ.get("KEEL_DATA")
    return Path(named).absolute() if named else user_cache_path("keel")


def check(path: Path, digest: str) -> None:
    """Raise a KeelError if a file is not the published one; `digest` is "md5:..." or "sha256:..."."""
    method, expected = digest.split(":")
    try:
        with path.open("rb") as file:
            actual = file_digest(file, method).hexdigest()
    except OSError as error:
        raise KeelError(f"data: {str(path)!r} cannot be read ({error.strerror})") from error
    if actual != expected:
        raise KeelError(
            f"data: {str(path)!r} is not the published file (its {method} is {actual}, expected {expected}); "
            "delete it and download it again"
        )


@dataclass(frozen=True)
class Prepared:
    """Prepared arrays by name, small facts about them (for JSON), and one hash of everything."""

    arrays: dict[str, np.ndarray]
    facts: dict[str, Any]
    sha256: str


def prepared(
    name: str, sources: Sequence[Path], settings: Mapping[str, Any], make: Callable[[Path], dict[str, Any]]
) -> Prepared:
    """Open prepared arrays; make them first if there are none for these source files and settings.

    Args:
        name: The name of the data set.
        sources: The files that the arrays are made from. If one changes, the arrays are made again.
        settings: The settings that the arrays depend on.
        make: Writes NAME.npy files to the folder it is called with and returns the facts.
    """
    try:
        stamps = [(str(path), *_stamp(path)) for path in sources]
    except OSError as error:
        raise KeelError(f"data: {error.filename!r} cannot be read ({error.strerror})") from error
    identity = json.dumps([FORMAT, name, sorted(settings.items()), stamps])
    folder = _prepared_folder() / f"{name}-{sha256(identity.encode()).hexdigest()[:12]}"
    if not folder.is_dir():
        with FileLock(f"{folder}.lock"):  # of several runs that start together, one prepares
            if not folder.is_dir():
                _make(folder, make)
    return _open(folder)


def _prepared_folder() -> Path:
    """Return a writable folder: in the data folder, or in the user's cache if the data folder is read-only."""
    folder = data_folder() / "prepared"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if not data_folder().is_dir():
            raise KeelError(f"KEEL_DATA: {str(data_folder())!r} is not a folder ({error.strerror})") from error
    if not os.access(folder, os.W_OK):
        folder = user_cache_path("keel") / "prepared"
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def _make(folder: Path, make: Callable[[Path], dict[str, Any]]) -> None:
    temporary = folder.with_name(f".{folder.name}.new")
    rmtree(temporary, ignore_errors=True)  # from a process that was killed
    temporary.mkdir()
    try:
        facts = make(temporary)
        files = sorted(temporary.glob("*.npy"))
        digests = {file.stem: _sha256(file) for file in files}
        contents = {
            "facts": facts,
            "sha256": digests,
            "stamps": {file.stem: _stamp(file) for file in files},
            "whole": _whole(facts, digests),
        }
        (temporary / "contents.json").write_text(json.dumps(contents), encoding="utf-8")
        temporary.rename(folder)
    finally:
        rmtree(temporary, ignore_errors=True)


def _open(folder: Path) -> Prepared:
    fix = f"delete {str(folder)!r} to have it prepared again"
    try:
        contents = json.loads((folder / "contents.json").read_text(encoding="utf-8"))
        facts, digests, stamps = contents["facts"], contents["sha256"], contents["stamps"]
        names = sorted(file.stem for file in folder.glob("*.npy"))
        if sorted(digests) != names or sorted(stamps) != names or not isinstance(facts, dict):
            raise ValueError("contents.json lists other arrays than the folder has")
        whole = _whole(facts, digests)
        if contents.get("whole", whole) != whole:  # folders of earlier versions have none
            raise ValueError("contents.json has been changed")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise KeelError(f"data: {str(folder)!r} is damaged ({error}); {fix}") from None
    arrays = {}
    for name, digest in digests.items():
        file = folder / f"{name}.npy"
        large = file.is_file() and file.stat().st_size > ALWAYS_HASHED
        unchanged = large and _stamp(file) == stamps[name]
        if not file.is_file() or not (unchanged or _sha256(file) == digest):
            raise KeelError(f"data: {str(file)!r} is damaged; {fix}")
        # Copy-on-write because torch requires writable memory. Nothing writes, so all processes share the file's pages.
        array = arrays[name] = np.load(file, mmap_mode="c", allow_pickle=False)
        _mapped[array.ctypes.data] = array
    return Prepared(arrays, facts, whole)


def _whole(facts: dict[str, Any], digests: dict[str, str]) -> str:
    """Return one hash of all arrays and facts."""
    return sha256(json.dumps([facts, digests], sort_keys=True).encode()).hexdigest()


def _stamp(file: Path) -> list[int]:
    return [file.stat().st_size, file.stat().st_mtime_ns]


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return file_digest(stream, "sha256").hexdigest()
