"""Local training: minibatches, the SGD step, clipping and learning-rate schedules."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keel.algorithms.base import Algorithm, hyperparameters
from keel.core.client import LocalConfig, clip_norm_
from keel.core.optimizers import PlainSGD
from keel.core.schedules import LearningRate
from tests.conftest import records_of, uneven_loop


def local_config(**changes: object) -> LocalConfig:
    settings = {"epochs": 1, "steps": None, "batch": 4, "drop_last": False, "clip": None}
    return LocalConfig(**{**settings, **changes})  # type: ignore[arg-type]


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 4))
def test_an_epoch_uses_every_example_once_and_keeps_the_partial_batch(n: int, batch: int, epochs: int) -> None:
    config = local_config(epochs=epochs, batch=batch)
    batches = config.minibatches(n, np.random.default_rng(0))
    assert len(batches) == config.count(n)
    per_epoch = len(batches) // epochs
    for e in range(epochs):
        used = np.concatenate(batches[e * per_epoch : (e + 1) * per_epoch])
        assert sorted(used.tolist()) == list(range(n))


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 30))
def test_the_number_of_steps_does_not_depend_on_the_size_of_the_client(n: int, batch: int, steps: int) -> None:
    assert len(local_config(epochs=None, steps=steps, batch=batch).minibatches(n, np.random.default_rng(0))) == steps


@given(st.integers(1, 40), st.integers(1, 12))
def test_drop_last_keeps_full_batches_and_at_least_one(n: int, batch: int) -> None:
    sizes = [len(b) for b in local_config(batch=batch, drop_last=True).minibatches(n, np.random.default_rng(0))]
    assert sizes == ([batch] * (n // batch) or [n])


def test_an_sgd_step_by_hand() -> None:
    w = torch.tensor([2.0])
    PlainSGD(weight_decay=0.5).step(w, torch.tensor([3.0]), lr=0.1)
    assert w.item() == pytest.approx(2 - 0.1 * (3 + 0.5 * 2))


def test_clipping_scales_only_rows_above_the_norm() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    torch.testing.assert_close(clip_norm_(rows, 1.0), torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]]))


@pytest.mark.parametrize("engine", ["serial", "cohort"])
def test_clipping_bounds_the_step_of_a_round(engine: str) -> None:
    loop = uneven_loop({"rounds": 1, "local": {"clip": 1e-3, "weight_decay": 0.0}, "engine": {"name": engine}})
    state = loop.start()
    loop.run(state)
    steps = 8  # of the largest client
    assert 0 < (state.server["theta"] - loop.initial).norm() <= steps * 0.1 * 1e-3


def test_schedules_by_hand() -> None:
    def rates(name: str) -> list[float]:
        return [LearningRate(0.8, name, 0.5, 4)(t) for t in (1, 2, 3, 4)]  # type: ignore[arg-type]

    assert rates("constant") == [0.8] * 4
    assert rates("linear") == pytest.approx([0.8, 0.6, 0.4, 0.2])
    assert rates("exponential") == pytest.approx([0.8, 0.4, 0.2, 0.1])
    assert [LearningRate(0.8, "linear", 0.5, 4, warmup=3)(t) for t in (1, 2, 3, 4)] == pytest.approx(
        [0.8 / 4, 0.6 * 2 / 4, 0.4 * 3 / 4, 0.2]
    )
    assert rates("cosine") == pytest.approx([0.8, 0.4 * (1 + 2**-0.5), 0.4, 0.4 * (1 - 2**-0.5)])


def test_schedules_reach_the_clients_and_the_server() -> None:
    records = records_of(uneven_loop({"rounds": 4, "local": {"schedule": "linear"}}))
    assert [r["lr"] for r in records] == pytest.approx([0.1, 0.075, 0.05, 0.025])


def test_random_draws_in_report_are_keyed() -> None:
    @hyperparameters
    class Noisy(Algorithm):
        """Adds noise to its report."""

        name, title, paper = "noisy", "Noisy", "none"

        def report(self, path, received, state, ctx):  # type: ignore[no-untyped-def]
            delta = path.start - path.end
            return {"delta": delta + 0.01 * torch.randn_like(delta)}, state

    def model(caller_seed: int) -> torch.Tensor:
        loop = uneven_loop({"algorithm": Noisy(), "rounds": 2})
        state = loop.start()
        torch.manual_seed(caller_seed)
        loop.run(state)
        return state.server["theta"]

    assert torch.equal(model(1), model(2))
