"""All cores: one lasting worker for each, one thread each, messages in memory that they share.

Each worker is `serial`, or `cohort`, for a part of the cohort at a time: one client, or one group of them. Results come
in the order of the cohort, so that the bits are theirs whatever the number of workers. Workers are forked: they see the
data of their parent, not copies.
"""

import multiprocessing
import signal
import struct
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, field
from math import ceil
from mmap import mmap
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from traceback import format_exc

import numpy as np
import torch
from torch import Tensor

from keel.algorithms.base import Context, Memory, Message, Path
from keel.client import ClientResult
from keel.devices import cores
from keel.engines.allocator import tune
from keel.engines.base import RoundWork, Simulated
from keel.engines.cohort import Cohort
from keel.engines.serial import Serial
from keel.errors import KeelError

AHEAD = 2
"""Orders that a worker has at a time: one that it works on and one that it goes on with."""
TRAIN, PROBE, MEASURE = range(3)
ORDER = struct.Struct("=qq")
"""What is to be done, in which slot; the clients (or the part of the test examples) follow."""
DONE = b"done"
"""What a worker answers; where it failed, the reason comes instead."""


@dataclass(frozen=True)
class Slot:
    """Where a group's round is handed over, a row for each client: what they know goes in, what they gave comes out."""

    memory: Memory
    message: Message
    kept: Memory
    gradient: Tensor
    steps: Tensor
    loss: Tensor
    buffers: Tensor


@dataclass(frozen=True)
class Shared:
    """The memory that parent and workers both see."""

    ctx: Tensor
    received: Message
    slots: list[Slot]
    theta: Tensor
    buffers: Tensor
    measured: Tensor


@dataclass
class Worker:
    process: BaseProcess
    connection: Connection
    orders: list[int] = field(default_factory=list)
    """The numbers of what it was told to do and has not answered."""


