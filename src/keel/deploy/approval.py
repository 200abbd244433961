"""Approval of code: a site runs only the app that somebody at the site has read and approved.

The hash of an app covers the path and the content of each file in its bundle, and nothing else. Two machines whose zip
libraries compress differently therefore compute the same hash from the same folder.
"""

import json
import os
import re
import zlib
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import unified_diff
from hashlib import sha256
from io import BytesIO
from lzma import LZMAError
from pathlib import Path
from tempfile import mkstemp
from zipfile import BadZipFile, ZipFile

from keel.errors import KeelError, shown

BUNDLE, PIN, REFUSED = "approved.fab", "approved.json", "refused.fab"
"""The approved app and its hash, in the folder of the approval, and the last app that a node has refused."""
MANIFEST = ".info/CONTENT"
"""Flower's list of the files in a bundle. It is not installed."""
MAX_FILES, MAX_BYTES = 10_000, 2**28
SAFE_PATH = re.compile(r"(?!\.{0,2}/)[^\\\0\n]+")


@dataclass(frozen=True)
class App:
    """The files of an app by their path."""

    files: dict[str, bytes]

    @property
    def hash(self) -> str:
        """SHA-256 of the paths and contents of all files."""
        lines = [f"{sha256(content).hexdigest()} {path}\n" for path, content in sorted(self.files.items())]
        return sha256("".join(lines).encode()).hexdigest()

    def diff(self, other: "App") -> str:
        """Return the changes from `other` to this app, as a unified diff that is safe to print."""
        parts: list[str] = []
        for path in sorted(self.files.keys() | other.files.keys()):
            old, new = other.files.get(path), self.files.get(path)
            if old is None:
                parts.append(f"added {path}")
            elif new is None:
                parts.append(f"removed {path}")
            names = f"approved/{path}", f"new/{path}"
            parts += unified_diff(_lines(old), _lines(new), *names, lineterm="")
        return "\n".join(map(printable, parts))


def _lines(content: bytes | None) -> list[str]:
    """Split a file at newlines alone: Python's other line breaks are content. Other bytes give other lines."""
    return [] if content is None else content.decode(errors="surrogateescape").split("\n")


def printable(text: str | bytes) -> str:
    """Return text in which every character that a terminal may interpret or hide is escaped, but newline and tab."""
    if isinstance(text, bytes):
        text = text.decode(errors="surrogateescape")
    return "".join(c if c in "\n\t" or c.isprintable() else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    raw = character.encode(errors="surrogateescape")
    return repr(character)[1:-1] if len(raw) > 1 else f"\\x{raw[0]:02x}"


def read_app(bundle: bytes) -> App:
    """Read the files of an app bundle without writing or running any of them.

    Raises:
        KeelError: It is not a zip file, or unpacking it could write anything but the listed files.
    """
    try:
        with ZipFile(BytesIO(bundle)) as archive:
            entries = archive.infolist()
            names = [entry.filename for entry in entries]
            folded = {name.lower() for name in names}
            if len(folded) < len(names) or len(names) > MAX_FILES or sum(e.file_size for e in entries) > MAX_BYTES:
                raise KeelError("the app bundle has files of the same name, or too many or too large files")
            for name in names:
                if not name.isprintable():
                    raise KeelError(f"the app bundle has a file name with control characters (got {shown(name)})")
                if not SAFE_PATH.fullmatch(name) or ".." in name.split("/") or name.endswith("/"):
                    raise KeelError(f"the app bundle has a file outside of its folder (got {shown(name)})")
            return App({name: archive.read(name) for name in names if name != MANIFEST})
    except KeelError:
        raise
    except (BadZipFile, OSError, EOFError, RuntimeError, ValueError, LZMAError, zlib.error) as error:
        raise KeelError(f"the app bundle is not a zip file that can be read ({type(error).__name__})") from None


class Approval:
    """The approved app of a site. Only the owner can read the folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    def hash(self) -> str:
        """Return the hash of the approved app.

        Raises:
            KeelError: No app is approved, or the file is damaged.
        """
        try:
            text = json.loads((self.folder / PIN).read_text(encoding="utf-8"))["hash"]
        except FileNotFoundError:
            raise KeelError(f"no app is approved in {str(self.folder)!r}; run keel deploy approve") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise KeelError(
                f"{self.folder / PIN} cannot be read ({type(error).__name__}); approve the app again"
            ) from None
        if not isinstance(text, str) or not re.fullmatch("[0-9a-f]{64}", text):
            raise KeelError(f"{self.folder / PIN} has no hash; run keel deploy approve again")
        return text

    def approved_app(self) -> App | None:
        """Return the app that was approved last, for a diff; None if there is none."""
        file = self.folder / BUNDLE
        return read_app(file.read_bytes()) if file.exists() else None

    def approve(self, bundle: bytes) -> str:
        """Pin the hash of this bundle, in place of the one before, and return it."""
        app = read_app(bundle)
        record = {"hash": app.hash, "time": datetime.now(UTC).isoformat(timespec="seconds"), "files": sorted(app.files)}
        _write(self.folder / BUNDLE, bundle)
        _write(self.folder / PIN, json.dumps(record, indent=2).encode())
        return app.hash

    def check(self, bundle: bytes, refused: Path) -> str:
        """Return the hash of a bundle if it is the approved one.

        Args:
            refused: The file that keeps a refused bundle, so that it can be read. A node may be unable to write the
                folder of the approval.

        Raises:
            KeelError: It is another app, no app is approved, or the bundle cannot be read.
        """
        offered = read_app(bundle).hash
        try:
            approved = self.hash()
            if offered == approved:
                return offered
            reason = f"the approved app is {approved[:12]}"
        except KeelError as error:
            reason = str(error)
        _write(refused, bundle)
        raise KeelError(f"app {offered[:12]} is refused: {reason}; to read it: keel deploy approve {refused}")


def _write(file: Path, content: bytes) -> None:
    """Replace a file that only its owner can read. Several nodes may share the folder."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, temporary = mkstemp(prefix=f".{file.name}.", dir=file.parent)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    Path(temporary).replace(file)
