"""Finds run folders, damaged ones too: what cannot be read is listed in a report, not left out."""

import os
from collections.abc import Iterable
from pathlib import Path

from keel.errors import KeelError
from keel.runs.folder import RunFolder

SPEC = "spec.toml"
LOGS = {"environment.json", "metrics.jsonl"}
"""Files by which a run folder is recognised that has lost its spec."""


def find_runs(paths: Iterable[Path]) -> list[RunFolder]:
    """Return the run folders among `paths` and below them, without hidden folders and symbolic links.

    Raises:
        KeelError: A path is not a run folder and contains none.
    """
    runs = []
    for path in paths:
        below = [path] if _is_run(path) else sorted(_runs_below(path))
        if not below and not os.path.lexists(path):
            raise KeelError(f"run: {str(path)!r} does not exist")
        if not below:
            raise KeelError(f"run: {str(path)!r} is not a run folder (it has no {SPEC})")
        runs += [RunFolder(folder) for folder in below]
    return runs


def _is_run(path: Path) -> bool:
    return os.path.lexists(path / SPEC) or all(os.path.lexists(path / name) for name in LOGS)


def _runs_below(path: Path) -> list[Path]:
    found: list[Path] = []

    def unreadable(error: OSError) -> None:  # a folder without permission may be a run
        if error.filename != str(path):
            found.append(Path(error.filename))

    for folder, folders, files in os.walk(path, onerror=unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        names = {*folders, *files}
        if SPEC in names or names >= LOGS:
            found.append(Path(folder))
    return found
