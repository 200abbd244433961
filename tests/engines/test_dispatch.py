"""Ordered dispatch, with workers that finish and lose items in random order."""

import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.engines.dispatch import AHEAD, TRIES, Lost, in_order, least_busy


class RandomWorker:
    def __init__(self) -> None:
        self.items: list[int] = []

    @property
    def load(self) -> int:
        return len(self.items)


class RandomWorkers:
    """Finish a random item at a time, and lose some."""

    def __init__(self, count: int, seed: int, losses: float = 0.0):
        self.workers = [RandomWorker() for _ in range(count)]
        self.random, self.losses = random.Random(seed), losses
        self.begun: list[int] = []
        self.lost: list[int] = []
        self.abandoned = False

    def begin(self, number: int) -> bool:
        worker = least_busy(self.workers)
        if worker is None:
            return False
        worker.items.append(number)
        self.begun.append(number)
        return True

    def finished(self) -> Iterator[tuple[int, str | Lost]]:
        worker = self.random.choice([worker for worker in self.workers if worker.items])
        number = worker.items.pop(0)
        if self.random.random() < self.losses and self.lost.count(number) < TRIES - 1:
            self.lost.append(number)
            yield number, Lost("killed")
        else:
            yield number, f"result {number}"

    def abandon(self) -> None:
        self.abandoned = True


@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 20), st.integers(0, 10**6), st.sampled_from([0.0, 0.4]))
def test_results_come_in_order_whatever_finishes_first(
    count: int, workers: int, window: int, seed: int, losses: float
) -> None:
    pool, results = RandomWorkers(workers, seed, losses), []
    for result in in_order(count, window, pool):
        results.append(result)
        assert max(pool.begun) < len(results) + window  # bounded, however early an item finishes
        assert all(worker.load <= AHEAD for worker in pool.workers)
    assert results == [f"result {number}" for number in range(count)]
    assert not pool.abandoned
    assert len(pool.begun) == count + len(pool.lost)
    if not pool.lost:
        assert pool.begun == sorted(pool.begun)


def test_an_item_that_is_lost_too_often_is_an_error() -> None:
    class Deadly(RandomWorkers):
        def finished(self) -> Iterator[tuple[int, str | Lost]]:
            for number, result in super().finished():
                yield number, Lost("killed") if number == 2 else result

    pool = Deadly(1, seed=0)
    with pytest.raises(OSError, match=r"^the same clients were lost with their worker 3 times: killed$"):
        list(in_order(5, 9, pool))
    assert pool.begun.count(2) == TRIES


def test_items_under_way_are_abandoned_with_the_call() -> None:
    pool = RandomWorkers(2, seed=0)
    results = in_order(10, 6, pool)
    next(results)
    results.close()
    assert pool.abandoned
