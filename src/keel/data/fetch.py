"""Downloads: resumed where they were cut off, checked before they count, unpacked without trusting the archive."""

import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from filelock import FileLock

from keel.data.store import check
from keel.errors import KeelError

BLOCK = 1 << 20
PATIENCE = 60.0
"""Seconds without a byte after which a server counts as gone."""

Progress = Callable[[int, int | None], None]
"""Told the bytes that are there and how many there will be, if the server says."""


@dataclass(frozen=True)
class Download:
    """A file that a publisher offers: where it lies in the data folder, and for an archive what is taken out of it."""

    url: str
    digest: str
    path: str
    members: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        """What it leaves in the data folder: an archive's members lie beside it."""
        return tuple(str(Path(self.path).parent / name) for name in self.members) or (self.path,)

    def missing(self, folder: Path) -> list[str]:
        """Those of its files that are not there, packed or not."""
        return [name for name in self.files if not any((folder / form).is_file() for form in forms(name))]


def forms(name: str) -> list[str]:
    """A file's names: as it is offered, and unpacked."""
    return [name, name.removesuffix(".gz")]


def fetch(download: Download, folder: Path, progress: Progress) -> None:
    """The file, whole and checked, in the data folder."""
    target = folder / download.path
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):  # two at once would write into one another
        _fetch(download, target, folder, progress)


def _fetch(download: Download, target: Path, folder: Path, progress: Progress) -> None:
    if not target.is_file():
        part = target.with_name(f"{target.name}.part")
        try:
            _receive(download.url, part, progress)
        except (OSError, HTTPException) as error:
            raise KeelError(
                f"data: {download.url} cannot be fetched ({error}); what came is kept, and the same command goes on; "
                f"accepted also: the file put at {str(target)!r} by hand"
            ) from error
        try:
            check(part, download.digest)
        except KeelError:
            part.unlink()  # what is wrong cannot be gone on with
            raise
        part.replace(target)
    if download.members:
        _unpack(target, download, folder)


def _receive(url: str, part: Path, progress: Progress) -> None:
    there = part.stat().st_size if part.exists() else 0
    request = Request(url, headers={"User-Agent": "keel", **({"Range": f"bytes={there}-"} if there else {})})
    try:
        response = urlopen(request, timeout=PATIENCE)
    except HTTPError as error:
        if there and error.code == 416:  # nothing is missing
            return
        raise
    with response:
        if there and response.status != 206:  # the server starts again, so do we
            there = 0
        length = response.headers.get("Content-Length")
        total = there + int(length) if length else None
        with part.open("ab" if there else "wb") as file:
            while block := response.read(BLOCK):
                file.write(block)
                there += len(block)
                progress(there, total)
    if total is not None and there < total:
        raise OSError(f"the connection ended after {there:,} of {total:,} bytes")


def _unpack(archive: Path, download: Download, folder: Path) -> None:
    """The named members and nothing else, each written aside and moved in."""
    check(archive, download.digest)
    places = dict(zip(download.members, download.files, strict=True))
    with tarfile.open(archive, mode="r|*") as tar:  # once through: a packed archive cannot be jumped in
        for member in tar:
            source = tar.extractfile(member) if member.name in places else None
            if source is None:
                continue
            target = folder / places.pop(member.name)
            target.parent.mkdir(parents=True, exist_ok=True)
            aside = target.with_name(f".{target.name}.new")
            try:
                with source, aside.open("wb") as file:
                    while block := source.read(BLOCK):
                        file.write(block)
                aside.replace(target)
            finally:
                aside.unlink(missing_ok=True)
    if places:
        raise KeelError(f"data: {str(archive)!r} has no file {next(iter(places))!r}")
