"""Runs an experiment into a folder, and goes on with one that was stopped."""

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from time import monotonic
from typing import Any

from torch import nn

from keel.algorithms import Algorithm
from keel.data.federated import FederatedData
from keel.errors import KeelError
from keel.params import FlatModel, Loss, fingerprint
from keel.rounds import Hook, Position, Record, Training
from keel.runs.folder import RunFolder
from keel.runs.spec import CUSTOM, Spec, make_spec, read_spec
from keel.task import make_task

CHECKPOINT_SECONDS = 10.0
"""What a kill can cost at the most, besides the round it hits."""


@dataclass(frozen=True)
class Run:
    """A run that has ended, or was stopped: its folder, its summary and its trained model."""

    path: Path
    summary: dict[str, Any]
    module: nn.Module

    @property
    def status(self) -> str:
        return self.summary["status"]

    @property
    def accuracy(self) -> float | None:
        """The average over the last rounds; None for a run that did not get there."""
        return self.summary["accuracy"]

    @property
    def records(self) -> list[Record]:
        return RunFolder(self.path).records()


def run(
    spec: Spec | Mapping[str, Any] | str | Path | None = None,
    *,
    model: nn.Module | None = None,
    data: FederatedData | None = None,
    algorithm: Algorithm | None = None,
    loss: Loss | None = None,
    out: str | Path | None = None,
    hooks: Sequence[Hook] = (),
) -> Run:
    """Runs the experiment that `spec` describes (a Spec, a table, a TOML file) into a new folder.

    A model, data, algorithm or loss that is passed takes the place of the one the spec names. The model's
    parameters as they are now are the initial ones.
    """
    spec = _as_spec(spec, model, data, algorithm)
    task = make_task(spec, module=model, data=data, loss=loss)
    training = Training(spec, task)
    folder = RunFolder.create(Path(out) if out is not None else free_path(spec), spec, training.engine.name)
    with folder.locked():
        return _go(folder, training, training.start(), hooks)


def resume(
    path: str | Path,
    *,
    model: nn.Module | None = None,
    data: FederatedData | None = None,
    loss: Loss | None = None,
    hooks: Sequence[Hook] = (),
) -> Run:
    """Goes on where a run was stopped, to the same bits as if it never had been. A finished run stays as it is."""
    folder = RunFolder.open(Path(path))
    spec = folder.spec
    for kind, name, value in ("model", spec.model.name, model), ("data", spec.data.name, data):
        if name == CUSTOM and value is None:
            raise KeelError(f"{kind}: this run was given its own in Python; accepted: keel.resume(..., {kind}=...)")
    engine = spec.engine.model_copy(update={"name": folder.engine})
    with folder.locked():
        training = Training(
            spec.model_copy(update={"engine": engine}), make_task(spec, module=model, data=data, loss=loss)
        )
        if folder.ended:
            position = folder.saved_position()
            assert position is not None, "an ended run has saved its position"
            return _result(folder, training, position)
        return _go(folder, training, folder.restore() or training.start(), hooks)


def ensure(spec: Spec, path: Path, hooks: Sequence[Hook] = ()) -> Run:
    """The run of `spec` in `path`: made, gone on with or found finished."""
    if not path.exists():
        return run(spec, out=path, hooks=hooks)
    if RunFolder.open(path).spec != spec:
        raise KeelError(f"out: {str(path)!r} holds a run of another spec; accepted: another folder")
    return resume(path, hooks=hooks)


def free_path(spec: Spec, parent: Path = Path("runs")) -> Path:
    """A telling name below `parent` that is not taken."""
    names = [spec.label, *(f"{spec.label}-{n}" for n in range(2, 10_000))]
    return next(parent / name for name in names if not (parent / name).exists())


def _as_spec(
    spec: Spec | Mapping[str, Any] | str | Path | None,
    model: nn.Module | None,
    data: FederatedData | None,
    algorithm: Algorithm | None,
) -> Spec:
    if isinstance(spec, Spec):
        table: dict[str, Any] = spec.model_dump(exclude_none=True)
    elif isinstance(spec, str | Path):
        table = read_spec(Path(spec))
    else:
        table = dict(spec or {})
    if model is not None:
        table["model"] = {"name": CUSTOM}
    if data is not None:
        table["data"] = {"name": CUSTOM}
    if algorithm is not None:
        table["algorithm"] = algorithm
    return make_spec(table)


def _go(folder: RunFolder, training: Training, position: Position, hooks: Sequence[Hook]) -> Run:
    saved = [monotonic()]

    def keep(record: Record, position: Position, seconds: float) -> None:
        folder.append(record, seconds)
        if monotonic() - saved[0] > CHECKPOINT_SECONDS:
            folder.save(position)
            saved[0] = monotonic()

    with interruptible() as interrupted:
        status = training.run(position, [keep, *hooks], stop=interrupted.is_set)
    folder.save(position)
    folder.finish(summarize(folder, training, position, status))
    return _result(folder, training, position)


def _result(folder: RunFolder, training: Training, position: Position) -> Run:
    model = FlatModel(training.task.module)
    model.weights.copy_(position.server["theta"])
    summary = folder.summary
    assert summary is not None
    return Run(folder.path, summary, model.module)


def summarize(folder: RunFolder, training: Training, position: Position, status: str) -> dict[str, Any]:
    records, spec = folder.records(), training.spec
    last = [r for r in records if r["round"] > spec.rounds - spec.evaluation.last and "accuracy" in r]
    evaluated = next((r for r in reversed(records) if "accuracy" in r), {})
    return {
        "status": status,
        "rounds": position.round,
        "accuracy": fmean(r["accuracy"] for r in last) if status == "finished" and last else None,
        "last_accuracy": evaluated.get("accuracy"),
        "test_loss": evaluated.get("test_loss"),
        "class_accuracy": evaluated.get("class_accuracy"),
        "bytes_down": sum(r["bytes_down"] for r in records),
        "bytes_up": sum(r["bytes_up"] for r in records),
        "seconds": round(folder.seconds(), 3),
        "engine": training.engine.name,
        "seed": spec.seed,
        "parameters": training.parameters,
        "model_sha256": fingerprint(position.server["theta"]),
    }


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Ctrl-C (or a polite kill) sets the event instead of breaking a round; a second one breaks."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def ask_to_stop(number: int, frame: object) -> None:
        event.set()
        signal.signal(number, before[number])

    before = {int(number): signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, ask_to_stop)
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
