"""Whole runs as jobs of a Ray cluster: what `parallel.executor` does with processes on one machine.

A run computes on one core of its node and writes its folder itself, so every node has to reach that folder. A run
whose node is lost continues on another one from its checkpoint.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty
from time import monotonic, sleep
from typing import Any, TypeAlias, TypeVar
from uuid import uuid4

from keel.engines.allocator import tune
from keel.engines.ray_cluster import (
    POLL,
    SCHEDULE_TIMEOUT,
    Cluster,
    load_ray,
    node_address,
    one_line,
    this_node,
)
from keel.errors import Interrupted, KeelError
from keel.runs.progress import RoundProgress

T = TypeVar("T")
RETRIES = 3
"""How often a run is started again after its node was lost."""
FORWARDED = ("KEEL_", "WANDB_", "MLFLOW_")
"""Prefixes of the environment variables that a job has as this process does."""


class ProgressBoard:
    """A Ray actor that holds the runs' progress until it is read, and whether they should stop."""

    def __init__(self) -> None:
        self.records: list[tuple[int, RoundProgress]] = []
        self.halted = False

    def is_halted(self) -> bool:
        return self.halted

    def add(self, number: int, record: RoundProgress) -> bool:
        self.records.append((number, record))
        return self.halted

    def read(self) -> list[tuple[int, RoundProgress]]:
        records, self.records = self.records, []
        return records

    def halt(self) -> None:
        self.halted = True


class ProgressSender:
    """A run's end of the board, in place of the queue and the event of a run on one machine."""

    def __init__(self, board: Any):
        self.board, self.halted = board, False

    def put(self, progress: tuple[int, RoundProgress]) -> None:
        self.halted = load_ray().get(self.board.add.remote(*progress))

    def is_set(self) -> bool:
        return self.halted


class ProgressReceiver:
    """The driver's end of the board.

    Args:
        slots: Returns how many runs the nodes that are alive have room for.
    """

    def __init__(self, board: Any, slots: Callable[[], int]):
        self.board, self.slots = board, slots
        self.unread: deque[tuple[int, RoundProgress]] = deque()
        self.due = self.last_slots = monotonic()

    def get(self, *, timeout: float) -> tuple[int, RoundProgress]:
        """Return the oldest progress that has not been read.

        Raises:
            Empty: None came within about `timeout` seconds.
            OSError: Every node has been lost for a long time.
        """
        if not self.unread:
            self._check_nodes()
            sleep(timeout)
            self.unread.extend(load_ray().get(self.board.read.remote()))
        if not self.unread:
            raise Empty
        return self.unread.popleft()

    def _check_nodes(self) -> None:
        if monotonic() < self.due:
            return
        if self.slots() > 0:
            self.last_slots = monotonic()
        if monotonic() > self.last_slots + SCHEDULE_TIMEOUT:
            raise OSError(
                f"Ray: no node has had room for a run for {SCHEDULE_TIMEOUT:g} s; the same command resumes the runs"
            )
        self.due = monotonic() + POLL


Initialise: TypeAlias = Callable[[ProgressSender, ProgressSender], None]
"""Called in a job before its run: sets the progress queue and the stop event."""


class RayExecutor:
    """Submits functions as Ray tasks; Ray queues them until a core is free."""

    def __init__(self, cluster: Cluster, board: Any, marker: Path, initialise: Initialise):
        self.cluster, self.ray = cluster, cluster.ray
        self.board, self.marker, self.initialise = board, marker, initialise
        self.task = self.ray.remote(num_cpus=1, num_gpus=cluster.gpus, max_retries=RETRIES)(_in_job)
        self.refs: list[Any] = []

    def submit(self, function: Callable[..., T], *arguments: Any) -> "Future[T | None]":
        """Start a job. Its result is None if the runs should stop before it has started or ended."""
        variables = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
        ref = self.task.remote(self.board, self.marker, variables, self.initialise, function, *arguments)
        self.refs.append(ref)
        return ref.future()

    def stop(self) -> None:
        """Let each run finish its round and save, and drop the jobs that have not started.

        Runs whose node is lost are not waited for if no other node can continue them.
        """
        with suppress(self.ray.exceptions.RayError):  # the error that led here is the one to raise
            self.ray.get(self.board.halt.remote())
            left = self.refs
            while left and self.cluster.slots_now() > 0:
                _, left = self.ray.wait(left, num_returns=len(left), timeout=POLL)


@contextmanager
def ray_executor(
    cluster: Cluster, folder: Path, initialise: Initialise
) -> Iterator[tuple[RayExecutor, ProgressReceiver]]:
    """An executor for runs below `folder`. If anything fails, each run finishes its round and saves."""
    cluster.slots()
    ray = cluster.ray
    try:
        with _marker(folder) as marker:
            board = _board(ray)
            executor = RayExecutor(cluster, board, marker, initialise)
            try:
                yield executor, ProgressReceiver(board, cluster.slots_now)
            except BaseException:  # also Ctrl-C: every run saves its last round
                executor.stop()
                raise
    except KeyboardInterrupt:
        raise Interrupted from None
    except ray.exceptions.RayTaskError as error:
        raise KeelError(str(error.cause)) if isinstance(error.cause, KeelError) else RuntimeError(error) from None
    except ray.exceptions.RayError as error:
        raise OSError(f"Ray: {one_line(error)}; the same command resumes its runs") from None
    finally:
        cluster.leave()


def _board(ray: Any) -> Any:
    """The board on the driver's node, restarted if its process dies; the progress it held is then lost."""
    options = {"max_restarts": -1, "max_task_retries": -1, "scheduling_strategy": this_node()}
    return ray.remote(num_cpus=0, **options)(ProgressBoard).remote()


@contextmanager
def _marker(folder: Path) -> Iterator[Path]:
    """A file in the runs' folder, by which a node recognises that it reaches the same folder."""
    folder.mkdir(parents=True, exist_ok=True)
    marker = folder.absolute() / f".{uuid4().hex}"
    marker.touch()
    try:
        yield marker
    finally:
        marker.unlink(missing_ok=True)


def _in_job(
    board: Any,
    marker: Path,
    variables: dict[str, str],
    initialise: Initialise,
    function: Callable[..., T],
    *arguments: Any,
) -> T | None:
    """Run a function in a Ray worker; None if the runs should stop before it has started or ended."""
    if not marker.exists():
        raise KeelError(
            f"--out must be a folder that every node reaches ({node_address()} does not reach {str(marker.parent)!r})"
        )
    os.environ.update(variables)
    tune()
    if load_ray().get(board.is_halted.remote()):
        return None
    sender = ProgressSender(board)
    initialise(sender, sender)
    try:
        return function(*arguments)
    except KeyboardInterrupt:  # Ctrl-C, which the driver received too
        return None
