"""Many runs over the cores, each in its own folder: those that exist are not run again, stopped ones go on."""

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import Any

from keel.engines.allocator import tune
from keel.errors import Stopped
from keel.rounds import Record
from keel.runs.folder import RunFolder
from keel.runs.run import ensure
from keel.runs.spec import Spec, resolved_spec

_progress: "multiprocessing.Queue[tuple[int, Record]]"
_stopped = threading.Event()


@dataclass(frozen=True)
class Job:
    spec: Spec
    path: Path


def run_all(jobs: list[Job], workers: int, on_round: Callable[[int, Record], None]) -> list[dict[str, Any]]:
    """The summaries of all jobs, in their order. `on_round` hears of every round (job number, record).

    Ctrl-C reaches the workers too: each finishes its round and saves, and what had not begun is left out.
    """
    context = multiprocessing.get_context("spawn")
    each = max(1, workers // len(jobs))  # fewer runs than cores share them out
    queue = context.Queue()
    pool = ProcessPoolExecutor(min(workers, len(jobs)), context, initializer=_begin, initargs=(queue,))
    with pool:
        with _uninterrupted():  # a worker that is still starting could not answer Ctrl-C
            waiting = [
                pool.submit(_run, i, job.spec.model_dump(exclude_none=True), job.path, each)
                for i, job in enumerate(jobs)
            ]
        try:
            _follow(waiting, queue, on_round)
            return [future.result() for future in waiting]
        except KeyboardInterrupt:
            pool.shutdown(wait=True, cancel_futures=True)
            raise Stopped from None
        except BrokenProcessPool:
            raise OSError("a worker process died; the same command goes on where it was") from None


def _follow(
    waiting: list[Future[dict[str, Any]]],
    queue: "multiprocessing.Queue[tuple[int, Record]]",
    on_round: Callable[[int, Record], None],
) -> None:
    while True:
        ended = all(future.done() for future in waiting)
        try:
            while True:
                on_round(*queue.get(timeout=0 if ended else 0.1))
        except Empty:
            if ended:
                return


def _begin(queue: "multiprocessing.Queue[tuple[int, Record]]") -> None:
    """A worker: Ctrl-C is noted, and never breaks it between two runs, where it talks with its parent."""
    global _progress
    _progress = queue
    _stopped.clear()
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
    def follow(record: Record, *_: Any) -> None:
        _progress.put((number, record))
        if _stopped.is_set():  # Ctrl-C came before the run could hear it
            signal.raise_signal(signal.SIGINT)

    if _stopped.is_set():
        raise KeyboardInterrupt
    run = ensure(resolved_spec(table), path, hooks=[follow], workers=workers)
    if run.status == "interrupted":
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
