"""Ordered dispatch, which `pool` and `ray` share: items begin in order, results are yielded in the same order."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol, TypeVar

AHEAD = 2
"""Items that a worker has at a time: the one it computes and the next, so that it does not wait for the parent."""
TRIES = 3
"""How often an item is lost with its worker before the run fails."""


class Worker(Protocol):
    @property
    def load(self) -> int:
        """The number of items that it was given and has not finished."""


AnyWorker = TypeVar("AnyWorker", bound=Worker)
Result = TypeVar("Result", covariant=True)


@dataclass(frozen=True)
class Lost:
    """Takes the place of a result that was lost with its worker."""

    reason: str


class Workers(Protocol[Result]):
    """The processes or actors that compute the items of one call."""

    def begin(self, number: int) -> bool:
        """Give an item to a worker. Return False if none is free."""

    def finished(self) -> Iterable[tuple[int, Result | Lost]]:
        """Wait for a change, and return the items that are finished or lost since the last call with their results."""

    def abandon(self) -> None:
        """Discard the items that are under way, whose results nobody will read."""


def window(workers: int) -> int:
    """Return how many items may be unfinished or waiting for an earlier one, so that `workers` workers are busy."""
    return (AHEAD + 1) * workers


def least_busy(workers: Iterable[AnyWorker]) -> AnyWorker | None:
    """Return the worker with the fewest items, or None if all have as many as they may have."""
    free = [worker for worker in workers if worker.load < AHEAD]
    return min(free, key=lambda worker: worker.load, default=None)


def in_order(count: int, window: int, workers: Workers[Result]) -> Iterator[Result]:
    """Have items 0 to `count` - 1 computed, and yield their results in this order.

    An item begins only when fewer than `window` items lie between it and the next result to yield, so that results that
    finished early do not accumulate. A lost item begins again.

    Raises:
        OSError: An item was lost `TRIES` times.
    """
    todo = list(range(count))  # sorted, so it is a heap
    results: dict[int, Result] = {}
    under_way: set[int] = set()
    losses = Counter[int]()
    try:
        for due in range(count):
            while due not in results:
                while todo and todo[0] < due + window and workers.begin(todo[0]):
                    under_way.add(heappop(todo))
                for number, result in workers.finished():
                    under_way.discard(number)
                    if not isinstance(result, Lost):
                        results[number] = result
                        continue
                    losses[number] += 1
                    if losses[number] >= TRIES:
                        raise OSError(f"the same clients were lost with their worker {TRIES} times: {result.reason}")
                    heappush(todo, number)
            yield results.pop(due)
    finally:
        if under_way:
            workers.abandon()
