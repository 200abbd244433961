"""Trackers that people already use: the numbers of metrics.jsonl told to TensorBoard, Weights & Biases and MLflow.

metrics.jsonl stays the record. A tracker changes nothing in a run: one that fails on the way is named once, and the
run goes on without it.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from re import fullmatch
from secrets import token_hex
from shlex import quote
from shutil import rmtree
from time import monotonic, time
from typing import Any, Protocol

from filelock import FileLock

from keel.errors import KeelError
from keel.rounds import Hook, Record
from keel.runs.folder import RunFolder, sqlite_address
from keel.runs.spec import Spec, TrackingSpec, flatten

Scalars = dict[str, float]
Summary = dict[str, Any]

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """One tracker's record of one run, begun or found again."""

    has: int
    """The last round that it has already. A resume gives the same bits, so what it has stays true."""

    def tell(self, step: int, scalars: Scalars) -> None: ...

    def close(self, summary: Summary | None) -> None:
        """How the run ended, or None where it was broken off."""


def check_trackers(spec: TrackingSpec) -> None:
    """Whether each tracker that is switched on has what it needs here."""
    for name in spec.to:
        found = find_spec(name)
        if found is None or found.origin is None:  # without an origin it is a folder of that name, as wandb leaves them
            raise KeelError(f"tracking.to: {name!r} needs its package; accepted: pip install 'keel-fl[{name}]'")
    if "wandb" in spec.to and _wandb_mode(spec) == "online":
        import wandb

        if wandb.run is None and not wandb.login(prompt=False):
            raise KeelError("tracking.to: wandb has no key; accepted: wandb login, or tracking.wandb_mode = 'offline'")