class Pool(Simulated):
    def __init__(self, engine: Serial | Cohort, workers: int):
        self.engine, self.count, self.evaluator = engine, workers, engine.evaluator
        self.name = "pool" if isinstance(engine, Serial) else engine.name
        self.weights, self.buffers = engine.model.weights.clone(), engine.model.buffers()
        self.shared: Shared | None = None
        self.workers: list[Worker] = []

    def probe(self, work: RoundWork) -> Iterator[Message]:
        if self._is_small(work):
            yield from self.engine.probe(work)
            return
        shared = self._hand_out(work, training=False)
        groups = list(work.groups(self.engine.group))
        for slot, group in zip(self._done(shared, PROBE, groups), groups, strict=True):
            for row in range(len(group.cohort)):
                yield {"gradient": slot.gradient[row].clone()}

    def train(self, work: RoundWork) -> Iterator[ClientResult]:
        if self._is_small(work):
            yield from self.engine.train(work)
            return
        shared = self._hand_out(work, training=True)
        groups = list(work.groups(self.engine.group))
        for slot, group in zip(self._done(shared, TRAIN, groups), groups, strict=True):
            for row in range(len(group.cohort)):
                yield self._result(slot, row)

    def measure(self, theta: Tensor, buffers: Tensor | None) -> Iterator[Tensor]:
        shared = self.shared
        if shared is None:
            yield from self.engine.measure(theta, buffers)
            return
        shared.theta.copy_(theta)
        if buffers is not None:
            shared.buffers.copy_(buffers)
        parts = range(len(self.evaluator.parts))
        for part, _ in zip(parts, self._done(shared, MEASURE, list(parts)), strict=True):
            yield shared.measured[part]

    def close(self) -> None:
        """Ends the workers; they start again when they are needed."""
        for worker in self.workers:
            worker.connection.close()
            worker.process.terminate()
        for worker in self.workers:
            worker.process.join()
        self.workers, self.shared = [], None

    def _is_small(self, work: RoundWork) -> bool:
        """Whether there is nothing to share out, of models that a worker trains in no time."""
        return 1 < self.engine.group >= len(work.cohort)

    def _result(self, slot: Slot, row: int) -> ClientResult:
        """What it keeps lies in the slot: it is there until the next result is asked for."""
        buffers = None if self.buffers is None else slot.buffers[row].clone()
        message = {name: value[row].clone() for name, value in slot.message.items()}
        kept = {name: value[row] for name, value in slot.kept.items()}
        return ClientResult(message, kept, int(slot.steps[row]), slot.loss[row].clone(), buffers)

    def _hand_out(self, work: RoundWork, training: bool) -> Shared:
        """Puts the round and its message where the workers see them."""
        shared = self.shared
        if shared is None or not _suits(shared, work.received, training):
            self.close()
            shared = self.shared = self._start(work, training)
        shared.ctx.copy_(torch.tensor(astuple(work.ctx), dtype=torch.float64))
        for name, value in work.received.items():
            shared.received[name].copy_(value)
        return shared

    def _start(self, work: RoundWork, training: bool) -> Shared:
        """Lays out the shared memory for messages of this round's form, and forks the workers."""
        message, kept = self._forms(work) if training else ({}, {})
        none, memory, rows = torch.zeros(0), work.memories[0], self.engine.group
        buffers = none if self.buffers is None else self.buffers
        count = min(self.count, max(ceil(len(work.cohort) / rows), cores()))  # more would have nothing to do
        gradient = self.weights if self.engine.recipe.algorithm.probes else none
        shared = Shared(
            _share(torch.zeros(len(astuple(work.ctx)), dtype=torch.float64)),
            {name: _share(value) for name, value in work.received.items()},
            [
                Slot(
                    _shares(memory, rows),
                    _shares(message, rows),
                    _shares(kept, rows),
                    _share(gradient.expand(rows, -1)),
                    _share(torch.zeros(rows, dtype=torch.int64)),
                    _share(torch.zeros(rows)),
                    _share(buffers.expand(rows, -1)),
                )
                for _ in range((AHEAD + 1) * count)
            ],
            _share(self.weights),
            _share(buffers),
            _share(torch.zeros(len(self.evaluator.parts), self.evaluator.width, dtype=torch.float64)),
        )
        fork = multiprocessing.get_context("fork")
        pipes = [fork.Pipe() for _ in range(count)]
        ends = [end for pair in pipes for end in pair]
        for ours, theirs in pipes:
            process = fork.Process(target=_work, args=(theirs, ends, self.engine, shared), daemon=True)
            with warnings.catch_warnings():  # newer Pythons warn of threads that a fork leaves behind; ours need none
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            self.workers.append(Worker(process, ours))
        for _, theirs in pipes:
            theirs.close()
        return shared

    def _forms(self, work: RoundWork) -> tuple[Message, Memory]:
        """What a report looks like. The function is pure, so one is made up to see."""
        still = torch.zeros_like(self.weights)
        path = Path(still, still, mean_gradient=still, full_gradient=still, velocity=still)
        algorithm = self.engine.recipe.algorithm
        return algorithm.report(path, work.received, work.memories[0], work.ctx.for_client(1))

    def _done(self, shared: Shared, what: int, items: Sequence[RoundWork | int]) -> Iterator[Slot]:
        """Has the workers do something with each group (or part of the test examples); the slots, in their order.

        Items begin in their order. One that ends early waits in its slot, and where all slots wait, so do workers.
        """
        free = list(range(len(shared.slots)))
        slot_of: dict[int, int] = {}
        answered: set[int] = set()
        try:
            for due in range(len(items)):
                while due not in answered:
                    while (begun := len(slot_of)) < len(items) and free and (worker := self._idle()):
                        slot = slot_of[begun] = free.pop()
                        order = ORDER.pack(what, slot) + _filled(shared.slots[slot], items[begun])
                        with _lost(worker):
                            worker.connection.send_bytes(order)
                        worker.orders.append(begun)
                    answered |= self._answers()
                yield shared.slots[slot_of[due]]
                free.append(slot_of[due])
        finally:
            if any(worker.orders for worker in self.workers):  # given up in between: the answers are nobody's
                self.close()

    def _idle(self) -> Worker | None:
        worker = min(self.workers, key=lambda worker: len(worker.orders))
        return worker if len(worker.orders) < AHEAD else None

    def _answers(self) -> set[int]:
        """Numbers of orders that were done, one at least."""
        answers = set()
        ready = wait([worker.connection for worker in self.workers])
        for worker in self.workers:
            if worker.connection in ready:
                self._answer(worker)
                answers.add(worker.orders.pop(0))
        return answers

    def _answer(self, worker: Worker) -> None:
        with _lost(worker):
            answer = worker.connection.recv_bytes()
        if answer != DONE:
            kind, _, reason = answer.decode().partition("\n")
            raise KeelError(reason) if kind == KeelError.__name__ else RuntimeError(f"in a worker process:\n{reason}")


