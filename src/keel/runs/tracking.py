"""Experiment trackers: logs the numbers of metrics.jsonl to TensorBoard, Weights & Biases and MLflow.

metrics.jsonl stays the record. A tracker does not change a run: if one fails, a warning names it and the run continues
without it.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from re import fullmatch
from secrets import token_hex
from shlex import quote
from shutil import rmtree
from time import monotonic, time
from typing import Any, Protocol

from filelock import FileLock

from keel.config.overrides import flatten
from keel.config.schema import Spec, TrackingSpec
from keel.core.observers import Hook
from keel.core.records import COMPLETE, Record, Summary
from keel.errors import KeelError
from keel.runs.files import sqlite_address
from keel.runs.folder import RunFolder

Scalars = dict[str, float]

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """One run in one tracker, new or continued."""

    logged: int
    """The last round that the tracker has. A resumed run is bit-identical, so the logged rounds stay correct."""

    def log(self, step: int, scalars: Scalars) -> None: ...

    def close(self, summary: Summary | None) -> None:
        """End the run with its summary, or with None if it was interrupted by an error."""


def check_trackers(spec: TrackingSpec) -> None:
    """Raise a KeelError unless each tracker of the spec is installed and configured."""
    for name in spec.to:
        package = find_spec(name)
        if package is None or package.origin is None:  # without an origin it is a folder of that name, as wandb makes
            raise KeelError(f"tracking.to = {name!r} requires its package: pip install 'keel-fl[{name}]'")
    if "wandb" in spec.to and _wandb_mode(spec) == "online":
        import wandb

        if wandb.run is None and not wandb.login(prompt=False):
            raise KeelError("tracking.to = 'wandb' requires wandb login, or tracking.wandb_mode = 'offline'")


@contextmanager
def tracked(folder: RunFolder, spec: Spec) -> Iterator[Hook]:
    """A hook that logs each round to every tracker of the spec, after the rounds before a resume."""
    trackers: dict[str, Tracker] = {}

    def for_each(act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(trackers.items()):
            try:
                act(tracker)
            except Exception as error:  # no failure of a tracker may stop the run
                del trackers[name]
                log.warning(
                    "keel: %s failed (%s); the run continues without it, metrics.jsonl is complete",
                    name,
                    _reason(error),
                )

    def log_record(record: Record, *_: object) -> None:
        step, numbers = record["round"], scalars(record)
        for_each(lambda tracker: tracker.log(step, numbers) if step > tracker.logged else None)

    try:
        for name in dict.fromkeys(spec.tracking.to):
            trackers[name] = _start(name, folder, spec)
        for record in folder.records() if trackers else []:
            log_record(record)
        yield log_record
    finally:
        for_each(lambda tracker: tracker.close(folder.summary))


def scalars(record: Record) -> Scalars:
    """The numbers of a record by their names in metrics.jsonl.

    Those of the classes are class_accuracy/0 and so on, those over clients clients/mean and so on.
    """
    nested = {f"class_accuracy/{i}": value for i, value in enumerate(record.get("class_accuracy", []))}
    if isinstance(clients := record.get("clients"), dict):
        nested |= {f"clients/{name}": value for name, value in clients.items()}
    return _numbers({**record, **nested}, but="round")


def _numbers(table: Mapping[str, Any], but: str = "") -> Scalars:
    return {name: value for name, value in table.items() if type(value) in (int, float) and name != but}


def _start(name: str, folder: RunFolder, spec: Spec) -> Tracker:
    try:
        return TRACKERS[name](folder, spec)
    except Exception as error:
        resume = f"keel resume {quote(str(folder.path))}"
        fix = f"fix it or remove it from {str(folder.path / 'spec.toml')!r}, then {resume}"
        raise KeelError(f"tracking.to: {name!r} does not start ({_reason(error)}); {fix}") from error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class TensorBoard:
    """Event files in the run's folder. A resumed run logs all rounds again, and purges those logged before."""

    logged = 0

    def __init__(self, folder: RunFolder, spec: Spec):
        from torch.utils.tensorboard import SummaryWriter

        path = folder.path / "tensorboard"
        new = not path.exists()
        self.writer = SummaryWriter(str(path), purge_step=0, flush_secs=10)
        if new:
            self._text("spec", spec.to_toml(), 0)
            self.writer.flush()

    def log(self, step: int, scalars: Scalars) -> None:
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, step)

    def close(self, summary: Summary | None) -> None:
        if summary is not None:
            text = "\n".join(f"{name} = {value}" for name, value in summary.items())
            self._text("summary", text, summary["rounds"])
        self.writer.close()

    def _text(self, name: str, text: str, step: int) -> None:
        """Log text verbatim: four spaces mark a code block in Markdown."""
        self.writer.add_text(name, "\n".join(f"    {line}" for line in text.splitlines()), step)


