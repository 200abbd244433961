"""keel repair: restore a damaged run folder from the parts that are intact, so that keel resume can continue it."""

import os
from collections.abc import Callable
from itertools import count
from pathlib import Path
from shlex import quote
from typing import Any

from keel.core.client_state import ClientStates
from keel.errors import DamagedFile, KeelError
from keel.runs import validation
from keel.runs.files import sync, write_atomic
from keel.runs.folder import START_FILES, RunFolder
from keel.runs.manifest import FILE as MANIFEST
from keel.runs.manifest import Manifest
from keel.runs.sealed import complete_lines, seal, unseal
from keel.runs.verify import damages


def repair(folder: RunFolder) -> list[str]:
    """Restore what can be restored, and return what was done, a line each; nothing if the folder is intact.

    A run continues from the last intact checkpoint whose records are intact too, or else from round 1. Either leads to
    the bits of the run that was not damaged.

    Raises:
        KeelError: A file is damaged that nothing else in the folder can restore.
    """
    with folder.locked():
        folder.check_links()
        done = _without_misplaced(folder)
        if not damages(folder):
            return done
        done += [*_restored_manifest(folder), *_restored_spec(folder), *_without_tracking(folder)]
        _check_start(folder)
        folder.checkpoint_file.parent.mkdir(exist_ok=True)
        sealed = folder.manifest is not None
        rounds = _intact_rounds(folder.metrics, sealed)
        kept = _keep_checkpoint(folder, rounds)
        if kept is not None and _is_complete(folder):
            return [*done, *_restored_timings(folder, kept, sealed)]
        folder.summary_file.unlink(missing_ok=True)
        sync(folder.path)
        write_atomic(folder.metrics, _lines(folder.metrics)[: kept or 0])
        done += _restored_timings(folder, kept or 0, sealed)
        return [*done, _continuation(folder, kept or 0)]


def _without_misplaced(folder: RunFolder) -> list[str]:
    """Remove what is in the place of a file that can be restored; a folder that is not empty gets another name."""
    done = []
    for path in folder.misplaced():
        name = path.relative_to(folder.path)
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        elif not any(path.iterdir()):
            path.rmdir()
        else:
            numbered = (path.with_name(f"{path.name}.{number}") for number in count(1))
            aside = next(new for new in numbered if not os.path.lexists(new))
            path.rename(aside)
            done.append(f"{name}: a folder was in its place, which is {aside.name} now")
            continue
        done.append(f"{name}: removed what was in its place, which was not a file")
    return done


def _continuation(folder: RunFolder, rounds: int) -> str:
    command = f"keel resume {quote(str(folder.path))}"
    if rounds == 0:
        return f"no round can be kept; train all of them again with {command}"
    if rounds == folder.spec.rounds:
        return f"all {rounds} rounds are kept; finish the run with {command}"
    return f"rounds 1 to {rounds} are kept; continue with {command}"


def _restored_manifest(folder: RunFolder) -> list[str]:
    if not _fails(lambda: folder.manifest):
        return []
    names = [name for name in START_FILES if (folder.path / name).is_file()]
    try:
        validation.read_table(folder.path / "spec.toml")
        validation.read_environment(folder.path / "environment.json")
        validation.read_statistics(folder.path / "data.json")
    except DamagedFile as error:
        raise KeelError(f"{str(error).partition(';')[0]}, and so is {MANIFEST}; repeat the run") from None
    Manifest.write(folder.path, names)
    return [f"{MANIFEST}: written anew; whether {', '.join(names)} are intact could not be checked"]


def _restored_spec(folder: RunFolder) -> list[str]:
    manifest = folder.manifest
    if manifest is None or not _fails(lambda: folder.table):
        return []
    write_atomic(folder.path / "spec.toml", [manifest.spec.encode()])
    return ["spec.toml: restored from the manifest"]


def _without_tracking(folder: RunFolder) -> list[str]:
    if not _fails(lambda: folder.tracker_ids):
        return []
    folder.tracking_file.unlink()
    return ["tracking.json: removed; the trackers show a new run from here"]


def _check_start(folder: RunFolder) -> None:
    """Raise a KeelError if a file that was written when the run started is damaged."""
    manifest = folder.manifest
    for name in manifest.files if manifest else []:
        try:
            if name != "spec.toml":
                folder.checked(name)
        except DamagedFile as error:
            reason = str(error).partition(";")[0]
            spec = quote(str(folder.path / "spec.toml"))
            raise KeelError(f"{reason}; nothing can restore it: repeat the run with keel run {spec}") from None


def _intact_rounds(file: Path, sealed: bool) -> int:
    """The number of rounds whose lines are intact, from the first on."""
    lines = _lines(file)
    for number, line in enumerate(lines):
        try:
            if unseal(line, sealed).get("round") != number + 1:
                return number
        except ValueError:
            return number
    return len(lines)


def _keep_checkpoint(folder: RunFolder, rounds: int) -> int | None:
    """Keep the last intact checkpoint of at most `rounds`, and return its round; remove the others."""
    kept: int | None = None
    for file in (folder.checkpoint_file, folder.previous_file):
        if kept is None and (kept := _checkpoint_round(folder, file, rounds)) is not None:
            if file != folder.checkpoint_file:
                file.replace(folder.checkpoint_file)
        elif file != folder.checkpoint_file or kept is None:
            file.unlink(missing_ok=True)
    sync(folder.checkpoint_file.parent)
    return kept


def _checkpoint_round(folder: RunFolder, file: Path, most: int) -> int | None:
    try:
        clients = ClientStates(folder.clients_file)
        state = folder.load(file, clients)
        clients.verify()
    except DamagedFile:
        return None
    return None if state is None or state.round > most else state.round


def _is_complete(folder: RunFolder) -> bool:
    """Whether the run has ended, with an intact summary, records and final checkpoint."""
    if _fails(lambda: (folder.summary, folder.records())) or not folder.ended:
        return False
    return not _fails(folder.final_state)


def _restored_timings(folder: RunFolder, rounds: int, sealed: bool) -> list[str]:
    """Give `timings.jsonl` a line for each round; the time of a round whose line is lost counts as 0."""
    intact: dict[Any, dict[str, Any]] = {}
    for line in _lines(folder.timings):
        try:
            value = unseal(line, sealed)
        except ValueError:
            continue
        intact[value.get("round")] = value
    write_atomic(folder.timings, [seal(intact.get(t, {"round": t, "seconds": 0.0})) for t in range(1, rounds + 1)])
    lost = [t for t in range(1, rounds + 1) if t not in intact]
    rounds_lost = "1 round" if len(lost) == 1 else f"{len(lost)} rounds"
    return [f"timings.jsonl: the wall-clock time of {rounds_lost} is lost and counts as 0"] if lost else []


def _fails(read: Callable[[], Any]) -> bool:
    try:
        read()
    except DamagedFile:
        return True
    return False


def _lines(file: Path) -> list[bytes]:
    """The complete lines of a log with their ends; none if it is lost."""
    try:
        return [line + b"\n" for line in complete_lines(file)]
    except DamagedFile:
        return []
