"""Checks that a run is resumed on the task that it started with, and says in words what differs."""

from collections.abc import Mapping
from typing import Any

from keel.config.schema import CUSTOM
from keel.core.loop import Loop
from keel.errors import KeelError
from keel.runs.environment import fingerprints, sampler_text
from keel.runs.folder import RunFolder


def check_same_task(folder: RunFolder, loop: Loop) -> None:
    """Raise a KeelError unless the loop's data, model, loss and sampler are those that the run started with."""
    then: Mapping[str, Any] = dict(folder.environment)
    now = fingerprints(loop)
    differ = {name for name, value in now.items() if then.get(name, value) != value}  # older runs recorded fewer
    if differ & {"examples_sha256", "partition_sha256"}:
        raise _other("data", _data_difference(folder, loop, "examples_sha256" in differ))
    if differ & {"parameters", "initial_sha256"}:
        raise _other("model", _model_difference(folder, loop))
    if "loss" in differ:
        raise _other("loss", _then_now(*(_loss_text(loss) for loss in (then["loss"], now["loss"]))))
    if "optimizer" in differ:
        before, after = (str(text["optimizer"]).split()[0] for text in (then, now))
        raise _other(
            "optimizer", _then_now(before, after) if before != after else f"{after} as then, but other settings"
        )
    metric, primary = then.get("metric"), loop.task.primary.name
    if metric not in (None, primary):
        raise _other("metrics", _then_now(f"{metric} first", f"{primary} first"))
    if "cohorts_sha256" in differ:
        recorded, current = then.get("sampler"), sampler_text(loop.sampler)
        same = f"{current} as then, but other cohorts"
        raise _other("sampler", same if recorded in (None, current) else _then_now(recorded, current))


def _other(name: str, difference: str) -> KeelError:
    verb = "differ from those" if name in ("data", "metrics") else "differs from the one"
    same = f"{name}, as it was before training" if name == "model" else name
    return KeelError(f"{name} {verb} that the run started with: {difference}; resume it with the same {same}")


def _then_now(then: str, now: str) -> str:
    return f"{then} then, {now} now"


def _data_difference(folder: RunFolder, loop: Loop, other_examples: bool) -> str:
    partition, recorded = loop.task.data.partition, folder.client_statistics
    now = _examples_text(int(partition.sizes.sum()), partition.clients)
    then = now if recorded is None else _examples_text(recorded["train_examples"], recorded["clients"])
    if then != now:
        return _then_now(then, now)
    return f"{now} as then, but other " + ("inputs or targets" if other_examples else "clients for the same examples")


def _examples_text(examples: int, clients: int) -> str:
    return f"{examples:,} examples in {clients:,} clients"


def _model_difference(folder: RunFolder, loop: Loop) -> str:
    name, recorded = type(loop.task.module).__name__, folder.model
    now = f"{name} with {loop.parameters:,} parameters"
    then = f"{recorded.class_name if recorded else name} with {folder.environment['parameters']:,} parameters"
    return _then_now(then, now) if then != now else f"{now} as then, but other initial weights"


def _loss_text(loss: str) -> str:
    return "a loss passed in Python" if loss == CUSTOM else loss
