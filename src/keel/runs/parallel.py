"""Several runs at a time, each in its own folder: ended runs are skipped, interrupted ones are resumed.

A command spawns its worker processes. A call in Python forks them, so that they inherit its objects without pickling,
and so that a script needs no `if __name__ == "__main__"`. Where processes cannot be forked, its runs are executed one
after the other in its own process.
"""

import logging
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from queue import Empty
from time import sleep
from typing import Any, TypeAlias, TypeVar, cast

import torch

from keel.config.schema import CUSTOM, Spec, algorithm_table, resolved_spec
from keel.core.devices import cores, find_device
from keel.core.orphans import end_with_parent
from keel.core.records import Summary
from keel.engines import FORKS
from keel.engines.allocator import tune
from keel.engines.ray_cluster import Cluster
from keel.errors import Interrupted, KeelError
from keel.runs.objects import RunObjects
from keel.runs.progress import ProgressCallback, ProgressObserver, RoundProgress
from keel.runs.ray_jobs import ProgressReceiver, ProgressSender, RayExecutor, ray_executor
from keel.runs.result import Run
from keel.runs.run import find_run, resume
from keel.runs.run import run as start_run
from keel.signals import blocked, handle_in_worker, is_ending, is_urgent, recorded

log = logging.getLogger(__name__)
T = TypeVar("T")
OnRound: TypeAlias = ProgressCallback
"""Called with the number of the job and the progress of its round."""
ProgressQueue: TypeAlias = "multiprocessing.Queue[tuple[int, RoundProgress]]"
_progress: "ProgressQueue | ProgressSender | ThisProcess"
_halted: "Event | ProgressSender | threading.Event" = threading.Event()
_interrupted = threading.Event()
_objects: RunObjects | None = None
_inherited: Callable[..., Any]


@dataclass(frozen=True)
class Job:
    """A spec to run in a folder."""

    spec: Spec
    path: Path
    title: str | None = None
    """The method's name in reports, if it is not the algorithm's."""


def run_all(jobs: list[Job], workers: int, on_round: OnRound, objects: RunObjects | None = None) -> list[Summary]:
    """Run the jobs that have not ended, and return the summaries of all, in order.

    After Ctrl-C, SIGTERM or SIGHUP each run finishes its round and saves, and jobs that have not started are dropped. A
    second signal ends the workers immediately; their runs continue from their last checkpoints.

    Args:
        objects: What a call in Python passes to each run; None for a command.
    """
    summaries = {number: ended_summary(job, objects) for number, job in enumerate(jobs)}
    if objects is not None:
        for number, summary in summaries.items():
            if summary is not None:
                on_round(number, {"round": summary["rounds"]})
    left = {number: jobs[number] for number, summary in summaries.items() if summary is None}
    if left:
        summaries |= _run_left(left, workers, on_round, objects)
    return [cast(Summary, summaries[number]) for number in range(len(jobs))]


def _run_left(jobs: dict[int, Job], workers: int, on_round: OnRound, objects: RunObjects | None) -> dict[int, Summary]:
    """Run these jobs, and return their summaries by number."""
    cluster = _cluster_for(jobs.values(), objects)
    by_table = objects is None or cluster is not None
    share, rest = divmod(workers, len(jobs)) if cluster is None else (1, 0)  # fewer runs than cores share them
    if not by_table and not can_fork():
        share, rest = workers, 0  # one run at a time has all processes
    folder = Path(os.path.commonpath([job.path.absolute().parent for job in jobs.values()]))
    work = _run if by_table else partial(_run_job, jobs)
    with executor(min(workers, len(jobs)), on_round, work, cluster, folder, objects) as pool:
        futures: dict[int, Future[Summary | None]] = {}
        for position, (number, job) in enumerate(jobs.items()):
            table = (job.spec.model_dump(exclude_none=True), job.path.absolute(), job.title) if by_table else ()
            futures[number] = pool.submit(number, max(1, share + (position < rest)), *table)
        pool.wait(futures.values())
        return {number: result_of(future) for number, future in futures.items()}


def _cluster_for(jobs: Collection[Job], objects: RunObjects | None) -> Cluster | None:
    """The Ray cluster of the jobs; None if they need Python objects, which a cluster does not inherit."""
    if objects is not None and (objects.hooks or any(_uses_objects(job, objects) for job in jobs)):
        return None
    return cluster_of(job.spec for job in jobs)


