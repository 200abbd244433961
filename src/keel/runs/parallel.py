"""Several runs at a time, each in its own folder: ended runs are skipped, interrupted ones are resumed."""

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
from typing import Any, TypeAlias, TypeVar, cast

from keel.config.schema import Spec, resolved_spec
from keel.core.devices import cores
from keel.core.records import Summary
from keel.engines.allocator import tune
from keel.engines.ray_cluster import Cluster
from keel.errors import Interrupted
from keel.runs.progress import ProgressCallback, ProgressObserver, RoundProgress
from keel.runs.ray_jobs import ProgressReceiver, ProgressSender, RayExecutor, ray_executor
from keel.runs.run import find_run, resume
from keel.runs.run import run as start_run

T = TypeVar("T")
OnRound: TypeAlias = ProgressCallback
"""Called with the number of the job and the progress of its round."""
ProgressQueue: TypeAlias = "multiprocessing.Queue[tuple[int, RoundProgress]]"
_progress: "ProgressQueue | ProgressSender"
_halted: "Event | ProgressSender"
_interrupted = threading.Event()


@dataclass(frozen=True)
class Job:
    """A spec to run in a folder."""

    spec: Spec
    path: Path


def run_all(jobs: list[Job], workers: int, on_round: OnRound) -> list[Summary]:
    """Run the jobs that have not ended, and return the summaries of all, in order.

    Ctrl-C reaches the workers too: each finishes its round and saves, and jobs that have not started are dropped.
    """
    summaries = {number: _ended(job) for number, job in enumerate(jobs)}
    left = [number for number, summary in summaries.items() if summary is None]
    if left:
        cluster = cluster_of(jobs[number].spec for number in left)
        share, rest = divmod(workers, len(left)) if cluster is None else (1, 0)  # fewer runs than cores share them
        folder = Path(os.path.commonpath([jobs[number].path.absolute().parent for number in left]))
        with executor(min(workers, len(left)), on_round, cluster, folder) as pool:
            futures: dict[int, Future[Summary | None]] = {}
            for position, number in enumerate(left):
                job, processes = jobs[number], max(1, share + (position < rest))
                table = job.spec.model_dump(exclude_none=True)
                futures[number] = pool.submit(_run, number, table, job.path.absolute(), processes)
            pool.wait(futures.values())
            summaries |= {number: result_of(future) for number, future in futures.items()}
    return [cast(Summary, summaries[number]) for number in range(len(jobs))]


class Executor:
    """Worker processes, or jobs of a Ray cluster, that run experiments and send their progress."""

    def __init__(
        self,
        pool: ProcessPoolExecutor | RayExecutor,
        progress: "ProgressQueue | ProgressReceiver",
        on_round: OnRound,
    ):
        self.pool, self.progress, self.on_round = pool, progress, on_round

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T | None]:
        with _sigint_blocked():  # a worker that is still starting could not handle Ctrl-C
            return self.pool.submit(function, *arguments)

    def wait(self, futures: Collection[Future[Any]], until: Callable[[Iterable[bool]], bool] = all) -> None:
        """Forward progress until all futures are done, or with `until=any` one of them; raise the first failure."""
        while True:
            for future in futures:
                if future.done() and (error := future.exception()):
                    raise error
            done = until(future.done() for future in futures)
            try:
                self.on_round(*self.progress.get(timeout=0 if done else 0.1))
            except Empty:
                if done:
                    return


def result_of(future: Future[T | None]) -> T:
    """The result of a job.

    Raises:
        Interrupted: Ctrl-C ended the job, or kept it from starting.
    """
    result = future.result()
    if result is None:
        raise Interrupted
    return result


def cluster_of(specs: Iterable[Spec]) -> Cluster | None:
    """The Ray cluster that all specs name; None where they differ or name none."""
    engines = [spec.engine for spec in specs]
    clusters = {(engine.on_ray, engine.address, engine.gpus, engine.workers) for engine in engines}
    first = engines[0]
    if len(clusters) > 1 or not first.on_ray:
        return None
    return Cluster(first.address, first.gpus, first.workers or cores())


@contextmanager
def executor(size: int, on_round: OnRound, cluster: Cluster | None = None, folder: Path = Path()) -> Iterator[Executor]:
    """An executor with `size` processes, or on a cluster for runs below `folder`.

    If anything fails, each run finishes its round and saves, and jobs that have not started are dropped.
    """
    if cluster is not None:
        with ray_executor(cluster, folder, report_to) as (pool, receiver):
            yield Executor(pool, receiver, on_round)
        return
    context = multiprocessing.get_context("spawn")
    queue, halted = context.Queue(), context.Event()
    with ProcessPoolExecutor(size, context, initializer=_init_worker, initargs=(queue, halted)) as processes:
        try:
            yield Executor(processes, queue, on_round)
        except BrokenProcessPool:
            raise OSError("a worker process died; the same command resumes its runs") from None
        except BaseException as error:
            halted.set()
            processes.shutdown(wait=True, cancel_futures=True)
            if isinstance(error, KeyboardInterrupt):
                raise Interrupted from None
            raise


def report_to(progress: "ProgressQueue | ProgressSender", halted: "Event | ProgressSender") -> None:
    """Set the progress queue and the stop event of this process."""
    global _progress, _halted
    _progress, _halted = progress, halted
    _interrupted.clear()


def run_one(
    number: int, spec: Spec, path: Path, workers: int, enough: Callable[[RoundProgress], bool] = lambda progress: False
) -> Summary:
    """Run or resume one job of a worker, and return its summary.

    Args:
        enough: Called after each round; True stops the run, as a pruner does.
    """
    stopped = threading.Event()

    def report(progress: RoundProgress) -> None:
        _progress.put((number, progress))
        if enough(progress):
            stopped.set()
        if _interrupted.is_set():  # Ctrl-C came before the run could handle it
            signal.raise_signal(signal.SIGINT)

    if _interrupted.is_set():
        raise KeyboardInterrupt
    if (summary := _ended(Job(spec, path))) is not None:
        return summary
    options: dict[str, Any] = {"hooks": [ProgressObserver(report)], "workers": workers}
    options["stop"] = lambda: stopped.is_set() or _halted.is_set()
    run = resume(path, **options) if path.exists() else start_run(spec, out=path, **options)
    if run.status == "interrupted" and not stopped.is_set():
        _interrupted.set()
        raise KeyboardInterrupt
    return run.summary


def _ended(job: Job) -> Summary | None:
    """The summary of a run that has ended; its data, model and engine are not built again."""
    folder = find_run(job.spec, job.path)
    return folder.summary if folder is not None and folder.ended else None


def _run(number: int, table: dict[str, Any], path: Path, workers: int) -> Summary:
    return run_one(number, resolved_spec(table), path, workers)


def _init_worker(queue: ProgressQueue, halted: Event) -> None:
    """Prepare a worker: Ctrl-C sets an event, and never interrupts it while it communicates with its parent."""
    queue.cancel_join_thread()  # a parent that no longer reads must not keep a worker from ending
    report_to(queue, halted)
    signal.signal(signal.SIGINT, lambda *_: _interrupted.set())
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    tune()


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Block Ctrl-C, also for processes that start within, until they unblock it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
