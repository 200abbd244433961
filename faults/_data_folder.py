"""The folder of data sets, for a case."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def data_folder(folder: Path) -> Iterator[None]:
    """Let KEEL_DATA be a folder. `patch.dict` would set every variable anew, which takes longer than a small case."""
    before = os.environ.get("KEEL_DATA")
    os.environ["KEEL_DATA"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["KEEL_DATA"]
        else:
            os.environ["KEEL_DATA"] = before
