"""Observers: callbacks that watch a run without changing its result.

    class CohortSize(keel.Observer):
        def round_ended(self, event):
            return {"cohort_size": len(event.work.cohort)}

    keel.run(spec, hooks=[CohortSize()])

A plain function `hook(record, state, seconds)` in the list is called when a round's record is complete.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from keel.algorithms.base import Message, State
from keel.core.client import ClientResult
from keel.core.clipping import RoundClipping
from keel.core.engine import Dropped, RoundWork
from keel.core.records import Record
from keel.errors import KeelError

if TYPE_CHECKING:
    from keel.core.loop import Loop
    from keel.core.training_state import TrainingState

Hook = Callable[[Record, "TrainingState", float], None]
"""A function of a round's record, the training state after it and its wall-clock time in seconds."""


@dataclass(frozen=True)
class RoundEnd:
    """A round after aggregation, before its result becomes the training state."""

    loop: "Loop"
    state: "TrainingState"
    """As it was before the round. An observer may keep tensors in `state.observed`: checkpoints hold them."""
    work: RoundWork
    """The cohort that answered, with what it received."""
    weights: Sequence[float]
    server: State
    """The new server state."""
    evaluated: bool
    """Whether the model is evaluated after this round."""


ADDED_LATER = {"dropped", "diverged", "test_loss", "accuracy", "class_accuracy", "clients", "bytes_evaluation"}
"""The keys that the loop may add to a record after the observers."""


class Observer:
    """Override the methods you need; each does nothing by default."""

    def round_started(self, round: int) -> None:
        """Called before a round, also when an interrupted round is repeated."""

    def message_sent(self, message: Message, clients: int) -> None:
        """The server sends this message to `clients` clients."""

    def message_received(self, message: Message) -> None:
        """A client's message reaches the server."""

    def client_reported(self, client: int, weight: float, result: ClientResult) -> None:
        """A client has trained. `weight` is its share in the mean."""

    def round_ended(self, event: RoundEnd) -> Mapping[str, Any] | None:
        """The round is aggregated. What this returns is added to its record."""
        return None

    def round_recorded(self, record: Record, state: "TrainingState", seconds: float) -> None:
        """Called when the record is complete; `seconds` is the wall-clock time of the round."""


class HookObserver(Observer):
    """Calls a plain function for each complete record."""

    def __init__(self, hook: Hook):
        self.hook = hook

    def round_recorded(self, record: Record, state: "TrainingState", seconds: float) -> None:
        self.hook(record, state, seconds)


def as_observer(hook: Observer | Hook) -> Observer:
    if isinstance(hook, Observer):
        return hook
    if not callable(hook):
        raise KeelError(f"hooks must hold functions or keel.Observer instances (got {hook!r})")
    return HookObserver(hook)


class Traffic(Observer):
    """Counts the bytes of a round from its messages: a broadcast counts once per client, a report once."""

    def round_started(self, round: int) -> None:
        self.bytes = {"bytes_down": 0, "bytes_up": 0}

    def message_sent(self, message: Message, clients: int) -> None:
        self.bytes["bytes_down"] += clients * size_in_bytes(message)

    def message_received(self, message: Message) -> None:
        self.bytes["bytes_up"] += size_in_bytes(message)

    def round_ended(self, event: RoundEnd) -> Mapping[str, Any]:
        counted = dict.fromkeys(self.bytes, 0) if event.loop.algorithm.pooled else self.bytes
        return {**counted, **event.loop.engine.traffic()}


def size_in_bytes(message: Message) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in message.values())


def finite(value: float) -> float | None:
    """The value, or None where JSON has no number for it."""
    return value if isfinite(value) else None


def make_record(
    event: RoundEnd,
    dropped: dict[int, Dropped],
    losses: list[float],
    observers: Sequence[Observer],
    clipping: RoundClipping | None = None,
    seconds: float | None = None,
) -> Record:
    """The round's record with what the observers measured, marked as diverged if the model is not finite.

    Args:
        seconds: The modelled duration of the round, if there is a model.
    """
    work = event.work
    record: Record = {"round": work.ctx.round, "cohort": work.cohort.tolist(), "lr": work.ctx.lr}
    if dropped:
        record["dropped"] = {str(client): reply.reason for client, reply in dropped.items()}
    if clipping is not None:
        record["norms"] = {str(client): finite(norm) for client, norm in clipping.norms.items()}
        if clipping.clipped:
            record["clipped"] = [client for client in record["cohort"] if client in clipping.clipped]
        if clipping.rejected:
            record["rejected"] = sorted(clipping.rejected)
    if seconds is not None:
        record["federation_seconds"] = seconds
    record["train_loss"] = finite(float(np.mean(losses))) if losses else None
    for observer in observers:
        _add_fields(record, observer, event)
    if not torch.isfinite(event.server["theta"]).all():
        record["diverged"] = True
    return record


def _add_fields(record: Record, observer: Observer, event: RoundEnd) -> None:
    """Add what an observer measured to the record, under names that the record does not have."""
    fields = observer.round_ended(event) or {}
    later = ADDED_LATER | {metric.name for metric in event.loop.task.metrics}
    if taken := sorted(fields.keys() & (record.keys() | later)):
        raise KeelError(
            f"{type(observer).__name__}.round_ended must not return the key {taken[0]!r}, which is already a key of "
            "the record; use another name"
        )
    cast(dict[str, Any], record).update(fields)
