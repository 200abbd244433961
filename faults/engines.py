"""Differential testing: one random experiment, computed in two ways that must agree.

Interrupted and resumed runs, the engine `pool` and other numbers of workers must have the bits of `serial`, in the
model, the server state, the client states and metrics.jsonl. `cohort` computes the same sums in another order, so it
agrees to rounding (see `RTOL`). One case in fifty uses `ray`, which has the bits of `serial`; they share one Ray.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import keel
from faults._experiments import Experiment, draw
from faults._shared_ray import shared_ray
from keel.core.training_state import TrainingState
from keel.runs.folder import RunFolder

RTOL = 2e-5
"""The largest difference between `cohort` and `serial`, relative to the largest weight. Rounding in float32 is 6e-8,
and an experiment has a few dozen steps."""
AMPLIFIED = 100
"""Where an experiment amplifies rounding errors, `cohort` may differ by this many times the effect of ..."""
PERTURBATION = 1e-6
"""... changing each initial weight by this part of it at random."""


REFUSALS = ("engine.name = 'cohort'", "evaluation.deviation requires reports with 'delta'")
"""How errors begin that refuse an experiment which may be drawn."""


class Killed(BaseException):
    """Stands for a kill: no code of the run may catch it."""


def check(seed: int, folder: Path) -> str | None:
    torch.set_num_threads(1)
    rng = Random(seed)
    compare = rng.choices([resumed, pooled, batched, distributed], [25, 5, 19, 1])[0]
    for attempt in count():  # until the engine accepts what was drawn
        experiment = draw(rng, replayed=compare is batched or rng.random() < 0.2)
        try:
            line = compare(rng, experiment, folder / str(attempt))
        except keel.KeelError as error:
            if not str(error).startswith(REFUSALS):
                raise
            continue
        return None if line is None else f"{compare.__name__}: {line}: {experiment.table}"
    raise AssertionError("count() does not end")


def train(experiment: Experiment, path: Path, engine: str, workers: int = 1, **more: Any) -> RunFolder:
    table = {**experiment.table, "engine": {"name": engine}}
    keel.run(table, out=path, workers=workers, **{**experiment.objects(), **more})
    return RunFolder(path)


def resumed(rng: Random, experiment: Experiment, folder: Path) -> str | None:
    """Interrupt a run up to twice, with or without checkpoints after each round, and continue it."""
    path, engine = folder / "resumed", rng.choice(["serial", "serial", "cohort"])

    def start(**more: Any) -> None:
        train(experiment, path, engine, **more)

    def proceed(**more: Any) -> None:
        keel.resume(path, **experiment.objects(), **more)

    reference = train(experiment, folder / "reference", engine)
    with patch("keel.runs.execute.CHECKPOINT_SECONDS", rng.choice([0.0, 1e9])):
        interrupted(start, rng.randint(1, experiment.rounds), rng.random() < 0.5)
        if rng.random() < 0.3:
            interrupted(proceed, rng.randint(1, experiment.rounds), rng.random() < 0.5)
        proceed()
    return different_bits(reference, RunFolder(path))


def interrupted(start: Callable[..., None], at: int, kill: bool) -> None:
    """Run until round `at`, and stop after it or die in it."""
    seen = [0]

    def hook(record: Mapping[str, Any], state: TrainingState, seconds: float) -> None:
        seen[0] = state.round
        if kill and state.round >= at:
            raise Killed

    with suppress(Killed):
        start(hooks=[hook], stop=lambda: seen[0] >= at)


def pooled(rng: Random, experiment: Experiment, folder: Path) -> str | None:
    """Train with worker processes."""
    reference = train(experiment, folder / "reference", "serial")
    return different_bits(reference, train(experiment, folder / "pool", "pool", rng.randint(1, 3)))


def distributed(rng: Random, experiment: Experiment, folder: Path) -> str | None:
    """Train with the actors of Ray."""
    shared_ray()
    reference = train(experiment, folder / "reference", "serial")
    return different_bits(reference, train(experiment, folder / "ray", "ray", rng.randint(1, 2)))


def batched(rng: Random, experiment: Experiment, folder: Path) -> str | None:
    """Train each group of clients as one program, in float32: half precision may round to different neighbours."""
    experiment = experiment.in_float32
    other = train(experiment, folder / "cohort", "cohort")
    reference = train(experiment, folder / "reference", "serial")
    serial = tensors(reference)
    name, error = largest_difference(serial, tensors(other))
    if error <= RTOL:
        return different_costs(reference, other)
    effect = 0.0
    for number in range(3):
        model = experiment.objects()["model"]
        torch.manual_seed(number)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + PERTURBATION * torch.randn_like(parameter))
        perturbed = tensors(train(experiment, folder / str(number), "serial", model=model))
        effect = max(effect, largest_difference(serial, perturbed)[1])
    amplified = error <= AMPLIFIED * effect
    return None if amplified else f"{name} differs by {error:.1e}, a perturbation changes it by {effect:.1e}"


def tensors(folder: RunFolder) -> dict[str, Tensor]:
    """The final state of a run, by names."""
    state = folder.final_state()
    named = {f"server {name}": value for name, value in state.server.items()}
    named |= {f"{kind} {name}": value for kind in ("observed", "norms") for name, value in getattr(state, kind).items()}
    named |= {f"client {i} {name}": value for i in state.clients for name, value in state.clients[i].items()}
    return named if state.buffers is None else {**named, "buffers": state.buffers}


def different_bits(one: RunFolder, other: RunFolder) -> str | None:
    """The first part of two runs that is not equal to the bit."""
    if one.metrics.read_bytes() != other.metrics.read_bytes():
        return "metrics.jsonl differs"
    expected, got = tensors(one), tensors(other)
    if expected.keys() != got.keys():
        return f"states differ: {sorted(expected.keys() ^ got.keys())}"
    for name, value in expected.items():
        if value.dtype != got[name].dtype or content(value) != content(got[name]):
            return f"{name} differs"
    ends = [{k: v for k, v in (each.summary or {}).items() if k not in ("seconds", "engine")} for each in (one, other)]
    return None if ends[0] == ends[1] else f"summaries differ: {ends}"


def content(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> tuple[str, float]:
    """The tensor that differs most, relative to its largest element or the largest weight; inf if names differ."""
    if one.keys() != other.keys():
        return f"states {sorted(one.keys() ^ other.keys())}", float("inf")
    largest = float(one["server theta"].abs().max())
    errors = {"": 0.0}
    for name, value in one.items():
        a, b = value.double(), other[name].double()
        if a.numel() and not torch.equal(a, b):
            errors[name] = float((a - b).abs().max() / max(largest, float(a.abs().max())))
    return max(errors.items(), key=lambda item: item[1])


def different_costs(one: RunFolder, other: RunFolder) -> str | None:
    """The first difference between the records of two runs in what does not depend on rounding, or in the losses."""
    records = one.records(), other.records()
    for expected, got in zip(*records, strict=True):
        for key in ("round", "cohort", "bytes_down", "bytes_up"):
            if expected.get(key) != got.get(key):
                return f"{key} of round {got['round']} is {got.get(key)} instead of {expected.get(key)}"
        for key in ("train_loss", "test_loss"):
            a, b = expected.get(key), got.get(key)
            if (a is None) != (b is None) or (a is not None and abs(a - b) > 0.01 * (1 + abs(a))):
                return f"{key} of round {got['round']} is {b} instead of {a}"
    return None
