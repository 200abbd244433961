"""What a run would take, found out by a few clients' rounds before it begins."""

from dataclasses import dataclass
from math import ceil
from time import perf_counter
from typing import Any

import numpy as np

from keel.engines import at_once
from keel.rounds import Position, Record, Training, one_thread
from keel.runs.room import room_of
from keel.runs.spec import Spec
from keel.sampling import Sampler
from keel.task import make_task


@dataclass(frozen=True)
class Price:
    """Bytes are those that clients and server exchange."""

    rounds: int
    bytes: int
    disk: int
    ram: int
    seconds: float
    """On this machine."""
    federation_seconds: float | None
    """In a real federation, if the spec has a network."""


class _Few:
    """A sampler's first few clients."""

    def __init__(self, sampler: Sampler, count: int):
        self.sampler, self.size = sampler, count
        self.clients, self.period = sampler.clients, sampler.period

    def cohort(self, round: int) -> np.ndarray:
        return self.sampler.cohort(round)[: self.size]


def price(spec: Spec) -> Price:
    """Has a few clients train for two rounds, of which the second is measured, and measures a part of an evaluation."""
    never: dict[str, Any] = {"every": 10**9, "last": 1}
    patient = {"rounds": max(3, spec.rounds), "evaluation": spec.evaluation.model_copy(update=never)}
    training = Training(spec.model_copy(update=patient), make_task(spec))
    room, cohort = room_of(training), training.sampler.size
    few = cohort if training.engine.name == "cohort" else min(cohort, training.workers)
    training.sampler = _Few(training.sampler, few)
    position, seconds, records = training.start(), [], []

    def note(record: Record, _: Position, took: float) -> None:
        records.append(record)
        seconds.append(took)

    training.run(position, [note], lambda: len(records) == 2)
    each = seconds[-1] * cohort / few
    down, up = records[-1]["bytes_down"] / few, records[-1]["bytes_up"] / few
    evaluations = sum(spec.evaluation.due(t, spec.rounds) for t in _rounds(spec))
    diagnosis = each * training.sampler.clients / cohort if spec.evaluation.deviation else 0.0  # all clients train
    federation = None
    if spec.network is not None:
        computing = each * at_once(training.engine.name, training.workers, cohort) / cohort
        sampler = training.sampler.sampler
        federation = sum(
            spec.network.round_seconds(spec.seed, t, sampler.cohort(t).tolist(), down, up, computing)
            for t in _rounds(spec)
        )
    return Price(
        spec.rounds,
        round(spec.rounds * cohort * (down + up)),
        room.disk,
        room.ram,
        spec.rounds * each + evaluations * (_evaluation(training, position) + diagnosis),
        federation,
    )


def _rounds(spec: Spec) -> range:
    return range(1, spec.rounds + 1)


def _evaluation(training: Training, position: Position) -> float:
    """Seconds of one evaluation, from one of its parts."""
    evaluator = training.engine.evaluator
    evaluator.look_at(position.server["theta"], position.buffers)
    with one_thread():
        began = perf_counter()
        evaluator.measure(0)
        took = perf_counter() - began
    processes = at_once(training.engine.name, training.workers, training.sampler.size)
    return took * ceil(len(evaluator.parts) / processes)
