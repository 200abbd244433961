"""The engine `pool`: one worker process per core (or per GPU), one thread each, with messages in shared memory.

Each worker runs `serial` for one client at a time, or `cohort` for one group at a time. Results come in the order of
the cohort, so they have the bits of `serial` or `cohort` whatever the number of workers. Workers are forked: they read
the data of their parent without a copy.
"""

import multiprocessing
import signal
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from math import ceil
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from traceback import format_exc

import numpy as np
import torch
from torch import Tensor

from keel.algorithms.base import ClientState, Message, Path
from keel.core.client import ClientResult
from keel.core.client_state import algorithm_state
from keel.core.devices import cores
from keel.core.engine import CPU, EngineDefaults, RoundSize, RoundWork, Workload
from keel.core.orphans import end_with_parent
from keel.engines import dispatch
from keel.engines.allocator import tune
from keel.engines.cohort import Cohort
from keel.engines.serial import Serial
from keel.engines.shared_memory import Shared, Slot
from keel.errors import KeelError
from keel.signals import handle_in_worker

TRAIN, PROBE, MEASURE = range(3)
REQUEST = struct.Struct("=qq")
"""The operation and the slot; the clients (or the part of the test examples) follow."""
DONE = b"done"
"""The beginning of a worker's reply; the result of an evaluation follows. If it failed, the reply is the reason."""


@dataclass
class PoolWorker:
    """A worker process as its parent sees it."""

    process: BaseProcess
    connection: Connection
    items: list[int] = field(default_factory=list)
    """The items that it was given and has not finished, oldest first."""

    @property
    def load(self) -> int:
        return len(self.items)


EngineMaker = Callable[[], Serial | Cohort]


def on_devices(make: type[Serial] | type[Cohort], workload: Workload, workers: int) -> "Pool":
    """Return a pool with one worker on each of the workload's devices, at most `workers`.

    This process trains nothing and touches no device: CUDA does not survive a fork.
    """
    devices = workload.devices[:workers]
    driver = make(workload.on(CPU))
    driver.group = make.group  # smaller groups are for the cores of a CPU
    return Pool(driver, len(devices), [partial(_make_on, make, workload.on(device)) for device in devices])


def _make_on(make: type[Serial] | type[Cohort], workload: Workload) -> Serial | Cohort:
    """Make the engine of a worker on its device, which becomes the process's current one."""
    if workload.device.type != "cpu":
        torch.get_device_module(workload.device).set_device(workload.device)
    return make(workload)