class Executor:
    """Worker processes, or jobs of a Ray cluster, that run experiments and send their progress."""

    def __init__(
        self,
        pool: ProcessPoolExecutor | RayExecutor,
        progress: "ProgressQueue | ProgressReceiver",
        on_round: OnRound,
        work: Callable[..., Any],
    ):
        self.pool, self.progress, self.on_round, self.work = pool, progress, on_round, work
        self.futures: list[Future[Any]] = []
        self.workers: set[BaseProcess] = set()

    def submit(self, *arguments: Any) -> Future[Any]:
        """Call `work` with these arguments in a worker."""
        with blocked(), warnings.catch_warnings():  # a worker that is starting could not handle signals
            # Python 3.12 warns of threads that a fork leaves behind; the workers need none
            warnings.simplefilter("ignore", DeprecationWarning)
            others = set(multiprocessing.active_children())
            self.futures.append(self.pool.submit(self.work, *arguments))
            self.workers |= set(multiprocessing.active_children()) - others
            return self.futures[-1]

    def finish(self) -> None:
        """Drop the jobs that have not started, and wait for the others, or for a second signal."""
        for future in self.futures:
            future.cancel()
        while not is_urgent() and not all(future.done() for future in self.futures):
            sleep(0.05)

    def kill_workers(self) -> None:
        """Kill the worker processes. What they run continues from its last checkpoint."""
        for worker in self.workers:
            worker.kill()

    def wait(self, futures: Collection[Future[Any]], until: Callable[[Iterable[bool]], bool] = all) -> None:
        """Forward progress until all futures are done, or with `until=any` one of them; raise the first failure."""
        while True:
            if is_ending():
                raise KeyboardInterrupt
            for future in futures:
                if future.done() and (error := future.exception()):
                    raise error
            done = until(future.done() for future in futures)
            try:
                self.on_round(*self.progress.get(timeout=0.1))  # also when done: the last rounds may be on their way
            except Empty:
                if done:
                    return


