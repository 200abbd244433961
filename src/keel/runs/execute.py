"""Executes the remaining rounds of a run into its folder: records, checkpoints, trackers, signals, the summary."""

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from math import isfinite
from shlex import quote
from statistics import fmean
from time import monotonic
from typing import cast

import torch

from keel.config.schema import last_rounds
from keel.core.flat_model import fingerprint
from keel.core.observers import Hook, Observer
from keel.core.records import COMPLETE, Record, Summary
from keel.core.selection import kept_best
from keel.core.stopping import EarlyStopping
from keel.core.training_state import TrainingState
from keel.errors import KeelError
from keel.runs.build import Training, stop_rules
from keel.runs.folder import RunFolder
from keel.runs.resources import CHECKPOINT_ROUNDS
from keel.runs.result import Run, ended_run
from keel.runs.tracking import tracked
from keel.signals import interruptible

CHECKPOINT_SECONDS = 10.0
"""The interval between checkpoints, unless saving is slow."""
SAVING_SHARE = 20
"""Saving takes at most 1/SAVING_SHARE of the run time."""


class Recorder(Observer):
    """Writes each round's record, and a checkpoint from time to time."""

    def __init__(self, folder: RunFolder, state: TrainingState, every_round: bool, advice: str):
        self.folder, self.every_round, self.advice = folder, every_round, advice
        self.saved_round, self.due = state.round, monotonic() + CHECKPOINT_SECONDS

    def round_recorded(self, record: Record, state: TrainingState, seconds: float) -> None:
        if self.every_round and (record.get("diverged") or not _finite(state)):
            raise KeelError(
                f"round {state.round}: the model or the server state is not finite; the rounds before it are saved: "
                f"{self.advice}"
            )
        self.folder.append(record, seconds)
        overdue = bool(state.clients) and state.round >= self.saved_round + CHECKPOINT_ROUNDS
        if (self.every_round or overdue or monotonic() > self.due) and not record.get("diverged"):
            began = monotonic()
            self.folder.save(state)
            self.saved_round = state.round
            self.due = monotonic() + max(CHECKPOINT_SECONDS, SAVING_SHARE * (monotonic() - began))


def execute(
    folder: RunFolder,
    training: Training,
    state: TrainingState,
    hooks: Sequence[Observer | Hook] = (),
    stop: Callable[[], bool] = lambda: False,
) -> Run:
    """Run the remaining rounds.

    With remote clients every round is saved, since the sites build on the last one, and signals are left to the
    process that communicates with them.
    """
    loop, remote = training.loop, training.loop.engine.remote
    advice = "start the same flwr run again" if remote else f"keel resume {quote(str(folder.path))}"
    recorder = Recorder(folder, state, remote, advice)
    stopping = EarlyStopping(stop_rules(training), loop.task.primary, folder.records(), folder.seconds())
    try:
        with (
            nullcontext(threading.Event()) if remote else interruptible() as interrupted,
            tracked(folder, training.spec) as track,
        ):
            # the recorder comes after the hooks, so that what they add to a record is written
            observers = [*hooks, recorder, track]
            status = loop.run(state, observers, lambda: interrupted.is_set() or stop(), stopping)
            summary = summarize(folder, training, state, status, stopping.reason)
            if status == "diverged":  # the summary first: nothing may continue from a model that is not finite
                folder.finish(summary)
                folder.save(state)
            else:
                folder.save(state)
                folder.finish(summary)
            if folder.ended:
                folder.discard_previous()
    except OSError as error:
        raise OSError(f"{error}; the last checkpoint is kept: {advice}") from error
    except KeyboardInterrupt as error:  # a second signal, which does not wait for the end of the round
        error.args = (f"continue from the last checkpoint with: {advice}",)
        raise
    return ended_run(folder, training, state)


def summarize(
    folder: RunFolder, training: Training, state: TrainingState, status: str, stop_reason: str | None
) -> Summary:
    records, spec, primary = folder.records(), training.spec, training.loop.task.primary
    last = _last(records, spec.evaluation.last, status)
    evaluated = next((r for r in reversed(records) if "test_loss" in r), Record())
    best = kept_best(state.observed)
    summary: Summary = {
        "status": status,
        "stop_reason": stop_reason if status == "stopped" else None,
        "rounds": state.round,
        "metric": primary.name,
        "maximize": primary.maximize,
        "value": _mean(last, primary.name),
        "last_value": _mean([evaluated], primary.name),
        "best_round": None if best is None else best.round,
        "best_value": None if best is None else best.value,
        "accuracy": _mean(last, "accuracy"),
        "last_accuracy": evaluated.get("accuracy"),
        "test_loss": evaluated.get("test_loss"),
        "class_accuracy": evaluated.get("class_accuracy"),
        "bytes_down": sum(r["bytes_down"] for r in records),
        "bytes_up": sum(r["bytes_up"] for r in records),
        "seconds": round(sum(folder.seconds()), 3),
        "engine": training.loop.engine.name,
        "seed": spec.seed,
        "parameters": training.loop.parameters,
        "model_sha256": fingerprint(state.server["theta"], state.buffers),
    }
    if training.privacy is not None:
        summary["noise_multiplier"] = training.privacy.noise
        summary["epsilon"] = records[-1].get("epsilon") if records else 0.0
    return summary


def _last(records: list[Record], most: int, status: str) -> list[Record]:
    """The rounds over which the result is averaged. A stopped run has fewer, as a spec of so few rounds would have."""
    if status not in COMPLETE:
        return []
    return records[-(most if status == "finished" else last_rounds(most, len(records))) :]


def _mean(records: list[Record], metric: str) -> float | None:
    """The mean of a metric over the records that have it; None if none has."""
    values = [r[metric] for r in cast(list[dict[str, float]], records) if r.get(metric) is not None]
    return fmean(values) if values else None


def _finite(state: TrainingState) -> bool:
    """Whether every norm of the server state and the buffers is finite."""
    tensors = [*state.server.values(), *([] if state.buffers is None else [state.buffers])]
    return all(isfinite(float(torch.linalg.vector_norm(tensor.float()))) for tensor in tensors)
