"""A run as a folder of text, JSON and safetensors, readable after a kill at any moment. Nothing is ever unpickled.

spec.toml        the resolved spec
environment.json versions, engine, device and fingerprints of the task
data.json        client statistics: sizes and label distributions
model.json       names and shapes of the model's tensors, so that they can be read without the model's class
frozen.safetensors   the model's tensors that training does not change, if it has any; shared with other runs
initial.safetensors  the initial weights, if they came from a file (model.init)
metrics.jsonl    a record per round, append-only; no times, so that equal runs have equal files
timings.jsonl    the wall-clock seconds of each round
checkpoint/      the training state to continue from
summary.json     how the run ended
tracking.json    the run's identifiers in the trackers, if any are used
manifest.json    the checksums of the files that are written when the run starts

Each line of a log, summary.json and tracking.json end in a checksum of their own; each tensor of a checkpoint and each
client state has one. A file that does not have the content that was written is never used: it is a DamagedFile.
"""

import json
import logging
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from math import isfinite
from pathlib import Path
from shlex import quote
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any, TypeVar

import numpy as np
from filelock import FileLock, Timeout
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor

from keel.config.overrides import flatten
from keel.config.schema import Spec, TrackingSpec, not_computed, resolved_spec
from keel.core.client_state import ClientStates
from keel.core.records import COMPLETE, Environment, Record, Summary
from keel.core.selection import BestModel, kept_best
from keel.core.training_state import TrainingState
from keel.errors import DamagedFile, KeelError, explain
from keel.runs import validation
from keel.runs.checkpoint import (
    load_checkpoint,
    load_observed,
    previous_of,
    protect_rows,
    record_of,
    save_checkpoint,
)
from keel.runs.files import is_regular, make_folders, sync, temporary_of, write_atomic, write_synced
from keel.runs.manifest import FILE as MANIFEST
from keel.runs.manifest import Manifest
from keel.runs.model_record import FILE as MODEL
from keel.runs.model_record import FROZEN, INITIAL, ModelRecord
from keel.runs.sealed import NOT_A_FILE, complete_lines, content, damaged, opened, read_sealed, seal, seal_of

FORMAT = 2
"""Of the folder, in environment.json: 2 has checksums. Folders of earlier versions have no number."""

START_FILES = ("spec.toml", "environment.json", "data.json", MODEL, FROZEN, INITIAL)
"""What a run may write when it starts; the manifest has their checksums."""

Line = TypeVar("Line")

log = logging.getLogger(__name__)


