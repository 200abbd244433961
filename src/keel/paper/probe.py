"""A fingerprint of an algorithm's code: three numbers of a short run on the digits, which is the same in all versions.

A stored result keeps the numbers of the version that made it. If today's numbers differ, the code has changed what it
computes, and the result is one of older code.
"""

from collections.abc import Mapping
from functools import cache
from math import isclose
from typing import Any

from keel.algorithms import REGISTRY
from keel.config.defaults import make_spec
from keel.core.records import Record
from keel.core.task import Task
from keel.errors import KeelError
from keel.runs.build import build, make_task

Probe = list[float]
"""The train loss and the test loss after the last round, and the distance of the model from the initial one."""

TOLERANCE = 1e-3
"""The largest relative difference of numbers that count as equal: processors round differently."""
INTEGER, FLOAT = 2, 0.5
"""The largest integer and the float among the numbers of an algorithm; a zero, which switches a term off, stays."""
RUN: dict[str, Any] = {
    "rounds": 6,
    "data": {"name": "digits", "clients": 4, "partition": "iid"},
    "model": {"name": "mlp"},
    "local": {"steps": 2, "batch": 16, "lr": 0.5, "schedule": "constant", "weight_decay": 0.01},
    "server": {"lr": 0.5, "schedule": "constant"},
    "participation": {"rate": 0.5},
    "evaluation": {"every": 6, "last": 1},
    "engine": {"name": "serial", "device": "cpu"},
}
"""Every client takes part several times, and two rounds are a full period of the participation."""


def probe(fields: Mapping[str, Any]) -> Probe:
    """Return the numbers of an algorithm, given the dotted fields of a run.

    Texts and switches of the algorithm select what it computes and are those of the run. Its numbers are not: they only
    scale, and so all runs of one rule share a probe.

    Raises:
        KeelError: The algorithm or one of its fields does not exist.
    """
    settings = {name.removeprefix("algorithm."): v for name, v in fields.items() if name.startswith("algorithm.")}
    return list(_run(tuple(sorted((name, _canonical(value)) for name, value in settings.items()))))


def is_older(stored: Probe | None, fields: Mapping[str, Any]) -> bool:
    """Return whether a result with this probe, or without one, was made by code that computed something else."""
    if stored is None or fields["algorithm.name"] not in REGISTRY:
        return True
    try:
        current = probe(fields)
    except KeelError:  # a field of the algorithm has been removed, or no longer takes this value
        return True
    return not all(isclose(old, new, rel_tol=TOLERANCE) for old, new in zip(stored, current, strict=True))


def _canonical(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or value == 0:
        return value
    return min(value, INTEGER) if isinstance(value, int) else FLOAT


@cache
def _run(settings: tuple[tuple[str, Any], ...]) -> tuple[float, ...]:
    spec = make_spec({**RUN, "algorithm": dict(settings)})
    loop = build(spec, _task(spec.algorithm.pooled), workers=1).loop
    state, records = loop.start(), list[Record]()
    loop.run(state, [lambda record, *_: records.append(record)])
    distance = float((state.server["theta"] - loop.initial).norm())
    numbers = records[-1]["train_loss"], records[-1]["test_loss"], distance
    return tuple(float(f"{number:.5g}") for number in numbers)


@cache
def _task(pooled: bool) -> Task:
    """Return the task, whose data a pooled algorithm has in one place."""
    return make_task(make_spec({**RUN, "algorithm": {"name": "centralized" if pooled else "fedavg"}}))