class Pool(EngineDefaults):
    """Distributes the groups of a cohort over worker processes, each of which runs `engine`.

    Args:
        makers: One function per worker that makes its engine after the fork; by default all run `engine`.
    """

    def __init__(self, engine: Serial | Cohort, workers: int, makers: Sequence[EngineMaker] = ()):
        self.engine, self.count, self.evaluator = engine, workers, engine.evaluator
        self.makers = makers
        self.name = "pool" if isinstance(engine, Serial) else engine.name
        self.group, self.bit_identical = engine.group, engine.bit_identical
        self.weights, self.buffers = engine.model.weights.clone(), engine.model.buffers()
        self.shared: Shared | None = None
        self.workers: list[PoolWorker] = []

    def processes(self, cohort: int) -> int:
        return max(1, min(self.count, ceil(cohort / self.group)))

    def footprint(self, size: RoundSize) -> int:
        rows = min(size.cohort, self.group)
        slots = dispatch.window(1) * rows * (size.model + 3 * size.client_state)
        parent = 8 * size.model + 4 * size.client_state
        return parent + self.processes(size.cohort) * (self.engine.footprint(size) + slots)

    def probe(self, work: RoundWork) -> Iterator[Message]:
        if self._is_small(work):
            yield from self.engine.probe(work)
            return
        shared, groups = self._share(work, training=False), list(work.groups(self.group))
        for slot, group in zip(self._run(shared, PROBE, groups), groups, strict=True):
            for row in range(len(group.cohort)):
                yield slot.read_probe(row)

    def train(self, work: RoundWork) -> Iterator[ClientResult]:
        if self._is_small(work):
            yield from self.engine.train(work)
            return
        shared, groups = self._share(work, training=True), list(work.groups(self.group))
        for slot, group in zip(self._run(shared, TRAIN, groups), groups, strict=True):
            yield from map(slot.read_result, range(len(group.cohort)))

    def measure(self, theta: Tensor, buffers: Tensor | None) -> Iterator[Tensor]:
        shared = self.shared
        if shared is None:
            yield from self.engine.measure(theta, buffers)
            return
        shared.set_model(theta, buffers)
        measured = dispatch.in_order(
            self.evaluator.parts, len(shared.slots), _Call(self, shared, MEASURE, range(self.evaluator.parts))
        )
        for result in measured:
            assert isinstance(result, Tensor)
            yield result

    def close(self) -> None:
        """End the workers. The next round starts new ones."""
        for worker in self.workers:
            worker.connection.close()
            worker.process.kill()
        for worker in self.workers:
            worker.process.join()
        self.workers, self.shared = [], None

    def _is_small(self, work: RoundWork) -> bool:
        """Return whether the cohort is a single group of small models, which the parent trains faster itself."""
        return not self.makers and 1 < self.group >= len(work.cohort)

    def _share(self, work: RoundWork, training: bool) -> Shared:
        """Write the round's broadcast where the workers see it."""
        shared = self.shared
        if shared is None or not shared.fits(work.received, training):
            self.close()
            shared = self.shared = self._start(work, training)
        shared.set_round(work.ctx, work.received)
        return shared

    def _start(self, work: RoundWork, training: bool) -> Shared:
        """Allocate the shared memory for messages like this round's, and fork the workers."""
        empty, local = torch.zeros(0), self.engine.local
        count = min(self.count, max(ceil(len(work.cohort) / self.group), cores()))  # more would stay idle
        shared = Shared.for_round(
            work,
            self._example_report(work) if training else ({}, {}),
            rows=self.group,
            slots=dispatch.window(count),
            probe=local.mechanisms.encoded_form({"gradient": self.weights}, "probe") if local.algorithm.probes else {},
            weights=self.weights,
            buffers=empty if self.buffers is None else self.buffers,
        )
        fork = multiprocessing.get_context("fork")
        pipes = [fork.Pipe() for _ in range(count)]
        ends = [end for pair in pipes for end in pair]
        makers = self.makers or [lambda: self.engine] * count
        for (ours, theirs), make in zip(pipes, makers, strict=False):
            process = fork.Process(target=_work, args=(theirs, ends, make, shared), daemon=True)
            with warnings.catch_warnings():  # Python 3.12 warns of threads that a fork leaves behind; ours need none
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            self.workers.append(PoolWorker(process, ours))
        for _, theirs in pipes:
            theirs.close()
        return shared

    def _example_report(self, work: RoundWork) -> tuple[Message, ClientState]:
        """Return a report like the clients' reports; `report` is pure, so it is called with zeros."""
        zeros, local = torch.zeros_like(self.weights), self.engine.local
        algorithm, state, ctx = local.algorithm, work.client_states[0], work.ctx.for_client(1)
        own = algorithm_state(state)
        step_state = algorithm.init_steps(work.received, own, ctx)
        path = Path(zeros, zeros, mean_gradient=zeros, full_gradient=zeros, step_state=step_state)
        message, reported = algorithm.report(path, work.received, own, ctx)
        kept = {**local.optimizer.init_client(zeros), **local.mechanisms.init_client()}
        return local.mechanisms.encoded_form(message), {**reported, **kept}

    def _run(self, shared: Shared, operation: int, groups: Sequence[RoundWork]) -> Iterator[Slot]:
        """Have the workers process each group; yield the slots in order."""
        for slot in dispatch.in_order(len(groups), len(shared.slots), _Call(self, shared, operation, groups)):
            assert isinstance(slot, Slot)
            yield slot