class RunFolder:
    """One run's folder, by its path."""

    def __init__(self, path: Path):
        self.path = path
        self.metrics, self.timings = path / "metrics.jsonl", path / "timings.jsonl"
        self.summary_file = path / "summary.json"
        self.checkpoint_file = path / "checkpoint" / "state.safetensors"
        self.previous_file = previous_of(self.checkpoint_file)
        self.clients_file = path / "checkpoint" / "clients.bin"
        self.tracking_file = path / "tracking.json"
        self.frozen_file, self.initial_file = path / FROZEN, path / INITIAL

    @classmethod
    def create(
        cls,
        path: Path,
        spec: Spec,
        environment: Environment,
        statistics: dict[str, Any] | None = None,
        model: ModelRecord | None = None,
    ) -> "RunFolder":
        """Make a new folder. It appears complete or not at all.

        Raises:
            FileExistsError: Something exists at `path`.
        """
        if path.exists():
            raise FileExistsError(f"{str(path)!r} exists")
        make_folders(path.parent)
        temporary = Path(mkdtemp(prefix=".", dir=path.parent))
        try:
            (temporary / "checkpoint").mkdir()
            write_synced(temporary / "spec.toml", [spec.to_toml().encode()])
            write_synced(temporary / "environment.json", [_json({**environment, "format": FORMAT}, indent=2)])
            if statistics is not None:
                write_synced(temporary / "data.json", [_json(statistics)])
            if model is not None:
                model.write(temporary)
            Manifest.write(temporary, [name for name in START_FILES if (temporary / name).is_file()])
            write_synced(temporary / "metrics.jsonl", [])
            write_synced(temporary / "timings.jsonl", [])
            temporary.chmod(0o755)
            sync(temporary)
            temporary.rename(path)
        except BaseException:  # also Ctrl-C: no incomplete folder stays
            rmtree(temporary, ignore_errors=True)
            raise
        sync(path.parent)
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        if not _is_unicode(path):  # safetensors could not open the checkpoints, which would count as damaged
            raise KeelError(f"run: {str(path)!r} is not valid UTF-8; give the folder another name")
        if not _is_run(path):
            raise KeelError(f"run: {str(path)!r} is not a run folder (it has no spec.toml)")
        return cls(path)

    @property
    def manifest(self) -> Manifest | None:
        """The checksums of the folder's files; None in folders of earlier versions."""
        manifest, environment = Manifest.read(self.path), self.path / "environment.json"
        if manifest is None and os.path.lexists(environment) and "format" in validation.read_environment(environment):
            raise damaged(self.path / MANIFEST, "it is missing")
        return manifest

    def checked(self, name: str) -> Path:
        """A file that is written when a run starts.

        Raises:
            DamagedFile: It does not have the content that was written.
        """
        if manifest := self.manifest:
            manifest.check(self.path / name)
        return self.path / name

    def replace(self, name: str, content: bytes) -> None:
        """Replace a file that was written when the run started."""
        manifest = self.manifest
        if manifest is None:
            write_atomic(self.path / name, [content])
        else:
            manifest.replace(self.path / name, content, content.decode() if name == "spec.toml" else None)

    @property
    def table(self) -> dict[str, Any]:
        """The resolved spec as a table. What does not change a result may have been edited."""
        file, manifest = self.path / "spec.toml", self.manifest
        table = validation.read_table(file)
        if manifest is not None:
            try:
                manifest.check(file)
            except DamagedFile:
                if changed := _changed_fields(table, tomllib.loads(manifest.spec)):
                    raise damaged(file, f"{changed[0]} is not what the run started with") from None
                try:
                    TrackingSpec.model_validate(table.get("tracking", {}))
                except ValidationError as error:
                    raise damaged(file, explain(error, "tracking")) from None
        return table

    @property
    def spec(self) -> Spec:
        try:
            return resolved_spec(self.table)
        except DamagedFile:
            raise
        except KeelError as error:
            raise KeelError(f"{str(self.path / 'spec.toml')!r}: {error}") from None

    @property
    def engine(self) -> str:
        """The engine that was chosen when the run started; a resumed run keeps it."""
        return self.environment["engine"]

    @property
    def title(self) -> str:
        """The algorithm's name as people write it."""
        return self.environment["title"]

    @property
    def environment(self) -> Environment:
        return validation.read_environment(self.checked("environment.json"))

    @property
    def client_statistics(self) -> dict[str, Any] | None:
        """Sizes and label distributions of the clients, if the run recorded them."""
        return validation.read_statistics(self.checked("data.json")) if self._has("data.json") else None

    @property
    def model(self) -> ModelRecord | None:
        """The class of the model and the names of its tensors; None in folders of earlier versions."""
        return ModelRecord.read(self.checked(MODEL).parent) if self._has(MODEL) else None

    def frozen_tensors(self) -> dict[str, Tensor]:
        """The model's tensors that training does not change."""
        return load_file(self.checked(FROZEN)) if self._has(FROZEN) else {}

    def _has(self, name: str) -> bool:
        """Whether the run has the file, or had it when it started."""
        manifest = self.manifest
        return (self.path / name).is_file() if manifest is None else name in manifest.files

    @property
    def summary(self) -> Summary | None:
        """How the run ended; None while it has not."""
        return validation.read_summary(self.summary_file, self.manifest is not None)

    @property
    def ended(self) -> bool:
        """Whether the run finished, stopped or diverged, so that no round is left."""
        summary = self.summary
        return summary is not None and summary["status"] != "interrupted"

    def misplaced(self) -> dict[Path, str]:
        """What is in the place of a file that a run replaces, or of its temporary file, and what is wrong with it."""
        files = [self.path / "spec.toml", self.path / MANIFEST, self.metrics, self.timings]
        files += [self.summary_file, self.tracking_file]
        checkpoints = self.checkpoint_file.parent
        if os.path.lexists(checkpoints) and not checkpoints.is_dir():
            return {checkpoints: "it is not a folder", **_not_files(files)}
        return _not_files([*files, self.checkpoint_file, self.previous_file, self.clients_file])

    def check_places(self) -> None:
        """Raise a KeelError unless all files that a resumed run writes can be files of this folder."""
        for path, reason in self.misplaced().items():
            raise damaged(path, reason, self.path)
        self.check_links()

    def check_links(self) -> None:
        """Raise a KeelError if what is written in place would change another folder."""
        for path in self.checkpoint_file.parent, self.clients_file:
            if path.is_symlink() and path.exists():
                raise KeelError(f"run: {str(path)!r} must not be a link; replace it by a copy of what it leads to")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from writing to the folder."""
        lock = self.path / ".lock"
        if os.path.lexists(lock) and not is_regular(lock):
            raise KeelError(f"run: {str(lock)!r} must be a file, which processes lock; remove what is in its place")
        try:
            with FileLock(lock, timeout=0):
                yield
        except Timeout:
            raise KeelError(f"run: {str(self.path)!r} is being written by another process") from None

    def is_being_written(self) -> bool:
        """Whether another process has locked the folder."""
        if not is_regular(self.path / ".lock"):
            return False
        try:
            with self.locked():
                return False
        except KeelError:
            return True
        except OSError:  # it cannot be written at all
            return False

    def append(self, record: Record, seconds: float) -> None:
        plain = {key: _plain(value, key) for key, value in record.items()}
        for file, line in (self.metrics, plain), (self.timings, {"round": record["round"], "seconds": seconds}):
            with file.open("ab") as stream:
                stream.write(seal(line))

    def records(self) -> list[Record]:
        """A record per round.

        Raises:
            DamagedFile: A line is damaged or missing.
        """
        return self._complete(self.metrics, validation.read_records)

    def seconds(self) -> list[float]:
        """The wall-clock time of each round."""
        return self._complete(self.timings, validation.read_seconds)

    def _complete(self, file: Path, read: Callable[[Path, bool], list[Line]]) -> list[Line]:
        """The lines of a log, if there are as many as the summary counts."""
        summary = self.summary  # before the lines: a run may be writing both
        sealed = self.manifest is not None
        lines = read(file, sealed)
        if summary is not None and len(lines) != summary.get("rounds", len(lines)):
            raise damaged(file, f"it has {len(lines)} lines, but the run {summary['rounds']} rounds")
        if summary is not None and sealed:
            self._check_end(file, summary)
        return lines

    def _check_end(self, file: Path, summary: Summary) -> None:
        """Raise a DamagedFile unless a log ends as it did when the summary was written."""
        lines, _, rest = content(file).rpartition(b"\n")
        if rest:
            raise damaged(file, "it has bytes after its last line")
        last = seal_of(lines.rpartition(b"\n")[2])
        if file == self.metrics and summary.get("record_crc32", last) != last:
            raise damaged(file, f"its last record is not that of {self.summary_file.name}")

    def save(self, state: TrainingState) -> None:
        """Write a checkpoint."""
        self._sync_logs()
        save_checkpoint(self.checkpoint_file, state, self._record_sum(state.round))

    def _record_sum(self, round: int) -> str:
        """The checksum of a round's record; empty if there is none. The log may be too long to be held in memory."""
        with opened(self.metrics) as lines:
            line = next(islice(lines, round - 1, round), b"") if round > 0 else b""
        return seal_of(line) if line.endswith(b"\n") else ""

    def load(self, file: Path, clients: ClientStates) -> TrainingState | None:
        """The state of one of the two checkpoints; None if it does not exist.

        Raises:
            DamagedFile: It is not what was written, or it is of another run.
        """
        state = load_checkpoint(file, clients)
        if state is not None:
            self.check_record(file)
        return state

    def check_record(self, file: Path) -> None:
        """Raise a DamagedFile if the run has another record of the round of a checkpoint."""
        round, record = record_of(file)
        if record and self._record_sum(round) not in ("", record):
            raise damaged(file, f"it is not of this run, which has another record of round {round}", self.path)

    def _sync_logs(self) -> None:
        """Wait until the lines of all rounds are on disk, before a checkpoint or a summary counts them."""
        for file in (self.metrics, self.timings):
            sync(file)

    def checkpoint(self, clients: ClientStates | None = None) -> TrainingState | None:
        """The state of the last checkpoint, or None; the client states are restored into `clients`."""
        clients = ClientStates(self.clients_file) if clients is None else clients
        state = self.load(self.checkpoint_file, clients)
        return self.load(self.previous_file, clients) if state is None else state

    def final_state(self) -> TrainingState:
        """The state at the end of a run that has ended."""
        state = self.load(self.checkpoint_file, ClientStates(self.clients_file))
        if state is None:
            raise self.no_checkpoint()
        summary = self.summary
        if summary is not None and summary["status"] in COMPLETE and summary["rounds"] != state.round:
            raise damaged(self.checkpoint_file, f"it is of round {state.round}, not {summary['rounds']}", self.path)
        return state

    def no_checkpoint(self) -> KeelError:
        """The error for a run without a checkpoint, and so without a trained model."""
        path = quote(str(self.path))
        if not self.ended:
            return KeelError(f"run: {str(self.path)!r} has no checkpoint yet; wait for one, or use keel resume {path}")
        return damaged(self.checkpoint_file, "it is missing", self.path)

    def restore(self, clients: ClientStates) -> TrainingState | None:
        """The state of the last intact checkpoint; the records of later rounds are removed.

        Raises:
            DamagedFile: No checkpoint is intact, or a log has lost rounds that the checkpoints count.
        """
        self.checkpoint_file.parent.mkdir(exist_ok=True)
        state = self._intact_checkpoint(clients)
        self.check_logs(state.round if state else 0)
        if state and state.round and self.records()[state.round - 1].get("diverged"):
            for file in (self.checkpoint_file, self.previous_file):  # nothing continues from a model that diverged
                file.unlink(missing_ok=True)
            state = None
        rounds = state.round if state else 0
        self.summary_file.unlink(missing_ok=True)
        sync(self.path)  # before lines are removed that the summary counts
        for file in (self.metrics, self.timings):
            write_atomic(file, [line + b"\n" for line in complete_lines(file)[:rounds]])
        return state

    def check_logs(self, rounds: int) -> None:
        """Raise a DamagedFile unless both logs have intact lines of the rounds that a checkpoint counts."""
        for file, lines in (self.metrics, len(self.records())), (self.timings, len(self.seconds())):
            if lines < rounds:
                raise damaged(file, f"it has {lines} lines, but the checkpoint {rounds} rounds")

    def _intact_checkpoint(self, clients: ClientStates) -> TrainingState | None:
        """The last checkpoint, or the one before it if the last one is damaged."""
        try:
            state = self.load(self.checkpoint_file, clients)
            clients.verify()
        except DamagedFile as error:
            state = self.load(self.previous_file, clients)
            if state is None:
                raise
            clients.verify()
            log.warning("keel: %s; the run continues from the checkpoint before it, of round %d", error, state.round)
            self.previous_file.replace(self.checkpoint_file)
            sync(self.checkpoint_file.parent)
            return state
        if state is None:  # a kill while the last one was written
            return self.load(self.previous_file, clients)
        try:
            protect_rows(self.previous_file, clients)
        except DamagedFile as error:
            log.warning("keel: %s; it is removed, the last checkpoint is intact", error)
            self.discard_previous()
        return state

    def discard_previous(self) -> None:
        """Remove the checkpoint before the last one: the run has ended."""
        self.previous_file.unlink(missing_ok=True)

    @property
    def tracker_ids(self) -> dict[str, str]:
        """The run's identifier in each tracker that logs it."""
        return read_sealed(self.tracking_file, self.manifest is not None) if self.tracking_file.exists() else {}

    def save_tracker_id(self, tracker: str, identifier: str) -> None:
        """Store the identifier by which a resumed run continues in this tracker."""
        write_atomic(self.tracking_file, [seal({**self.tracker_ids, tracker: identifier})])

    def finish(self, summary: Summary) -> None:
        self._sync_logs()
        lines = complete_lines(self.metrics)
        last = seal_of(lines[-1]) if lines else ""
        write_atomic(self.summary_file, [seal({**summary, "record_crc32": last}, indent=2)])


