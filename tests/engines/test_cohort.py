from math import ceil
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keel.algorithms.base import Context
from keel.config.defaults import make_spec
from keel.core.engine import Engine, RoundWork, Workload
from keel.core.loop import Loop
from keel.engines.cohort import Cohort, Plan
from keel.engines.serial import Serial
from keel.runs.build import make_task
from tests.conftest import make_loop, small_network, uneven_data

SIZES = (40, 10, 1300, 3, 600, 90, 35)
"""Below and above the 512 examples of a chunk of a full gradient, unordered."""


def training(algorithm: str, local: dict[str, Any], sizes: tuple[int, ...] = SIZES, **engine: Any) -> Loop:
    custom = {"data": {"name": "custom"}, "model": {"name": "custom"}}
    everybody = {"participation": {"rate": 1.0}, "local": {"lr": 0.05, **local}}
    spec = make_spec({"rounds": 2, "algorithm": {"name": algorithm}, **everybody, "engine": engine, **custom})
    return make_loop(spec, make_task(spec, module=small_network(), data=uneven_data(sizes=sizes)))


def round_of(run: Loop) -> tuple[Workload, RoundWork]:
    """Return the first round of all clients, in the order of their numbers."""
    clients, algorithm = np.arange(len(SIZES)), run.algorithm
    ctx = run.participation.context(1, clients)
    received = algorithm.broadcast(algorithm.init_server(run.initial), ctx)
    states = [algorithm.init_client(run.initial) for _ in clients]
    work = RoundWork(clients, {**received, "c": 0.1 * run.initial}, states, ctx, [None for _ in clients])
    return Workload(run.task, run.engine.local), work  # type: ignore[attr-defined]


@pytest.mark.parametrize("local", [{"batch": 1000}, {"batch": 50, "epochs": 2}, {"batch": 200, "steps": 3}])
@pytest.mark.parametrize("algorithm", ["scaffold", "mime", "mimelitemom"])
def test_clients_of_unequal_size_give_the_results_of_serial(algorithm: str, local: dict[str, int]) -> None:
    workload, work = round_of(training(algorithm, local, name="serial"))
    for batched, alone in zip(Cohort(workload).train(work), Serial(workload).train(work), strict=True):
        assert batched.steps == alone.steps
        for field in ("message", "state", "loss"):
            torch.testing.assert_close(getattr(batched, field), getattr(alone, field), rtol=1e-4, atol=1e-6)
    for batched, alone in zip(Cohort(workload).probe(work), Serial(workload).probe(work), strict=True):
        torch.testing.assert_close(batched, alone, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("local", [{"batch": 1000}, {"batch": 50, "epochs": 2}, {"batch": 200, "steps": 3}])
def test_less_than_half_of_the_gathered_examples_is_padding(
    local: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    workload, work = round_of(training("mimelitemom", local, name="serial"))
    engine: Engine = Cohort(workload)
    gathered = []

    def gather(self: Cohort, plan: Plan, entries: np.ndarray) -> Any:
        gathered.append(entries.size)
        return original(self, plan, entries)

    original = Cohort._gather
    monkeypatch.setattr(Cohort, "_gather", gather)
    list(engine.train(work))
    needed = sum(SIZES) + sum(sum(workload.local.config.sizes(size)) for size in SIZES)
    assert sum(gathered) < 2 * needed


def test_the_number_of_workers_does_not_change_the_bits_of_clients_of_unequal_size() -> None:
    sizes = tuple(np.random.default_rng(0).integers(1, 300, 70).tolist())
    models = []
    for workers in (1, 2, 3):
        run = training("mimelitemom", {"batch": 100}, sizes, name="cohort", workers=workers)
        state = run.start()
        run.run(state, [])
        models.append(state.server["theta"])
    assert torch.equal(models[0], models[1])
    assert torch.equal(models[0], models[2])


@given(st.integers(1, 200), st.integers(1, 40))
def test_groups_are_as_few_and_as_equal_as_possible(clients: int, largest: int) -> None:
    ctx = Context(1, clients, clients, share=1.0, period=1.0, lr=0.1, server_lr=1.0)
    work = RoundWork(np.arange(clients), {}, [{}] * clients, ctx, [None] * clients)
    groups = [group.cohort for group in work.groups(largest)]
    sizes = list(map(len, groups))
    assert np.array_equal(np.concatenate(groups), work.cohort)
    assert len(groups) == ceil(clients / largest)
    assert max(sizes) <= min(largest, min(sizes) + 1)
