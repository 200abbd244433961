"""A full disk, an I/O error, a file size limit or a removed folder: one line, then it continues to the same bits."""

import errno
import os
import resource
from pathlib import Path
from random import Random
from shutil import rmtree

from faults._commands import Fault, Process, command, difference, pick, reference

ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EMFILE)


def check(seed: int, folder: Path) -> str | None:
    rng = Random(seed)
    name = pick(rng)
    kind = rng.choice([_error, _error, _error, _limit, _removed])
    fault = kind(rng, folder)
    process = Process(folder, command(name, folder), rng.randrange(reference(name).operations), fault)
    ended = process.wait()
    if left := process.left():
        return f"{name}: {len(left)} processes are left after {fault.__name__}"
    if ended.code not in (0, 1, 2) or (ended.code != 0 and not ended.has_one_line):
        return f"{name}: exit code {ended.code} after {fault.__name__}, and {ended.err!r}"
    if kind is _removed:  # another process can have written to the folder meanwhile
        rmtree(folder / "out", ignore_errors=True)
    return difference(name, folder)


def _error(rng: Random, folder: Path) -> Fault:
    """Let an operation fail."""
    number = rng.choice(ERRORS)

    def raise_error() -> None:
        raise OSError(number, os.strerror(number))

    return raise_error


def _limit(rng: Random, folder: Path) -> Fault:
    """Let every file end after some bytes from now on, as on a full disk."""
    size = rng.choice([500, 1_000, 4_096, 20_000])  # the line on standard error fits

    def limit_size() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    return limit_size


def _removed(rng: Random, folder: Path) -> Fault:
    """Remove the folder."""

    def remove_folder() -> None:
        rmtree(folder / "out", ignore_errors=True)

    return remove_folder