def best_model(folder: RunFolder) -> BestModel | None:
    """The best model by the primary metric that a run with `evaluation.select` has kept so far, or None.

    It is unpacked as theta, buffers, round, value.
    """
    return kept_best(load_observed(folder.checkpoint_file))


def _is_unicode(path: Path) -> bool:
    """Whether the absolute path is valid UTF-8."""
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_run(path: Path) -> bool:
    """Whether it is a run folder, perhaps one that has lost its spec."""
    return (path / "spec.toml").is_file() or (path / MANIFEST).is_file()


def _not_files(files: list[Path]) -> dict[Path, str]:
    """The files, and the names under which they are written, that are pipes, folders or broken links."""
    names = [name for file in files for name in (file, temporary_of(file))]
    return {name: NOT_A_FILE for name in names if os.path.lexists(name) and not name.is_file()}


def _json(value: Any, indent: int | None = None) -> bytes:
    return (json.dumps(value, indent=indent) + "\n").encode()


def _plain(value: Any, key: str) -> Any:
    """A value of a record as JSON: scalars of NumPy and PyTorch as numbers, None for what is not finite."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each, key) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, key) for each in value]
    if isinstance(value, np.generic | Tensor | np.ndarray) and value.ndim == 0:
        value = value.item()
    if isinstance(value, float) and not isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise KeelError(f"record[{key!r}] must be a number, a text or a list of them (got {type(value).__name__})")


def _changed_fields(table: dict[str, Any], started: dict[str, Any]) -> list[str]:
    """The fields that differ between two specs, without those that do not change a result."""
    now, before = (flatten({k: v for k, v in each.items() if k not in not_computed(each)}) for each in (table, started))
    return sorted(name for name in now.keys() | before.keys() if now.get(name) != before.get(name))