class ThisProcess:
    """An executor without worker processes: a job runs when it is submitted."""

    def __init__(self, on_round: OnRound, work: Callable[..., Any], objects: RunObjects):
        self.on_round, self.work = on_round, work
        report_to(self, threading.Event(), objects)

    def put(self, progress: tuple[int, RoundProgress]) -> None:
        """Forward the progress of the job that is running."""
        self.on_round(*progress)

    def submit(self, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(self.work(*arguments))
        return future

    def wait(self, futures: Collection[Future[Any]], until: Callable[[Iterable[bool]], bool] = all) -> None:
        """Return at once: all jobs are done."""


def can_fork() -> bool:
    """Whether worker processes can be forked: on Linux, without an accelerator, whose state does not survive a fork."""
    return FORKS and find_device("auto").type == "cpu"


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


def _uses_objects(job: Job, objects: RunObjects | None) -> bool:
    """Whether the result of a run depends on Python objects."""
    return objects is not None and (objects.used or _own_algorithm(job.spec))


def _own_algorithm(spec: Spec) -> bool:
    """Whether the algorithm was passed as an object, and cannot be found by name."""
    return algorithm_table(spec.algorithm)["name"] == CUSTOM


@contextmanager
def executor(
    size: int,
    on_round: OnRound,
    work: Callable[..., Any],
    cluster: Cluster | None = None,
    folder: Path = Path(),
    objects: RunObjects | None = None,
) -> Iterator[Executor | ThisProcess]:
    """An executor with `size` processes, or on a cluster for runs below `folder`.

    If anything fails, each run finishes its round and saves, and jobs that have not started are dropped.

    Args:
        work: The function that every job calls; forked workers inherit it.
        objects: What a call in Python passes to each run; None for a command.
    """
    if cluster is not None:
        with ray_executor(cluster, folder, report_to) as (pool, receiver):
            yield Executor(pool, receiver, on_round, work)
    elif objects is None:
        with _worker_processes("spawn", size, (), on_round, work) as workers:
            yield workers
    elif can_fork():
        with _worker_processes("fork", size, (objects, work), on_round, _call_inherited) as workers:
            yield workers
    else:
        log.warning("runs are executed one after the other: worker processes require Linux without an accelerator")
        try:
            yield ThisProcess(on_round, work, objects)
        except KeyboardInterrupt:
            raise Interrupted from None
        finally:
            _release_objects()


def _release_objects() -> None:
    """Forget the Python objects of the last call: data can be large."""
    global _objects
    _objects = None


@contextmanager
def _worker_processes(
    method: str, size: int, inherited: tuple[Any, ...], on_round: OnRound, work: Callable[..., Any]
) -> Iterator[Executor]:
    """An executor with worker processes."""
    context: Any = multiprocessing.get_context(method)
    queue, halted = context.Queue(), context.Event()
    arguments = (queue, halted, *inherited)
    with recorded(), ProcessPoolExecutor(size, context, initializer=_init_worker, initargs=arguments) as processes:
        pool = Executor(processes, queue, on_round, work)
        try:
            yield pool
        except BrokenProcessPool:
            if is_ending():
                raise Interrupted from None
            raise OSError("a worker process died; the same command resumes its runs") from None
        except BaseException as error:
            halted.set()
            pool.finish()
            if isinstance(error, KeyboardInterrupt):
                raise Interrupted from None
            raise
        finally:
            # ProcessPoolExecutor waits for its workers, and they for ever for a lock that one of them held when it died
            pool.kill_workers()


def report_to(
    progress: "ProgressQueue | ProgressSender | ThisProcess",
    halted: "Event | ProgressSender | threading.Event",
    objects: RunObjects | None = None,
) -> None:
    """Set the progress queue, the stop event and the Python objects of this process's runs."""
    global _progress, _halted, _objects
    _progress, _halted, _objects = progress, halted, objects
    _interrupted.clear()


def run_one(
    number: int, job: Job, workers: int, enough: Callable[[RoundProgress], bool] = lambda progress: False
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

    if _interrupted.is_set() or _halted.is_set():
        raise KeyboardInterrupt
    if (summary := ended_summary(job, _objects)) is not None:
        return summary
    run = _run_or_resume(number, job, workers, report, stopped)
    if run.status == "interrupted" and not stopped.is_set():
        _interrupted.set()
        raise KeyboardInterrupt
    return run.summary


def _run_or_resume(
    number: int, job: Job, workers: int, report: Callable[[RoundProgress], None], stopped: threading.Event
) -> Run:
    spec, path = job.spec, job.path
    options: dict[str, Any] = {} if _objects is None else _objects.for_seed(spec.seed)
    options |= {"hooks": [*(_objects.hooks if _objects else []), ProgressObserver(report)], "workers": workers}
    options["stop"] = lambda: stopped.is_set() or _halted.is_set()
    folder = find_run(spec, path)
    if folder is None:
        run = start_run(spec, out=path, title=job.title, **options)
    else:
        ended = folder.ended
        run = resume(path, algorithm=spec.algorithm if _own_algorithm(spec) else None, **options)
        if ended:  # its objects are the same
            _progress.put((number, {"round": run.summary["rounds"]}))
    return run


def ended_summary(job: Job, objects: RunObjects | None) -> Summary | None:
    """The summary of a run that has ended; its data, model and engine are not built again.

    None if the run depends on Python objects: then it is resumed, which checks that they are the same.
    """
    folder = find_run(job.spec, job.path)
    return folder.summary if folder is not None and folder.ended and not _uses_objects(job, objects) else None


def _run(number: int, workers: int, table: dict[str, Any], path: Path, title: str | None) -> Summary:
    return run_one(number, Job(resolved_spec(table), path, title), workers)


def _run_job(jobs: dict[int, Job], number: int, workers: int) -> Summary:
    return run_one(number, jobs[number], workers)


def _call_inherited(*arguments: Any) -> Any:
    """Call the function that this worker inherited. Errors of user code become ones that can be sent to the parent."""
    try:
        return _inherited(*arguments)
    except Exception as error:
        if type(error).__module__ in ("builtins", KeelError.__module__):
            raise
        raise RuntimeError(f"{type(error).__name__}: {error}") from error  # its class may exist in this process only


def _init_worker(
    queue: ProgressQueue, halted: Event, objects: RunObjects | None = None, work: Callable[..., Any] = _run
) -> None:
    """Prepare a worker: a signal sets an event, and never interrupts it while it communicates with its parent."""
    global _inherited
    queue.cancel_join_thread()  # a parent that no longer reads must not keep a worker from ending
    report_to(queue, halted, objects)
    if objects is not None:
        _inherited = work
        torch.set_num_threads(1)  # a forked process lacks the threads of its parent, and would wait for them
    handle_in_worker(lambda *_: _interrupted.set())
    end_with_parent()
    tune()
