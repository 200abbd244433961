"""`keel deploy clean`: remove the client state of trainings that no round has used for some days."""

import time
from pathlib import Path
from shutil import rmtree

from keel.deploy.site_state import TRAINING_ID
from keel.errors import KeelError

DAY_SECONDS = 86400


def clean_state(folder: Path, days: int, *, dry_run: bool) -> list[Path]:
    """Remove the state of each training under `folder` that is older than `days` days.

    Args:
        folder: The client state of one site, or a folder that contains those of several.

    Returns:
        The folders of these trainings, also if `dry_run` is set and nothing is removed.
    """
    if not folder.is_dir():
        raise KeelError(f"folder {str(folder)!r} does not exist; name the folder of the site's client state")
    before = time.time() - days * DAY_SECONDS
    trainings = [
        path
        for path in sorted([*folder.glob("*"), *folder.glob("*/*")])
        if TRAINING_ID.fullmatch(path.name) and path.is_dir() and not path.is_symlink() and _last_use(path) < before
    ]
    if not dry_run:
        for path in trainings:
            rmtree(path)
    return trainings


def _last_use(training: Path) -> float:
    return max(path.stat().st_mtime for path in [training, *training.glob("*")])