@contextmanager
def tracked(folder: RunFolder, spec: Spec) -> Iterator[Hook]:
    """A hook that tells every tracker of the spec of each round, of those before a resume first."""
    trackers: dict[str, Tracker] = {}

    def each(act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(trackers.items()):
            try:
                act(tracker)
            except Exception as error:  # whatever it is, it must not cost the run
                del trackers[name]
                log.warning(
                    "keel: %s failed (%s); the run goes on without it: metrics.jsonl has all", name, _why(error)
                )

    def tell(record: Record, *_: object) -> None:
        step, numbers = record["round"], scalars(record)
        each(lambda tracker: tracker.tell(step, numbers) if step > tracker.has else None)

    try:
        for name in dict.fromkeys(spec.tracking.to):
            trackers[name] = _start(name, folder, spec)
        for record in folder.records() if trackers else []:
            tell(record)
        yield tell
    finally:
        each(lambda tracker: tracker.close(folder.summary))


def scalars(record: Record) -> Scalars:
    """The numbers of a record by their names in metrics.jsonl; those of the classes are class_accuracy/0 and so on."""
    of_classes = {f"class_accuracy/{i}": value for i, value in enumerate(record.get("class_accuracy", []))}
    return _numbers({**record, **of_classes}, but="round")


def _numbers(table: dict[str, Any], but: str = "") -> Scalars:
    return {name: value for name, value in table.items() if type(value) in (int, float) and name != but}


def _start(name: str, folder: RunFolder, spec: Spec) -> Tracker:
    try:
        return TRACKERS[name](folder, spec)
    except Exception as error:
        resume = f"keel resume {quote(str(folder.path))}"
        mended = f"mend it or take it out of {str(folder.path / 'spec.toml')!r}, then {resume}"
        raise KeelError(f"tracking.to: {name!r} does not start ({_why(error)}); accepted: {mended}") from error


def _why(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class TensorBoard:
    """Event files in the run's folder. A resume tells all rounds again, and that those told before do not count."""

    has = 0

    def __init__(self, folder: RunFolder, spec: Spec):
        from torch.utils.tensorboard import SummaryWriter

        path = folder.path / "tensorboard"
        new = not path.exists()
        self.writer = SummaryWriter(str(path), purge_step=0, flush_secs=10)
        if new:
            self._text("spec", spec.to_toml(), 0)
            self.writer.flush()

    def tell(self, step: int, scalars: Scalars) -> None:
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, step)

    def close(self, summary: Summary | None) -> None:
        if summary is not None:
            text = "\n".join(f"{name} = {value}" for name, value in summary.items())
            self._text("summary", text, summary["rounds"])
        self.writer.close()

    def _text(self, name: str, text: str, step: int) -> None:
        """As it stands: in Markdown, four spaces say so."""
        self.writer.add_text(name, "\n".join(f"    {line}" for line in text.splitlines()), step)


class WeightsAndBiases:
    """A run of wandb, below the run's folder until it is sent.

    wandb cannot go on with a run that is offline. It is written anew then, with all that was before, under the same id.
    """

    def __init__(self, folder: RunFolder, spec: Spec):
        import wandb

        mode = _wandb_mode(spec.tracking)
        if (known := folder.tracked_as.get("wandb")) is None:
            folder.remember("wandb", known := token_hex(8))
        if not fullmatch("[0-9a-f]{16}", known):  # it names a folder that is removed
            raise KeelError(f"{known!r} is no id of a run")
        for earlier in (folder.path / "wandb").glob(f"offline-run-*-{known}"):
            rmtree(earlier)
        self.run = wandb.init(
            project=spec.tracking.project,
            name=folder.path.name,
            id=known,
            resume="allow" if mode == "online" else None,
            config=spec.experiment,
            dir=str(folder.path),
            mode=mode,  # type: ignore[arg-type]  # or what the variable says, which wandb checks
            reinit="create_new",  # a run of the user's own stays open
            settings=wandb.Settings(silent=True, console="off"),
        )
        self.has = self.run.starting_step - 1

    def tell(self, step: int, scalars: Scalars) -> None:
        self.run.log(scalars, step=step)

    def close(self, summary: Summary | None) -> None:
        self.run.summary.update({f"summary.{name}": value for name, value in (summary or {}).items()})
        self.run.finish(exit_code=0 if summary is not None and summary["status"] == "finished" else 1)


def _wandb_mode(spec: TrackingSpec) -> str:
    return spec.wandb_mode or os.environ.get("WANDB_MODE", "online")


class MLflow:
    """A run of MLflow on the server that MLFLOW_TRACKING_URI names, else in mlflow.db beside the run's folder."""

    AT_ONCE = 1000
    """As many metrics as MLflow takes in one request."""
    SECONDS = 1.0
    """Between two requests: one costs as much as a small round."""

    def __init__(self, folder: RunFolder, spec: Spec):
        from mlflow import MlflowClient
        from mlflow.entities import Param

        beside = folder.path.absolute().parent
        with _quiet("mlflow"), FileLock(beside / ".mlflow.lock"):  # two processes cannot make one database
            self.client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or sqlite_address(beside / "mlflow.db"))
        self.has = 0
        if (known := folder.tracked_as.get("mlflow")) is None:
            made = self.client.create_run(self._experiment(spec.tracking.project), run_name=folder.path.name)
            self.id = made.info.run_id
            params = [Param(name, str(value)) for name, value in flatten(spec.experiment).items()]
            self.client.log_batch(self.id, params=params)
            folder.remember("mlflow", self.id)
        else:
            self.id = known
            self.client.update_run(self.id, status="RUNNING")
            self.has = max((m.step for m in self.client.get_metric_history(self.id, "bytes_up")), default=0)
        self.waiting: list[Any] = []
        self.due = monotonic() + self.SECONDS

    def _experiment(self, project: str) -> str:
        from mlflow.exceptions import MlflowException

        try:
            return self.client.create_experiment(project)
        except MlflowException:  # it is there, perhaps since this moment, by another process
            found = self.client.get_experiment_by_name(project)
            if found is None:
                raise
            return found.experiment_id

    def tell(self, step: int, scalars: Scalars) -> None:
        metrics = self._metrics(step, scalars)
        if monotonic() > self.due or len(self.waiting) + len(metrics) > self.AT_ONCE:
            self._send()
        self.waiting += metrics

    def close(self, summary: Summary | None) -> None:
        status = "KILLED"
        if summary is not None:
            numbers = _numbers(summary)
            self.waiting += self._metrics(summary["rounds"], {f"summary.{k}": v for k, v in numbers.items()})
            for name in ("status", "engine", "model_sha256"):
                self.client.set_tag(self.id, f"summary.{name}", summary[name])
            status = {"finished": "FINISHED", "diverged": "FAILED"}.get(summary["status"], status)
        self._send()
        self.client.set_terminated(self.id, status)

    def _metrics(self, step: int, scalars: Scalars) -> list[Any]:
        from mlflow.entities import Metric

        now = int(1000 * time())
        return [Metric(name, value, now, step) for name, value in scalars.items()]

    def _send(self) -> None:
        """Whole records: what a resume finds of a round is all of it."""
        self.client.log_batch(self.id, metrics=self.waiting)
        self.waiting = []
        self.due = monotonic() + self.SECONDS


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Without what a library tells of its own setting up."""
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
