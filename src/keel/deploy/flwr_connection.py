"""The connection of `flwr` to the server, `.flwr/config.toml`. Flower demands an absolute path in it, so that a folder
that is moved loses its connection."""

import json
import re
import tomllib
from pathlib import Path

from keel.errors import KeelError
from keel.runs.files import write_atomic

CONFIG = Path(".flwr") / "config.toml"
LINE = re.compile("^root-certificates = .*$", re.MULTILINE)


def authority_of(folder: Path) -> Path:
    """Return the certificate that the connection of a federation's folder has to name."""
    return folder.absolute() / "certificates" / "ca.crt"


def point_to(folder: Path) -> None:
    """Let `flwr` in this folder trust the authority of this folder, wherever it was made."""
    file = folder / CONFIG
    if file.is_file():
        line = f"root-certificates = {json.dumps(str(authority_of(folder)))}"
        write_atomic(file, [LINE.sub(lambda _: line, file.read_text(encoding="utf-8")).encode()])


def trusted_certificate(folder: Path) -> Path:
    """Return the certificate that the connection names.

    Raises:
        KeelError: The file cannot be read, or has no connection.
    """
    file = folder / CONFIG
    try:
        return Path(tomllib.loads(file.read_text(encoding="utf-8"))["superlink"]["federation"]["root-certificates"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise KeelError(f"{file} has no connection to the server ({type(error).__name__}); copy it again") from None
