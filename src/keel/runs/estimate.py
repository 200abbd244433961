"""The estimated cost of a run, from a few clients that train for two rounds."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from time import perf_counter
from typing import Any

import numpy as np

from keel.config.schema import Spec
from keel.core.devices import single_thread
from keel.core.records import Record
from keel.core.sampling import Sampler
from keel.core.training_state import TrainingState
from keel.runs.build import Training, build, make_availability, make_task
from keel.runs.resources import footprint_of

MEASURED_ROUNDS = 1000
"""The largest number of rounds whose time in a federation is computed one by one; longer runs are extrapolated."""


@dataclass(frozen=True)
class Estimate:
    rounds: int
    bytes: int
    """Bytes that clients and server exchange."""
    disk: int
    ram: int
    seconds: float
    """Wall-clock time on this machine."""
    federation_seconds: float | None
    """Wall-clock time in a real federation, if the spec has a network."""
    noise: float | None = None
    """The noise multiplier of the spec's privacy mechanism."""
    epsilon: tuple[tuple[int, float], ...] = ()
    """Epsilon after some of the rounds."""


class _FirstClients:
    """A sampler reduced to the first `size` clients of each cohort."""

    def __init__(self, sampler: Sampler, size: int):
        self.sampler, self.size = sampler, size
        self.clients, self.period = sampler.clients, sampler.period
        self.may_be_empty = getattr(sampler, "may_be_empty", False)

    def cohort(self, round: int) -> np.ndarray:
        return self.sampler.cohort(round)[: self.size]


def estimate(spec: Spec) -> Estimate:
    """Estimate the cost of a run: a few clients train for two rounds, the second is timed, and so is an evaluation."""
    no_evaluation: dict[str, Any] = {"every": 10**9, "last": 1}
    trial = {"rounds": max(3, spec.rounds), "evaluation": spec.evaluation.model_copy(update=no_evaluation)}
    # all clients answer in the trial, so that its bytes and its time are the most that a round takes
    training = build(spec.model_copy(update={**trial, "availability": None}), make_task(spec))
    engine, sampler = training.loop.engine, training.loop.sampler
    footprint, cohort = footprint_of(training), sampler.size
    few = cohort if engine.group > 1 else min(cohort, training.workers)  # a batch's time is not linear in its clients
    training.loop.participation.sampler = _FirstClients(sampler, few)
    state, seconds, records = training.loop.start(), [], []

    def collect(record: Record, _: TrainingState, took: float) -> None:
        records.append(record)
        seconds.append(took)

    training.loop.run(state, [collect], lambda: len(records) == 2)
    round_seconds = seconds[-1] * cohort / few
    down, up = records[-1]["bytes_down"] / few, records[-1]["bytes_up"] / few
    # for evaluation.deviation all clients train
    diagnosis = round_seconds * sampler.clients / cohort if spec.evaluation.deviation else 0.0
    federation = None
    if spec.network is not None:
        client_seconds = round_seconds * engine.processes(cohort) / cohort
        rounds = range(1, min(spec.rounds, MEASURED_ROUNDS) + 1)
        modelled = _modelled_seconds(spec, training, sampler)
        federation = (spec.rounds / len(rounds)) * sum(
            spec.network.round_seconds(spec.seed, t, sampler.cohort(t).tolist(), down, up, client_seconds)
            if modelled is None
            else modelled(t)
            for t in rounds
        )
    return Estimate(
        spec.rounds,
        round(spec.rounds * cohort * (down + up)),
        footprint.disk,
        footprint.ram,
        spec.rounds * round_seconds
        + spec.evaluation.count(spec.rounds) * (_evaluation_seconds(training, state) + diagnosis),
        federation,
        None if training.privacy is None else training.privacy.noise,
        () if training.privacy is None else tuple(training.privacy.schedule()),
    )


def _modelled_seconds(spec: Spec, training: Training, sampler: Sampler) -> Callable[[int], float] | None:
    """Return the function that gives a round's duration with the spec's availability; None if it models no time."""
    loop, availability = training.loop, make_availability(spec)
    if availability is None or availability.step_seconds is None:
        return None
    loop.settings = replace(loop.settings, availability=availability)
    return lambda t: loop.attendance(t, sampler.cohort(t)).seconds or 0.0


def _evaluation_seconds(training: Training, state: TrainingState) -> float:
    """Return the seconds of one evaluation, extrapolated from one part of the test examples."""
    evaluator = training.loop.engine.evaluator
    evaluator.load_weights(state.server["theta"], state.buffers)
    with single_thread():
        began = perf_counter()
        evaluator.measure(0)
        took = perf_counter() - began
    return took * ceil(evaluator.parts / training.loop.engine.processes(training.loop.sampler.size))
