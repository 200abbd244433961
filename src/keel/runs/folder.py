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
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from shlex import quote
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from safetensors.torch import load_file
from torch import Tensor

from keel.config.overrides import read_spec
from keel.config.schema import Spec, resolved_spec
from keel.core.client_state import ClientStates
from keel.core.records import Environment, Record, Summary
from keel.core.selection import BestModel, kept_best
from keel.core.training_state import TrainingState
from keel.errors import KeelError
from keel.runs.checkpoint import load_checkpoint, load_observed, save_checkpoint
from keel.runs.files import sync, write_atomic, write_synced
from keel.runs.model_record import FROZEN, INITIAL, ModelRecord


class RunFolder:
    """One run's folder, by its path."""

    def __init__(self, path: Path):
        self.path = path
        self.metrics, self.timings = path / "metrics.jsonl", path / "timings.jsonl"
        self.summary_file = path / "summary.json"
        self.checkpoint_file = path / "checkpoint" / "state.safetensors"
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
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(mkdtemp(prefix=".", dir=path.parent))
        try:
            (temporary / "checkpoint").mkdir()
            write_synced(temporary / "spec.toml", [spec.to_toml().encode()])
            write_synced(temporary / "environment.json", [_json(environment, indent=2)])
            if statistics is not None:
                write_synced(temporary / "data.json", [_json(statistics)])
            if model is not None:
                model.write(temporary)
            write_synced(temporary / "metrics.jsonl", [])
            write_synced(temporary / "timings.jsonl", [])
            temporary.chmod(0o755)
            temporary.rename(path)
        except BaseException:  # also Ctrl-C: no incomplete folder stays
            rmtree(temporary, ignore_errors=True)
            raise
        sync(path.parent)
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        if not (path / "spec.toml").is_file():
            raise KeelError(f"run: {str(path)!r} is not a run folder (it has no spec.toml)")
        return cls(path)

    @property
    def table(self) -> dict[str, Any]:
        """The resolved spec as a table."""
        return read_spec(self.path / "spec.toml")

    @property
    def spec(self) -> Spec:
        try:
            return resolved_spec(self.table)
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
        environment: Environment = json.loads((self.path / "environment.json").read_text(encoding="utf-8"))
        return environment

    @property
    def client_statistics(self) -> dict[str, Any] | None:
        """Sizes and label distributions of the clients, if the run recorded them."""
        file = self.path / "data.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None

    @property
    def model(self) -> ModelRecord | None:
        """The class of the model and the names of its tensors; None in folders of earlier versions."""
        return ModelRecord.read(self.path)

    def frozen_tensors(self) -> dict[str, Tensor]:
        """The model's tensors that training does not change."""
        return load_file(self.frozen_file) if self.frozen_file.is_file() else {}

    @property
    def summary(self) -> Summary | None:
        """How the run ended; None while it has not."""
        return json.loads(self.summary_file.read_text(encoding="utf-8")) if self.summary_file.is_file() else None

    @property
    def ended(self) -> bool:
        """Whether the run finished, stopped or diverged, so that no round is left."""
        summary = self.summary
        return summary is not None and summary["status"] != "interrupted"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from writing to the folder."""
        try:
            with FileLock(self.path / ".lock", timeout=0):
                yield
        except Timeout:
            raise KeelError(f"run: {str(self.path)!r} is being written by another process") from None

    def append(self, record: Record, seconds: float) -> None:
        plain = {key: _plain(value, key) for key, value in record.items()}
        for file, line in (self.metrics, plain), (self.timings, {"round": record["round"], "seconds": seconds}):
            with file.open("ab") as stream:
                stream.write(_json(line))

    def records(self) -> list[Record]:
        return _lines(self.metrics)

    def seconds(self) -> list[float]:
        """The wall-clock time of each round."""
        return [line["seconds"] for line in _lines(self.timings)]

    def save(self, state: TrainingState) -> None:
        """Write a checkpoint."""
        for file in (self.metrics, self.timings):
            sync(file)  # the lines of a round are on disk before a checkpoint counts it
        save_checkpoint(self.checkpoint_file, state)

    def checkpoint(self, clients: ClientStates | None = None) -> TrainingState | None:
        """The state of the last checkpoint, or None; the client states are restored into `clients`."""
        return load_checkpoint(self.checkpoint_file, ClientStates(self.clients_file) if clients is None else clients)

    def final_state(self) -> TrainingState:
        """The state at the end of a run that has ended."""
        state = self.checkpoint()
        if state is None:
            raise self.no_checkpoint()
        return state

    def no_checkpoint(self) -> KeelError:
        """The error for a run without a checkpoint, and so without a trained model."""
        path = quote(str(self.path))
        if not self.ended:
            return KeelError(f"run: {str(self.path)!r} has no checkpoint yet; wait for one, or use keel resume {path}")
        return KeelError(
            f"run: {str(self.path)!r} has ended, but its checkpoint is missing; restore {self.checkpoint_file}, or "
            f"delete summary.json and train again from round 1 with keel resume {path}"
        )

    def restore(self, clients: ClientStates) -> TrainingState | None:
        """The state of the last checkpoint; the records of later rounds are removed."""
        state = self.checkpoint(clients)
        for file in (self.metrics, self.timings):
            kept = [line for line in _lines(file) if line["round"] <= (state.round if state else 0)]
            write_atomic(file, map(_json, kept))
        self.summary_file.unlink(missing_ok=True)
        return state

    @property
    def tracker_ids(self) -> dict[str, str]:
        """The run's identifier in each tracker that logs it."""
        return json.loads(self.tracking_file.read_text(encoding="utf-8")) if self.tracking_file.is_file() else {}

    def save_tracker_id(self, tracker: str, identifier: str) -> None:
        """Store the identifier by which a resumed run continues in this tracker."""
        write_atomic(self.tracking_file, [_json({**self.tracker_ids, tracker: identifier})])

    def finish(self, summary: Summary) -> None:
        write_atomic(self.summary_file, [_json(summary, indent=2)])


def best_model(folder: RunFolder) -> BestModel | None:
    """The best model by the primary metric that a run with `evaluation.select` has kept so far, or None.

    It is unpacked as theta, buffers, round, value.
    """
    return kept_best(load_observed(folder.checkpoint_file))


def read_runs(paths: list[Path]) -> list[RunFolder]:
    """The run folders among `paths` and below them, without hidden folders."""
    folders = []
    for path in paths:
        below = [path]
        if not (path / "spec.toml").is_file():
            found = sorted(spec.parent for spec in path.rglob("spec.toml"))
            below = [p for p in found if not any(part.startswith(".") for part in p.relative_to(path).parts)]
        folders += [RunFolder.open(p) for p in below or [path]]
    return folders


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


def _lines(file: Path) -> list[Any]:
    """The complete lines: a kill can truncate the last one."""
    text = file.read_text(encoding="utf-8")
    try:
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    except json.JSONDecodeError as error:
        raise KeelError(f"run: {str(file)!r} is damaged: a line of it is not JSON ({error})") from None
