from math import ceil
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keel.algorithms.base import Context
from keel.engines.base import Engine, Problem, RoundWork
from keel.engines.cohort import Cohort, Plan
from keel.engines.serial import Serial
from keel.rounds import Training
from keel.runs.spec import make_spec
from keel.task import make_task
from tests.conftest import small_network, uneven_data

SIZES = (40, 10, 1300, 3, 600, 90, 35)
"""Around a full gradient's 512 examples, in no order."""


def training(algorithm: str, local: dict[str, Any], sizes: tuple[int, ...] = SIZES, **engine: Any) -> Training:
    custom = {"data": {"name": "custom"}, "model": {"name": "custom"}}
    everybody = {"participation": {"rate": 1.0}, "local": {"lr": 0.05, **local}}
    spec = make_spec({"rounds": 2, "algorithm": {"name": algorithm}, **everybody, "engine": engine, **custom})
    return Training(spec, make_task(spec, module=small_network(), data=uneven_data(sizes=sizes)))


def round_of(run: Training) -> tuple[Problem, RoundWork]:
    """The first round of all clients, in the order of their numbers."""
    clients, algorithm = np.arange(len(SIZES)), run.spec.algorithm
    ctx = run._context(1, clients)
    received = algorithm.broadcast(algorithm.init_server(run.initial), ctx)
    memories = [algorithm.init_client(run.initial) for _ in clients]
    work = RoundWork(clients, {**received, "c": 0.1 * run.initial}, memories, ctx, [None for _ in clients])
    return Problem(run.task, run.engine.recipe), work  # type: ignore[attr-defined]


@pytest.mark.parametrize("local", [{"batch": 1000}, {"batch": 50, "epochs": 2}, {"batch": 200, "steps": 3}])
@pytest.mark.parametrize("algorithm", ["scaffold", "mime", "mimelitemom"])
def test_each_of_very_unequal_clients_does_what_it_does_alone(algorithm: str, local: dict[str, int]) -> None:
    problem, work = round_of(training(algorithm, local, name="serial"))
    for ours, alone in zip(Cohort(problem).train(work), Serial(problem).train(work), strict=True):
        assert ours.steps == alone.steps
        for mine, theirs in ((ours.message, alone.message), (ours.memory, alone.memory), ([ours.loss], [alone.loss])):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    for mine, theirs in zip(Cohort(problem).probe(work), Serial(problem).probe(work), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("local", [{"batch": 1000}, {"batch": 50, "epochs": 2}, {"batch": 200, "steps": 3}])
def test_little_is_padding(local: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    problem, work = round_of(training("mimelitemom", local, name="serial"))
    engine: Engine = Cohort(problem)
    gathered = []

    def gather(self: Cohort, plan: Plan, entries: np.ndarray) -> Any:
        gathered.append(entries.size)
        return original(self, plan, entries)

    original = Cohort._gather
    monkeypatch.setattr(Cohort, "_gather", gather)
    list(engine.train(work))
    needed = sum(SIZES) + sum(sum(problem.recipe.work.sizes(size)) for size in SIZES)
    assert sum(gathered) < 2 * needed


def test_the_bits_of_unequal_clients_do_not_depend_on_the_number_of_workers() -> None:
    sizes = tuple(np.random.default_rng(0).integers(1, 300, 70).tolist())
    ends = []
    for workers in (1, 2, 3):
        run = training("mimelitemom", {"batch": 100}, sizes, name="cohort", workers=workers)
        position = run.start()
        run.run(position, [])
        ends.append(position.server["theta"])
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


@given(st.integers(1, 200), st.integers(1, 40))
def test_groups_are_as_few_and_as_even_as_they_can_be(clients: int, most: int) -> None:
    ctx = Context(1, clients, clients, share=1.0, period=1.0, lr=0.1, server_lr=1.0)
    work = RoundWork(np.arange(clients), {}, [{}] * clients, ctx, [None] * clients)
    groups = [group.cohort for group in work.groups(most)]
    sizes = list(map(len, groups))
    assert np.array_equal(np.concatenate(groups), work.cohort)
    assert len(groups) == ceil(clients / most)
    assert max(sizes) <= min(most, min(sizes) + 1)
