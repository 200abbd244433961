"""keel verify: which files of a run folder do not have the content that was written."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from keel.core.client_state import ClientStates
from keel.errors import DamagedFile
from keel.runs.folder import RunFolder
from keel.runs.sealed import damaged


def damages(folder: RunFolder, checkpoints: bool = True) -> list[DamagedFile]:
    """What is damaged in a run folder; nothing if all of it is intact.

    Folders of earlier versions have no checksums: only files that cannot be read are found in them.

    Args:
        checkpoints: Check the checkpoints too, which a process that writes the run replaces meanwhile.
    """
    misplaced = (damaged(path, reason, folder.path) for path, reason in folder.misplaced().items())
    found = {str(error): error for error in misplaced}
    for check in _checks(folder, checkpoints):
        try:
            check()
        except DamagedFile as error:
            found[str(error)] = error  # one damaged file can fail several checks
        except OSError as error:
            unreadable = f"run: {str(error.filename or folder.path)!r} cannot be read ({error.strerror or error})"
            found[unreadable] = DamagedFile(unreadable)
    return list(found.values())


def _checks(folder: RunFolder, checkpoints: bool) -> Iterator[Callable[[], Any]]:
    yield lambda: folder.manifest
    yield lambda: folder.table
    yield lambda: folder.environment
    for name in _recorded_files(folder):
        yield partial(folder.checked, name)
    yield lambda: folder.summary
    yield lambda: folder.tracker_ids
    yield folder.records
    yield folder.seconds
    if checkpoints:
        for file in (folder.checkpoint_file, folder.previous_file):
            yield partial(_check_checkpoint, folder, file)
        yield lambda: folder.final_state() if folder.ended else None


def _recorded_files(folder: RunFolder) -> list[str]:
    """The files in the manifest, besides the spec, which may have been edited."""
    try:
        manifest = folder.manifest
    except DamagedFile:
        return []
    return [] if manifest is None else sorted(manifest.files.keys() - {"spec.toml"})


def _check_checkpoint(folder: RunFolder, file: Path) -> None:
    if os.path.lexists(file):
        clients = ClientStates(folder.clients_file)
        state = folder.load(file, clients)
        clients.verify()
        folder.check_logs(state.round if state else 0)
