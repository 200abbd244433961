"""Many runs over the cores, each in its own folder: those that exist are not run again, stopped ones go on."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from queue import Empty
from typing import Any, TypeAlias

from keel.engines import Cluster, cores
from keel.engines.allocator import tune
from keel.errors import Stopped
from keel.rounds import Record
from keel.runs.folder import RunFolder
from keel.runs.run import ensure
from keel.runs.slots import Listener, Slots, Teller, slots
from keel.runs.spec import Spec, resolved_spec

TOLD = ("round", "bytes_down", "bytes_up", "accuracy", "diverged")
"""What is told of a round while it goes on."""
Rounds: TypeAlias = "multiprocessing.Queue[tuple[int, Record]]"
Telling: TypeAlias = "Rounds | Teller"
Hearing: TypeAlias = "Rounds | Listener"
_progress: Telling
_halted: Event | Teller
_stopped = threading.Event()


@dataclass(frozen=True)
class Job:
    spec: Spec
    path: Path


def run_all(jobs: list[Job], workers: int, on_round: Callable[[int, Record], None]) -> list[dict[str, Any]]:
    """The summaries of all jobs, in their order. `on_round` hears of every round (job number, record).

    Ctrl-C reaches the workers too: each finishes its round and saves, and what had not begun is left out.
    """
    cluster = cluster_of(job.spec for job in jobs)
    count, more = divmod(workers, len(jobs)) if cluster is None else (1, 0)  # fewer runs than cores share them out
    place = Path(os.path.commonpath([job.path.absolute().parent for job in jobs]))
    with crew(min(workers, len(jobs)), on_round, cluster, place) as hands:
        tables = [job.spec.model_dump(exclude_none=True) for job in jobs]
        hand = [max(1, count + (i < more)) for i in range(len(jobs))]
        waiting = [hands.submit(_run, i, tables[i], job.path.absolute(), hand[i]) for i, job in enumerate(jobs)]
        hands.follow(waiting)
        return [future.result() for future in waiting]


class Crew:
    """Worker processes, or slots of a cluster, that run experiments and tell of each round."""

    def __init__(self, pool: ProcessPoolExecutor | Slots, queue: Hearing, on_round: Callable[[int, Record], None]):
        self.pool, self.queue, self.on_round = pool, queue, on_round

    def submit(self, function: Callable[..., dict[str, Any]], *arguments: Any) -> Future[dict[str, Any]]:
        with _uninterrupted():  # a worker that is still starting could not answer Ctrl-C
            return self.pool.submit(function, *arguments)

    def follow(
        self, waiting: Collection[Future[dict[str, Any]]], enough: Callable[[Iterable[bool]], bool] = all
    ) -> None:
        """Listens until all of them are done, or `any`; the first that failed is raised."""
        while True:
            for future in waiting:
                if future.done() and (error := future.exception()):
                    raise error
            ended = enough(future.done() for future in waiting)
            try:
                self.on_round(*self.queue.get(timeout=0 if ended else 0.1))
            except Empty:
                if ended:
                    return


def cluster_of(specs: Iterable[Spec]) -> Cluster | None:
    """The cluster that all of them are to run on; None where they do not agree on one."""
    engines = [spec.engine for spec in specs]
    places = {(engine.on_ray, engine.address, engine.gpus, engine.workers) for engine in engines}
    first = engines[0]
    if len(places) > 1 or not first.on_ray:
        return None
    return Cluster(first.address, first.gpus, first.workers or cores())


@contextmanager
def crew(
    size: int, on_round: Callable[[int, Record], None], cluster: Cluster | None = None, place: Path = Path()
) -> Iterator[Crew]:
    """So many processes, or the slots of a cluster for runs below `place`.

    If anything fails each finishes its round and saves; what had not begun is left out.
    """
    if cluster is not None:
        with slots(cluster, place) as (room, listener):
            yield Crew(room, listener, on_round)
        return
    context = multiprocessing.get_context("spawn")
    queue, halted = context.Queue(), context.Event()
    with ProcessPoolExecutor(size, context, initializer=_begin, initargs=(queue, halted)) as pool:
        try:
            yield Crew(pool, queue, on_round)
        except BrokenProcessPool:
            raise OSError("a worker process died; the same command goes on where it was") from None
        except BaseException as error:
            halted.set()
            pool.shutdown(wait=True, cancel_futures=True)
            if isinstance(error, KeyboardInterrupt):
                raise Stopped from None
            raise


def report_to(progress: Telling, halted: Event | Teller) -> None:
    """Whom the runs of this process tell, and who tells them to stop."""
    global _progress, _halted
    _progress, _halted = progress, halted
    _stopped.clear()


def _begin(queue: Rounds, halted: Event) -> None:
    """A worker: Ctrl-C is noted, and never breaks it between two runs, where it talks with its parent."""
    queue.cancel_join_thread()  # a parent that has stopped listening must not keep a worker from ending
    report_to(queue, halted)
    signal.signal(signal.SIGINT, lambda *_: _stopped.set())
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    tune()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits, also for the processes that are begun within, until they say otherwise."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(number: int, table: dict[str, Any], path: Path, workers: int) -> dict[str, Any]:
    return run_one(number, resolved_spec(table), path, workers)


def run_one(
    number: int, spec: Spec, path: Path, workers: int, enough: Callable[[Record], bool] = lambda record: False
) -> dict[str, Any]:
    """One run of a worker's, and its summary; `enough` is asked after each round whether to leave it at that."""
    left = threading.Event()

    def follow(record: Record, *_: Any) -> None:
        _progress.put((number, {name: record[name] for name in TOLD if name in record}))
        if enough(record):
            left.set()
        if _stopped.is_set():  # Ctrl-C came before the run could hear it
            signal.raise_signal(signal.SIGINT)

    if _stopped.is_set():
        raise KeyboardInterrupt
    run = ensure(spec, path, hooks=[follow], workers=workers, stop=lambda: left.is_set() or _halted.is_set())
    if run.status == "interrupted" and not left.is_set():
        _stopped.set()
        raise KeyboardInterrupt
    return run.summary


def read_runs(paths: list[Path]) -> list[RunFolder]:
    """The run folders among `paths` and below them; hidden ones are not looked at."""
    folders = []
    for path in paths:
        below = [path]
        if not (path / "spec.toml").is_file():
            found = sorted(spec.parent for spec in path.rglob("spec.toml"))
            below = [p for p in found if not any(part.startswith(".") for part in p.relative_to(path).parts)]
        folders += [RunFolder.open(p) for p in below or [path]]
    return folders
