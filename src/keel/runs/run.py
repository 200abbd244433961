"""Runs an experiment into a folder, and goes on with one that was stopped."""

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from math import isfinite
from pathlib import Path
from shlex import quote
from statistics import fmean
from time import monotonic
from typing import Any

import torch
from torch import nn

from keel.algorithms import Algorithm
from keel.data.federated import FederatedData
from keel.data.holdings import holdings
from keel.errors import KeelError
from keel.params import Loss, fingerprint, state_fingerprint
from keel.rounds import Hook, Position, Record, Training
from keel.runs.folder import RunFolder, environment
from keel.runs.room import CHECKPOINT_ROUNDS, Room, check_room
from keel.runs.spec import CUSTOM, Spec, make_spec, read_spec, resolved_spec, split_of
from keel.runs.tracking import check_trackers, tracked
from keel.task import default_loss, make_task

CHECKPOINT_SECONDS = 10.0
"""What a kill can cost at the most, besides the round it hits and unless saving takes long."""
SAVING_SHARE = 20
"""A save is followed by at least so many times the time it took, so that saving stays a small part of a run."""


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

    def _repr_html_(self) -> str:
        """What a notebook shows: the curve and the numbers."""
        from keel.reporting.notebook import run_html  # a run that nobody looks at needs nothing of it

        return run_html(RunFolder(self.path), self.summary)


def run(
    spec: Spec | Mapping[str, Any] | str | Path | None = None,
    *,
    model: nn.Module | None = None,
    data: FederatedData | None = None,
    algorithm: Algorithm | None = None,
    loss: Loss | None = None,
    out: str | Path | None = None,
    hooks: Sequence[Hook] = (),
    workers: int | None = None,
    stop: Callable[[], bool] = lambda: False,
    announce: Callable[[Room], None] | None = None,
) -> Run:
    """Runs the experiment that `spec` describes (a Spec, a table, a TOML file) into a new folder.

    A model, data, algorithm or loss that is passed takes the place of the one the spec names. The model's
    parameters as they are now are the initial ones. `announce` (print would do) hears what the run can take, in RAM
    and on disk, before anything is written. `stop` is asked after each round whether to leave it at that, as Ctrl-C
    does.
    """
    spec = _as_spec(spec, model, data, algorithm)
    check_trackers(spec.tracking)
    training = Training(spec, make_task(spec, module=model, data=data, loss=loss), workers)
    room = check_room(training, Path("runs" if out is None else out))
    if announce is not None:
        announce(room)
    folder = create(spec, training, None if out is None else Path(out))
    with folder.locked():
        return go(folder, training, training.start(folder.memory_file), hooks, stop)


