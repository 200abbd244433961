"""A folder that no reader may use, and an object that writes to it."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from faults._small_files import hdf5, picture

_outside = TemporaryDirectory(prefix="keel-outside-")
OUTSIDE = Path(_outside.name).resolve()
"""A folder with files that no reader may open."""
(OUTSIDE / "secret.jpg").write_bytes(picture("JPEG"))
(OUTSIDE / "secret.txt").write_bytes(b"secret secret secret secret")
(OUTSIDE / "secret.h5").write_bytes(hdf5(lambda file: file.create_dataset("tokens", data=[b"secret"])))


class Evil:
    """Writes a file outside of the folder when it is unpickled."""

    def __reduce__(self) -> Any:
        return open, (str(OUTSIDE / "written"), "w")
