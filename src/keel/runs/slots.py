"""Whole runs on a Ray cluster, one in each slot: what `batch.crew` is on one machine.

A run computes in its slot alone and writes its folder itself, so that the folder has to be one that every node reaches.
A run whose slot is lost goes on elsewhere from its checkpoint.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty
from time import sleep
from typing import Any
from uuid import uuid4

from keel.engines.allocator import tune
from keel.engines.cluster import Cluster, load_ray, one_line
from keel.errors import KeelError, Stopped
from keel.rounds import Record

TRIES = 3
"""How often a run is begun again whose slot is lost."""
PASSED_ON = ("KEEL_", "WANDB_", "MLFLOW_")
"""Beginnings of the names of environment variables that a slot is to have as this process has them."""


class Board:
    """An actor: what the runs tell, until it is read, and whether they are to stop."""

    def __init__(self) -> None:
        self.told: list[tuple[int, Record]] = []
        self.halted = False

    def is_halted(self) -> bool:
        return self.halted

    def tell(self, number: int, record: Record) -> bool:
        self.told.append((number, record))
        return self.halted

    def read(self) -> list[tuple[int, Record]]:
        told, self.told = self.told, []
        return told

    def halt(self) -> None:
        self.halted = True


class Teller:
    """A run's end of the board: stands for the queue and the event that a run on one machine has."""

    def __init__(self, board: Any):
        self.board, self.halted = board, False

    def put(self, told: tuple[int, Record]) -> None:
        self.halted = load_ray().get(self.board.tell.remote(*told))

    def is_set(self) -> bool:
        return self.halted


class Listener:
    """The driver's end of the board."""

    def __init__(self, board: Any):
        self.board = board
        self.unread: deque[tuple[int, Record]] = deque()

    def get(self, *, timeout: float) -> tuple[int, Record]:
        if not self.unread:
            sleep(timeout)
            self.unread.extend(load_ray().get(self.board.read.remote()))
        if not self.unread:
            raise Empty
        return self.unread.popleft()


class Slots:
    """Takes work as an executor does; Ray lets it wait until a slot is free."""

    def __init__(self, cluster: Cluster, board: Any, mark: Path):
        self.ray, self.board, self.mark = cluster.ray, board, mark
        self.begin = self.ray.remote(num_cpus=1, num_gpus=cluster.gpus, max_retries=TRIES)(_in_slot)
        self.refs: list[Any] = []

    def submit(self, function: Callable[..., dict[str, Any]], *arguments: Any) -> "Future[dict[str, Any]]":
        passed_on = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
        ref = self.begin.remote(self.board, self.mark, passed_on, function, *arguments)
        self.refs.append(ref)
        return ref.future()

    def stop(self) -> None:
        """Lets each run finish its round and save, and leaves out what had not begun."""
        with suppress(self.ray.exceptions.RayError):  # what went wrong first is what is said
            self.ray.get(self.board.halt.remote())
            if self.refs:
                self.ray.wait(self.refs, num_returns=len(self.refs))


@contextmanager
def slots(cluster: Cluster, place: Path) -> Iterator[tuple[Slots, Listener]]:
    """Room for runs below `place`. If anything fails each finishes its round and saves."""
    cluster.slots()
    ray = cluster.ray
    try:
        with _marked(place) as mark:
            board = _board(ray)
            room = Slots(cluster, board, mark)
            try:
                yield room, Listener(board)
            except BaseException:  # also Ctrl-C: no run is left without its last round
                room.stop()
                raise
    except KeyboardInterrupt:
        raise Stopped from None
    except ray.exceptions.RayTaskError as error:
        raise KeelError(str(error.cause)) if isinstance(error.cause, KeelError) else RuntimeError(error) from None
    except ray.exceptions.RayError as error:
        raise OSError(f"Ray: {one_line(error)}; the same command goes on where it was") from None
    finally:
        cluster.leave()


def _board(ray: Any) -> Any:
    """On the driver's own node, whose loss alone is the end; what it was told may be lost with its process."""
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    lasting = {"max_restarts": -1, "max_task_retries": -1, "scheduling_strategy": here}
    return ray.remote(num_cpus=0, **lasting)(Board).remote()


@contextmanager
def _marked(place: Path) -> Iterator[Path]:
    """A file in the folder of the runs, by which a node sees that it is the same folder there."""
    place.mkdir(parents=True, exist_ok=True)
    mark = place.absolute() / f".{uuid4().hex}"
    mark.touch()
    try:
        yield mark
    finally:
        mark.unlink(missing_ok=True)


def _in_slot(
    board: Any, mark: Path, passed_on: dict[str, str], function: Callable[..., dict[str, Any]], *arguments: Any
) -> dict[str, Any]:
    from keel.runs import batch

    if not mark.exists():
        raise KeelError(
            f"--out: {str(mark.parent)!r} is not the same on {load_ray().util.get_node_ip_address()}; accepted: a "
            "folder that every node reaches"
        )
    os.environ.update(passed_on)
    tune()
    if load_ray().get(board.is_halted.remote()):
        return {}
    teller = Teller(board)
    batch.report_to(teller, teller)
    try:
        return function(*arguments)
    except KeyboardInterrupt:  # Ctrl-C, which the driver has heard too
        return {}