def resume(
    path: str | Path,
    *,
    model: nn.Module | None = None,
    data: FederatedData | None = None,
    algorithm: Algorithm | None = None,
    loss: Loss | None = None,
    address: str | None = None,
    hooks: Sequence[Hook] = (),
    workers: int | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Run:
    """Goes on where a run was stopped, to the same bits as if it never had been. A finished run stays as it is.

    What was passed in Python when it began has to be passed again, and is checked to be the same. With an `address`
    it goes on there, on a Ray cluster.
    """
    folder = RunFolder.open(Path(path))
    table, known = folder.table, folder.environment
    if folder.engine == "flower":
        raise KeelError(f"run: {str(path)!r} is of a federation; accepted: flwr run with the same federation.out")
    for kind, value in ("model", model), ("data", data), ("algorithm", algorithm), ("loss", loss):
        own = known["loss"] == CUSTOM if kind == "loss" else table[kind]["name"] == CUSTOM
        if own and value is None:
            raise KeelError(f"{kind}: this run was given its own in Python; accepted: keel.resume(..., {kind}=...)")
    spec = resolved_spec({**table, "algorithm": algorithm} if algorithm else table)
    chosen = {"name": folder.engine, "device": known.get("device", "cpu"), "layout": known.get("layout")}
    if address is not None:
        chosen |= {"address": address, "name": "cohort" if folder.engine == "cohort" else "ray"}
    elif folder.engine in ("serial", "pool"):  # a run that a slot of a cluster began goes on without one
        chosen |= {"address": None, "gpus": None}
    check_trackers(spec.tracking)
    spec = spec.model_copy(update={"engine": spec.engine.model_copy(update=chosen)})
    with folder.locked():
        training = Training(spec, make_task(spec, module=model, data=data, loss=loss), workers)
        check_same(known, training)
        if folder.ended:
            return result(folder, training, folder.saved_position() or training.start())
        position = folder.restore(training.memories(folder.memory_file))
        return go(folder, training, position or training.start(folder.memory_file), hooks, stop)


def ensure(
    spec: Spec,
    path: Path,
    hooks: Sequence[Hook] = (),
    workers: int | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Run:
    """The run of `spec` in `path`: made, gone on with or found finished; with so many workers, if it has any."""
    if existing(spec, path) is None:
        return run(spec, out=path, hooks=hooks, workers=workers, stop=stop)
    return resume(path, hooks=hooks, workers=workers, stop=stop)


def existing(spec: Spec, path: Path) -> RunFolder | None:
    """The folder of the run of `spec` in `path`, however far it came; None where there is nothing."""
    if not path.exists():
        return None
    folder = RunFolder.open(path)
    if folder.spec.identity != spec.identity:
        raise KeelError(
            f"out: {str(path)!r} holds a run of another spec; accepted: another folder (--out), or none there"
        )
    for what, value in environment().items():
        if what in ("keel", "source_sha256", "torch", "numpy") and folder.environment[what] != value:
            raise KeelError(f"out: {str(path)!r} was made by another version ({what}); accepted: another folder")
    return folder


def create(spec: Spec, training: Training, path: Path | None, more: Mapping[str, Any] | None = None) -> RunFolder:
    """The folder at `path`, or a telling name below runs/ that is not taken; `more` is known of its surroundings."""
    known = {
        "engine": training.engine.name,
        "device": str(training.device),
        "layout": training.task.layout,
        "workers": training.workers,
        "title": spec.algorithm.title,
        **_fingerprints(training),
        **environment(),
        **(more or {}),
    }
    told = {**holdings(training.task.data), "split": split_of(spec.data)}
    if path is not None:
        try:
            return RunFolder.create(path, spec, known, told)
        except FileExistsError:
            raise KeelError(f"out: {str(path)!r} exists; accepted: a new folder, or keel resume {path}") from None
    for number in count(1):
        try:
            return RunFolder.create(Path("runs") / (spec.label + f"-{number}" * (number > 1)), spec, known, told)
        except FileExistsError:  # taken, perhaps this moment by another process
            continue
    raise AssertionError("count() does not end")


def check_same(known: Mapping[str, Any], training: Training) -> None:
    """Whether a training is on the task that a run began with."""
    for what, value in _fingerprints(training).items():
        if known[what] != value:
            raise KeelError(f"{what}: {value!r}, but this run began with {known[what]!r}; accepted: what it began with")


def _fingerprints(training: Training) -> dict[str, Any]:
    """What tells whether two trainings are on the same task, also where parts of it were passed in Python."""
    task = training.task
    known_loss = task.loss is default_loss(task.data)
    return {
        "loss": "cross entropy" if known_loss else CUSTOM,
        "parameters": training.parameters,
        "initial_sha256": state_fingerprint(task.module),
        "examples_sha256": task.data.fingerprint(),
        "partition_sha256": task.data.partition.fingerprint(),
    }


def _as_spec(
    spec: Spec | Mapping[str, Any] | str | Path | None,
    model: nn.Module | None,
    data: FederatedData | None,
    algorithm: Algorithm | None,
) -> Spec:
    for name, value, kind in (
        ("model", model, nn.Module),
        ("data", data, FederatedData),
        ("algorithm", algorithm, Algorithm),
    ):
        if not isinstance(value, kind | None):
            raise KeelError(f"{name}: a {type(value).__name__}; accepted: an instance of {kind.__name__}")
    table: dict[str, Any]
    if isinstance(spec, Spec):
        if model is None and data is None and algorithm is None:
            return spec
        table = spec.model_dump(exclude_none=True)
    elif isinstance(spec, str | Path):
        table = read_spec(Path(spec))
    else:
        table = dict(spec or {})
    if model is not None:
        policy = table.get("model", {}).get("buffers")
        table["model"] = {"name": CUSTOM} | ({"buffers": policy} if policy else {})
    if data is not None:
        table["data"] = {"name": CUSTOM}
    if algorithm is not None:
        table["algorithm"] = algorithm
    return make_spec(table)


def go(
    folder: RunFolder, training: Training, position: Position, hooks: Sequence[Hook], stop: Callable[[], bool]
) -> Run:
    """Runs what is left. With clients elsewhere each round is saved, for they count on the last one; Ctrl-C is then
    for who talks to them."""
    due, saved, remote = [monotonic() + CHECKPOINT_SECONDS], [position.round], training.engine.remote
    again = "the same flwr run goes on" if remote else f"keel resume {quote(str(folder.path))}"

    def keep(record: Record, position: Position, seconds: float) -> None:
        if remote and (record.get("diverged") or not _sound(position)):
            raise KeelError(
                f"round {position.round}: the model or the server's state is not finite any more; what was trained "
                f"before it is saved: {again}"
            )
        folder.append(record, seconds)
        full = bool(position.memories) and position.round >= saved[0] + CHECKPOINT_ROUNDS
        if (remote or full or monotonic() > due[0]) and not record.get("diverged"):
            began = monotonic()
            folder.save(position)
            saved[0] = position.round
            due[0] = monotonic() + max(CHECKPOINT_SECONDS, SAVING_SHARE * (monotonic() - began))

    try:
        with tracked(folder, training.spec) as track:
            with nullcontext(threading.Event()) if remote else interruptible() as interrupted:
                status = training.run(position, [keep, track, *hooks], stop=lambda: interrupted.is_set() or stop())
            if status == "diverged":  # said first: a position that is not finite must not be gone on from
                folder.finish(summarize(folder, training, position, status))
                folder.save(position)
            else:
                folder.save(position)
                folder.finish(summarize(folder, training, position, status))
    except OSError as error:
        raise OSError(f"{error}; what was saved is kept: {again}") from error
    return result(folder, training, position)


def _sound(position: Position) -> bool:
    """Whether one can go on from it: every norm is finite."""
    tensors = [*position.server.values(), *([] if position.buffers is None else [position.buffers])]
    return all(isfinite(float(torch.linalg.vector_norm(tensor.float()))) for tensor in tensors)


def result(folder: RunFolder, training: Training, position: Position) -> Run:
    evaluator = training.engine.evaluator
    evaluator.look_at(position.server["theta"], position.buffers)
    summary = folder.summary
    assert summary is not None
    return Run(folder.path, summary, evaluator.model.module)


def summarize(folder: RunFolder, training: Training, position: Position, status: str) -> dict[str, Any]:
    records, spec = folder.records(), training.spec
    last = [r for r in records if r["round"] > spec.rounds - spec.evaluation.last and "accuracy" in r]
    evaluated = next((r for r in reversed(records) if "test_loss" in r), {})
    return {
        "status": status,
        "rounds": position.round,
        "accuracy": fmean(r["accuracy"] for r in last) if status == "finished" and last else None,
        "last_accuracy": evaluated.get("accuracy"),
        "test_loss": evaluated.get("test_loss"),
        "class_accuracy": evaluated.get("class_accuracy"),
        "bytes_down": sum(r["bytes_down"] for r in records),
        "bytes_up": sum(r["bytes_up"] for r in records),
        "seconds": round(sum(folder.seconds()), 3),
        "engine": training.engine.name,
        "seed": spec.seed,
        "parameters": training.parameters,
        "model_sha256": fingerprint(position.server["theta"], position.buffers),
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
