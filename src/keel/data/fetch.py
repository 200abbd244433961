"""Downloads: resumed after an interruption, verified before use, and only the named files of an archive extracted."""

import lzma
import re
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import IO
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from filelock import FileLock

from keel.data.store import check
from keel.errors import KeelError

BLOCK = 1 << 20
TIMEOUT = 60.0
"""Seconds without a byte after which a download fails."""

Progress = Callable[[int, int | None], None]
"""Called with the bytes received so far and the total, which is None if the server does not report it."""


@dataclass(frozen=True)
class Download:
    """A published file to download.

    Args:
        url: Its address.
        digest: Its checksum: "md5:..." or "sha256:...".
        path: Where it is saved, relative to the data folder.
        members: If it is an archive, the files to extract, next to the archive.
    """

    url: str
    digest: str
    path: str
    members: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        """The files that loaders read, relative to the data folder."""
        return tuple(str(Path(self.path).parent / name) for name in self.members) or (self.path,)

    def missing(self, folder: Path) -> list[str]:
        """Return the files that do not exist, neither compressed nor decompressed."""
        return [name for name in self.files if not any((folder / variant).is_file() for variant in variants(name))]


def variants(name: str) -> list[str]:
    """Return a file's names: as published, and decompressed."""
    return [name, name.removesuffix(".gz")]


def fetch(download: Download, folder: Path, progress: Progress) -> None:
    """Download a file to the data folder, verify it and extract its members."""
    target = folder / download.path
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):  # two processes must not write the same file
        _fetch(download, target, folder, progress)


def _fetch(download: Download, target: Path, folder: Path, progress: Progress) -> None:
    if not target.is_file():
        part = target.with_name(f"{target.name}.part")
        try:
            _receive(download.url, part, progress)
        except (OSError, HTTPException) as error:
            raise KeelError(
                f"data: {download.url} cannot be downloaded ({error}); repeat the command to resume the download, "
                f"or save the file as {str(target)!r}"
            ) from error
        try:
            check(part, download.digest)
        except KeelError:
            part.unlink()  # a wrong file cannot be resumed
            raise
        part.replace(target)
    if download.members:
        _extract(target, download, folder)


def _receive(url: str, part: Path, progress: Progress) -> None:
    """Download to `part`, which may hold the beginning of the file."""
    received = part.stat().st_size if part.exists() else 0
    request = Request(url, headers={"User-Agent": "keel", **({"Range": f"bytes={received}-"} if received else {})})
    try:
        response = urlopen(request, timeout=TIMEOUT)
    except HTTPError as error:
        if received and error.code == 416:  # the range starts at the end: the file is complete
            return
        raise
    with response:
        if received and response.status != 206:  # the server ignores ranges and sends the whole file
            received = 0
        length = response.headers.get("Content-Length", "")
        total = received + int(length) if re.fullmatch("[0-9]{1,18}", length) else None
        with part.open("ab" if received else "wb") as file:
            while block := response.read(BLOCK):
                file.write(block)
                received += len(block)
                progress(received, total)
    if total is not None and received < total:
        raise OSError(f"the connection ended after {received:,} of {total:,} bytes")


def _extract(archive: Path, download: Download, folder: Path) -> None:
    """Extract the named members and nothing else; each appears complete or not at all."""
    check(archive, download.digest)
    targets = dict(zip(download.members, download.files, strict=True))
    try:
        with tarfile.open(archive, mode="r|*") as tar:  # one pass: seeking in a compressed archive is slow
            for member in tar:
                source = tar.extractfile(member) if member.name in targets and member.isreg() else None
                if source is not None:
                    _write_member(source, folder / targets.pop(member.name))
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, TypeError, ValueError) as error:
        raise KeelError(f"data: the archive {str(archive)!r} cannot be read ({error}); download it again") from error
    if targets:
        raise KeelError(f"data: the archive {str(archive)!r} has no file {next(iter(targets))!r}")


def _write_member(source: IO[bytes], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.new")
    try:
        with source, temporary.open("wb") as file:
            while block := source.read(BLOCK):
                file.write(block)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
