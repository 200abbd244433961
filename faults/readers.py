"""Readers of data files, weights and archives: each reads a damaged or hostile input.

A reader returns valid content or raises a KeelError. It raises nothing else, ends within seconds, allocates less than
a gigabyte, unpickles nothing, and neither reads nor writes files outside of the folder.
"""

import resource
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from PIL.Image import DecompressionBombWarning

from faults._audit import watched
from faults._data_folder import data_folder
from faults._hostile_files import HOSTILE
from faults._mutations import damaged
from faults._outside import OUTSIDE
from faults._reader_files import READERS
from keel.errors import KeelError

SECONDS = 120.0
MEMORY = 2**29
"""By how many bytes the peak memory of the process may grow in a case."""
LONGEST = 2000
"""The number of characters that an error may have."""


def check(seed: int, folder: Path) -> str | None:
    rng = Random(seed)
    [name] = rng.choices(list(READERS), [reader.weight for reader in READERS.values()])
    reader = READERS[name]
    files = dict(reader.files())
    hostile = rng.choice(HOSTILE[name]) if name in HOSTILE and rng.random() < 0.2 else None
    for file, content in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(content)
    if hostile is not None:
        hostile(rng, folder)
        case = f"{name} {hostile.__qualname__.split('.')[0]}"
    else:
        file = rng.choice(sorted(files))
        (folder / file).write_bytes(damaged(rng, files[file]))
        case = f"{name} {file}"
    peak = _peak_memory()
    with _limits(), watched(folder, OUTSIDE) as violations, data_folder(folder):
        try:
            reader.read(folder)
        except KeelError as error:
            if len(str(error)) > LONGEST:
                return f"{case}: an error of {len(str(error))} characters"
        except Exception as error:
            return f"{case}: {type(error).__name__}: {error}"
    if violations:
        return f"{case}: {violations[0]}"
    if (grown := _peak_memory() - peak) > MEMORY:
        return f"{case}: memory grew by {grown >> 20} MB"
    return None


@contextmanager
def _limits() -> Iterator[None]:
    """Turn warnings into errors, and raise TimeoutError after some seconds."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"no answer after {SECONDS:g} s")

    previous = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", DecompressionBombWarning)
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def _peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