def _work(connection: Connection, ends: Iterable[Connection], engine: Serial | Cohort, shared: Shared) -> None:
    """A worker: does what it is told until its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent alone answers it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for end in ends:  # those that the fork copied: while one is open, nobody sees that the parent is gone
        if end is not connection:
            end.close()
    torch.set_num_threads(1)
    tune()
    with suppress(EOFError, ConnectionError):  # the parent is gone
        while True:
            order = connection.recv_bytes()
            connection.send_bytes(_answer_to(order, engine, shared))


def _answer_to(order: bytes, engine: Serial | Cohort, shared: Shared) -> bytes:
    what, slot = ORDER.unpack_from(order)
    items = np.frombuffer(order, np.int64, offset=ORDER.size)
    try:
        if what == MEASURE:
            engine.evaluator.look_at(shared.theta, shared.buffers if shared.buffers.numel() else None)
            shared.measured[items[0]] = engine.evaluator.measure(items[0])
        else:
            _clients(what, items, shared, shared.slots[slot], engine)
    except KeelError as error:
        return f"{KeelError.__name__}\n{error}".encode()
    except Exception:  # whatever it is, the parent raises it
        return f"\n{format_exc()}".encode()
    return DONE


@contextmanager
def _lost(worker: Worker) -> Iterator[None]:
    """Says what has become of a worker that can no longer be reached."""
    try:
        yield
    except (EOFError, ConnectionError):
        worker.process.join()
        raise OSError(
            f"a worker process ended (exit code {worker.process.exitcode}); it may have run out of memory"
        ) from None


def _clients(what: int, clients: np.ndarray, shared: Shared, slot: Slot, engine: Serial | Cohort) -> None:
    """A group's part of a round, from its slot into its slot."""
    round, everybody, cohort, *rates = shared.ctx.tolist()
    ctx = Context(int(round), int(everybody), int(cohort), *rates)
    rows = range(len(clients))
    memories = [{name: value[row] for name, value in slot.memory.items()} for row in rows]
    buffers = [slot.buffers[row] if slot.buffers.numel() else None for row in rows]
    work = RoundWork(clients, shared.received, memories, ctx, buffers)
    if what == PROBE:
        for row, message in enumerate(engine.probe(work)):
            slot.gradient[row] = message["gradient"]
        return
    for row, result in enumerate(engine.train(work)):
        _put(slot.message, row, result.message)
        _put(slot.kept, row, result.memory)
        slot.steps[row], slot.loss[row] = result.steps, result.loss
        if result.buffers is not None:
            slot.buffers[row] = result.buffers


def _filled(slot: Slot, item: RoundWork | int) -> bytes:
    """What is to be worked on, once its memories and buffers are in the slot."""
    if isinstance(item, int):
        return np.int64(item).tobytes()
    for row, (memory, buffers) in enumerate(zip(item.memories, item.buffers, strict=True)):
        _put(slot.memory, row, memory)
        if buffers is not None:
            slot.buffers[row] = buffers
    return item.cohort.astype(np.int64).tobytes()


def _put(places: Message, row: int, values: Message) -> None:
    place = {name: rows[row] for name, rows in places.items()}
    if place.keys() != values.keys() or not _alike(place, values):
        raise KeelError(
            f"algorithm: what it keeps or sends changes its form (from {sorted(place)} to {sorted(values)}), which the "
            "engine 'pool' cannot carry; accepted: engine.name = 'serial'"
        )
    for name, value in values.items():
        place[name].copy_(value)


def _suits(shared: Shared, received: Message, training: bool) -> bool:
    """Whether a message can take the place of the last one.

    What is left over of that would be seen by those who train. A probe looks at theta alone, so there it may stay.
    """
    exact = bool(shared.slots[0].message) and shared.received.keys() == received.keys()
    return _alike(shared.received, received) and (exact or not training)


def _alike(place: Message, values: Message) -> bool:
    """Whether there is room for each of the values."""
    return all(
        name in place and place[name].shape == value.shape and place[name].dtype == value.dtype
        for name, value in values.items()
    )


def _shares(tensors: Message, rows: int) -> Message:
    """Room for so many of each."""
    return {name: _share(value.expand(rows, *value.shape)) for name, value in tensors.items()}


def _share(like: Tensor) -> Tensor:
    """A tensor of this form in memory that a fork shares."""
    if like.numel() == 0:
        return like
    memory = mmap(-1, like.numel() * like.element_size())
    return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)