class _Call:
    """The workers of a pool during one operation."""

    def __init__(self, pool: Pool, shared: Shared, operation: int, items: Sequence[RoundWork] | Sequence[int]):
        self.pool, self.shared, self.operation, self.items = pool, shared, operation, items

    def begin(self, number: int) -> bool:
        worker = dispatch.least_busy(self.pool.workers)
        if worker is None:
            return False
        item = self.items[number]
        if isinstance(item, RoundWork):
            self._slot(number).fill(item)
        payload = item.cohort.astype(np.int64) if isinstance(item, RoundWork) else np.int64(item)
        with _reporting_exit(worker):
            worker.connection.send_bytes(REQUEST.pack(self.operation, self._index(number)) + payload.tobytes())
        worker.items.append(number)
        return True

    def finished(self) -> Iterator[tuple[int, Slot | Tensor]]:
        ready = wait([worker.connection for worker in self.pool.workers])
        for worker in self.pool.workers:
            if worker.connection in ready:
                with _reporting_exit(worker):
                    reply = worker.connection.recv_bytes()
                result = _result(reply)
                number = worker.items.pop(0)
                yield (
                    number,
                    self._slot(number) if self.operation != MEASURE else torch.frombuffer(result, dtype=torch.float64),
                )

    def abandon(self) -> None:
        self.pool.close()

    def _index(self, number: int) -> int:
        return number % len(self.shared.slots)  # an item begins only after the last one in its slot was yielded

    def _slot(self, number: int) -> Slot:
        return self.shared.slots[self._index(number)]


@contextmanager
def _reporting_exit(worker: PoolWorker) -> Iterator[None]:
    """Raise an OSError with the exit code if the worker's process has ended."""
    try:
        yield
    except (EOFError, ConnectionError):
        worker.process.join()
        code = worker.process.exitcode
        raise OSError(f"a worker process ended (exit code {code}); it may have run out of memory") from None


def _result(reply: bytes) -> bytearray:
    """Return what a worker sent after DONE; raise its error if it failed."""
    if reply.startswith(DONE):
        return bytearray(reply[len(DONE) :])
    kind, _, reason = reply.decode().partition("\n")
    raise KeelError(reason) if kind == KeelError.__name__ else RuntimeError(f"in a worker process:\n{reason}")


def _work(connection: Connection, ends: Iterable[Connection], make: EngineMaker, shared: Shared) -> None:
    """Serve requests until the parent is gone: the main function of a worker process."""
    handle_in_worker(signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent handles it
    end_with_parent()
    for end in ends:  # copies made by the fork: while one is open, the end of the parent goes unnoticed
        if end is not connection:
            end.close()
    torch.set_num_threads(1)
    tune()
    make = cache(make)
    with suppress(EOFError, ConnectionError):  # the parent is gone
        while True:
            request = connection.recv_bytes()
            connection.send_bytes(_reply_to(request, make, shared))


def _reply_to(request: bytes, make: EngineMaker, shared: Shared) -> bytes:
    operation, index = REQUEST.unpack_from(request)
    items = np.frombuffer(request, np.int64, offset=REQUEST.size)
    slot = shared.slots[index]
    try:
        engine = make()  # here, so that the parent gets its error
        if operation == MEASURE:
            engine.evaluator.load_weights(shared.theta, shared.buffers if shared.buffers.numel() else None)
            return DONE + engine.evaluator.measure(int(items[0])).numpy().tobytes()
        if operation == PROBE:
            for row, message in enumerate(engine.probe(shared.work(items, slot))):
                slot.write_probe(row, message)
        else:
            for row, result in enumerate(engine.train(shared.work(items, slot))):
                slot.write_result(row, result)
    except KeelError as error:
        return f"{KeelError.__name__}\n{error}".encode()
    except Exception:  # whatever it is, the parent raises it
        return f"\n{format_exc()}".encode()
    return DONE