class WeightsAndBiases:
    """A run of wandb, stored below the run's folder until it is uploaded.

    wandb cannot continue an offline run: it is written again from the first round, under the same id.
    """

    def __init__(self, folder: RunFolder, spec: Spec):
        import wandb

        mode = _wandb_mode(spec.tracking)
        if (identifier := folder.tracker_ids.get("wandb")) is None:
            folder.save_tracker_id("wandb", identifier := token_hex(8))
        if not fullmatch("[0-9a-f]{16}", identifier):  # it names a folder that is removed
            raise KeelError(f"{identifier!r} is not a run id")
        for earlier in (folder.path / "wandb").glob(f"offline-run-*-{identifier}"):
            rmtree(earlier)
        self.run = wandb.init(
            project=spec.tracking.project,
            name=folder.path.name,
            id=identifier,
            resume="allow" if mode == "online" else None,
            config=spec.experiment,
            dir=str(folder.path),
            mode=mode,  # type: ignore[arg-type]  # or the environment variable's, which wandb checks
            reinit="create_new",  # a run that the user has open stays open
            settings=wandb.Settings(silent=True, console="off"),
        )
        self.logged = self.run.starting_step - 1

    def log(self, step: int, scalars: Scalars) -> None:
        self.run.log(scalars, step=step)

    def close(self, summary: Summary | None) -> None:
        self.run.summary.update({f"summary.{name}": value for name, value in (summary or {}).items()})
        self.run.finish(exit_code=0 if summary is not None and summary["status"] in COMPLETE else 1)


def _wandb_mode(spec: TrackingSpec) -> str:
    return spec.wandb_mode or os.environ.get("WANDB_MODE", "online")


class MLflow:
    """A run of MLflow on the server that MLFLOW_TRACKING_URI names, else in mlflow.db next to the run's folder."""

    BATCH = 1000
    """The most metrics that MLflow accepts in one request."""
    SECONDS = 1.0
    """The interval between two requests: one takes as long as a small round."""

    def __init__(self, folder: RunFolder, spec: Spec):
        from mlflow import MlflowClient
        from mlflow.entities import Param

        parent = folder.path.absolute().parent
        with _quiet("mlflow"), FileLock(parent / ".mlflow.lock"):  # two processes cannot create one database
            self.client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or sqlite_address(parent / "mlflow.db"))
        self.logged = 0
        if (identifier := folder.tracker_ids.get("mlflow")) is None:
            made = self.client.create_run(self._experiment(spec.tracking.project), run_name=folder.path.name)
            self.id = made.info.run_id
            params = [Param(name, str(value)) for name, value in flatten(spec.experiment).items()]
            self.client.log_batch(self.id, params=params)
            folder.save_tracker_id("mlflow", self.id)
        else:
            self.id = identifier
            self.client.update_run(self.id, status="RUNNING")
            self.logged = max((m.step for m in self.client.get_metric_history(self.id, "bytes_up")), default=0)
        self.waiting: list[Any] = []
        self.due = monotonic() + self.SECONDS

    def _experiment(self, project: str) -> str:
        from mlflow.exceptions import MlflowException

        try:
            return self.client.create_experiment(project)
        except MlflowException:  # it exists, perhaps created this moment by another process
            experiment = self.client.get_experiment_by_name(project)
            if experiment is None:
                raise
            return experiment.experiment_id

    def log(self, step: int, scalars: Scalars) -> None:
        metrics = self._metrics(step, scalars)
        if monotonic() > self.due or len(self.waiting) + len(metrics) > self.BATCH:
            self._send()
        self.waiting += metrics

    def close(self, summary: Summary | None) -> None:
        status = "KILLED"
        if summary is not None:
            numbers = _numbers(summary)
            self.waiting += self._metrics(summary["rounds"], {f"summary.{k}": v for k, v in numbers.items()})
            for name in ("status", "engine", "model_sha256"):
                self.client.set_tag(self.id, f"summary.{name}", summary[name])
            status = {**dict.fromkeys(COMPLETE, "FINISHED"), "diverged": "FAILED"}.get(summary["status"], status)
        self._send()
        self.client.set_terminated(self.id, status)

    def _metrics(self, step: int, scalars: Scalars) -> list[Any]:
        from mlflow.entities import Metric

        now = int(1000 * time())
        return [Metric(name, value, now, step) for name, value in scalars.items()]

    def _send(self) -> None:
        """Send complete records: a resumed run finds all of a round or nothing."""
        self.client.log_batch(self.id, metrics=self.waiting)
        self.waiting = []
        self.due = monotonic() + self.SECONDS


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Silence what a library logs while it is set up."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


TRACKERS: dict[str, Callable[[RunFolder, Spec], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}
