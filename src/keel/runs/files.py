"""Files that survive a kill or a full disk: written to a temporary name, synced, then renamed."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from stat import S_ISREG

from keel.errors import KeelError


def write_atomic(file: Path, content: Iterable[bytes | memoryview], keep: Path | None = None) -> None:
    """Replace the file as a whole; until the new content is on disk the old one stays.

    Args:
        keep: A name in the same folder under which the old content stays. Where the file system has no hard links, a
            kill may leave that name alone.
    """
    temporary = temporary_of(file)
    try:
        temporary.unlink(missing_ok=True)  # a pipe of this name would block, a link lead to another file
        write_synced(temporary, content)
        if keep is not None and file.exists():
            _keep_as(file, keep)
        temporary.replace(file)
        sync(file.parent)
    finally:
        temporary.unlink(missing_ok=True)


def temporary_of(file: Path) -> Path:
    """The name under which the new content of a file is written."""
    return file.with_name(f".{file.name}.new")


def _keep_as(file: Path, name: Path) -> None:
    """Give a file a second name in place of another file; without hard links the first name is lost."""
    linked = temporary_of(name)
    try:
        linked.unlink(missing_ok=True)
        linked.hardlink_to(file)
        linked.replace(name)
        linked.unlink(missing_ok=True)  # renaming does nothing if both names have the same file, as after a kill here
    except OSError:
        file.replace(name)


def write_synced(file: Path, content: Iterable[bytes | memoryview]) -> None:
    """Write the file and wait until it is on disk."""
    with file.open("wb") as stream:
        stream.writelines(content)
        stream.flush()
        os.fsync(stream.fileno())


def write_once(file: Path, content: Sequence[bytes | memoryview], others: Iterable[Path]) -> None:
    """Write the file, or link it to one of `others` that has the same content, which is then on disk only once."""
    for other in others:
        try:
            if _has_content(other, content):
                file.hardlink_to(other)
                return
        except OSError:  # it was removed meanwhile, or the file system has no hard links
            continue
    write_synced(file, content)


def _has_content(file: Path, content: Sequence[bytes | memoryview]) -> bool:
    if file.stat().st_size != sum(len(part) for part in content):
        return False
    with file.open("rb") as stream:
        return all(stream.read(len(part)) == part for part in content)


def is_regular(path: Path) -> bool:
    """Whether the path is a regular file itself, and not a link to one."""
    return os.path.lexists(path) and S_ISREG(path.lstat().st_mode)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sqlite_address(file: Path) -> str:
    """SQLAlchemy's address of a database file; "?" and "%" have a meaning of their own in it."""
    from sqlalchemy.engine import URL, make_url  # comes with the extras that use databases

    path = str(file.absolute())
    plain, quoted = f"sqlite:///{path}", URL.create("sqlite", database=path).render_as_string()
    for address in (plain, quoted):
        if make_url(address).database == path:
            return address
    raise KeelError(f"out: {path!r} cannot be the address of a database; use a path without '?'")


def make_folders(path: Path) -> None:
    """Make a folder and those above it; each is on disk before anything is written into it."""
    missing = [folder for folder in [path, *path.parents] if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)
