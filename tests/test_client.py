import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keel.client import LocalWork, clipped, descend
from keel.schedules import learning_rate
from tests.conftest import records_of, uneven_training


def work(**changes: object) -> LocalWork:
    settings = {"epochs": 1, "steps": None, "batch": 4, "drop_last": False, "weight_decay": 0.0, "clip": None}
    return LocalWork(**{**settings, **changes})  # type: ignore[arg-type]


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 4))
def test_an_epoch_shows_every_example_once_and_keeps_the_partial_batch(n: int, batch: int, epochs: int) -> None:
    local = work(epochs=epochs, batch=batch)
    batches = local.minibatches(n, np.random.default_rng(0))
    assert len(batches) == local.count(n)
    per_epoch = len(batches) // epochs
    for e in range(epochs):
        seen = np.concatenate(batches[e * per_epoch : (e + 1) * per_epoch])
        assert sorted(seen.tolist()) == list(range(n))


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 30))
def test_steps_are_counted_whatever_the_size_of_the_client(n: int, batch: int, steps: int) -> None:
    assert len(work(epochs=None, steps=steps, batch=batch).minibatches(n, np.random.default_rng(0))) == steps


@given(st.integers(1, 40), st.integers(1, 12))
def test_dropping_the_last_batch_leaves_whole_ones_but_never_none(n: int, batch: int) -> None:
    sizes = [len(b) for b in work(batch=batch, drop_last=True).minibatches(n, np.random.default_rng(0))]
    assert sizes == ([batch] * (n // batch) or [n])


def test_a_step_by_hand() -> None:
    w = torch.tensor([2.0])
    descend(w, torch.tensor([3.0]), lr=0.1, weight_decay=0.5)
    assert w.item() == pytest.approx(2 - 0.1 * (3 + 0.5 * 2))


def test_clipping_scales_rows_that_are_too_long_and_leaves_the_others() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    torch.testing.assert_close(clipped(rows, 1.0), torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]]))


@pytest.mark.parametrize("engine", ["serial", "cohort"])
def test_clipping_bounds_how_far_a_round_can_go(engine: str) -> None:
    training = uneven_training({"rounds": 1, "local": {"clip": 1e-3, "weight_decay": 0.0}, "engine": {"name": engine}})
    position = training.start()
    training.run(position, [])
    longest = 8  # steps of the largest client
    assert 0 < (position.server["theta"] - training.initial).norm() <= longest * 0.1 * 1e-3


def test_schedules_by_hand() -> None:
    def rates(name: str) -> list[float]:
        return [learning_rate(0.8, name, 0.5, t, 4) for t in (1, 2, 3, 4)]  # type: ignore[arg-type]

    assert rates("constant") == [0.8] * 4
    assert rates("linear") == pytest.approx([0.8, 0.6, 0.4, 0.2])
    assert rates("exponential") == pytest.approx([0.8, 0.4, 0.2, 0.1])
    assert rates("cosine") == pytest.approx([0.8, 0.4 * (1 + 2**-0.5), 0.4, 0.4 * (1 - 2**-0.5)])


def test_schedules_reach_the_clients_and_the_server() -> None:
    records = records_of(uneven_training({"rounds": 4, "local": {"schedule": "linear"}}))
    assert [r["lr"] for r in records] == pytest.approx([0.1, 0.075, 0.05, 0.025])
