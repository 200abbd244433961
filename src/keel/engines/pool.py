"""All cores: one lasting worker for each, one thread each, messages in memory that they share.

Each client is trained by the function that `serial` calls, and results come in the order of the cohort, so that the
bits are `serial`'s whatever the number of workers. Workers are forked: they see the data of their parent, not copies.
"""

import multiprocessing
import signal
import struct
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, field
from mmap import mmap
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from traceback import format_exc

import torch
from torch import Tensor

from keel.algorithms.base import Context, Memory, Message, Path
from keel.client import ClientResult, probe_client, train_client
from keel.engines.allocator import tune
from keel.engines.base import Problem, RoundWork
from keel.errors import KeelError
from keel.evaluation import Evaluator
from keel.params import FlatModel

AHEAD = 2
"""Orders that a worker has at a time: one that it works on and one that it goes on with."""
TRAIN, PROBE, MEASURE = range(3)
ORDER = struct.Struct("=bqq")
"""What is to be done, with which client (or part of the test examples), in which slot."""
DONE = struct.Struct("=q")
"""How many steps it took; -1 where it failed, and the reason follows."""


@dataclass(frozen=True)
class Slot:
    """Where one client's round is handed over: its memory and buffers go in, what it gave comes out."""

    memory: Memory
    message: Message
    kept: Memory
    gradient: Tensor
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


class Pool:
    name = "pool"

    def __init__(self, problem: Problem, workers: int):
        self.problem, self.count = problem, workers
        model = FlatModel(problem.task.module, problem.task.moving)
        self.weights, self.buffers = model.weights, model.buffers()
        self.evaluator = Evaluator(problem.task, problem.local_buffers)
        self.shared: Shared | None = None
        self.workers: list[Worker] = []

    def probe(self, work: RoundWork) -> Iterator[Message]:
        shared = self._hand_out(work, training=False)
        for slot, _ in self._done(shared, PROBE, work.cohort.tolist(), work):
            yield {"gradient": slot.gradient.clone()}

    def train(self, work: RoundWork) -> Iterator[ClientResult]:
        shared = self._hand_out(work, training=True)
        for slot, steps in self._done(shared, TRAIN, work.cohort.tolist(), work):
            buffers = None if self.buffers is None else slot.buffers.clone()
            yield ClientResult(_copies(slot.message), _copies(slot.kept), steps, slot.loss.clone(), buffers)

    def measure(self, theta: Tensor, buffers: Tensor | None) -> Iterator[Tensor]:
        shared = self.shared
        assert shared is not None, "a model is measured after a round"
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

    def _hand_out(self, work: RoundWork, training: bool) -> Shared:
        """Puts the round and its message where the workers see them."""
        shared = self.shared
        if shared is None or not _alike(shared.received, work.received) or training > bool(shared.slots[0].message):
            self.close()
            shared = self.shared = self._start(work, training)
        shared.ctx.copy_(torch.tensor(astuple(work.ctx), dtype=torch.float64))
        for name, value in work.received.items():
            shared.received[name].copy_(value)
        return shared

    def _start(self, work: RoundWork, training: bool) -> Shared:
        """Lays out the shared memory for messages of this round's form, and forks the workers."""
        message, kept = self._forms(work) if training else ({}, {})
        none, memory = torch.zeros(0), work.memories[0]
        buffers = none if self.buffers is None else self.buffers
        gradient = self.weights if self.problem.recipe.algorithm.probes else none
        shared = Shared(
            _share(torch.zeros(len(astuple(work.ctx)), dtype=torch.float64)),
            _shares(work.received),
            [
                Slot(
                    _shares(memory),
                    _shares(message),
                    _shares(kept),
                    _share(gradient),
                    _share(torch.zeros(())),
                    _share(buffers),
                )
                for _ in range((AHEAD + 1) * self.count)
            ],
            _share(self.weights),
            _share(buffers),
            _share(torch.zeros(len(self.evaluator.parts), self.evaluator.width, dtype=torch.float64)),
        )
        fork = multiprocessing.get_context("fork")
        pipes = [fork.Pipe() for _ in range(self.count)]
        ends = [end for pair in pipes for end in pair]
        for ours, theirs in pipes:
            process = fork.Process(target=_work, args=(theirs, ends, self.problem, shared), daemon=True)
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
        algorithm = self.problem.recipe.algorithm
        return algorithm.report(path, work.received, work.memories[0], work.ctx.for_client(1))

    def _done(
        self, shared: Shared, what: int, items: list[int], work: RoundWork | None = None
    ) -> Iterator[tuple[Slot, int]]:
        """Has the workers do something with each item; slot and steps of each, in the order of the items.

        Items begin in their order. One that ends early waits in its slot, and where all slots wait, so do workers.
        """
        free = list(range(len(shared.slots)))
        slot_of: dict[int, int] = {}
        steps_of: dict[int, int] = {}
        try:
            for due in range(len(items)):
                while due not in steps_of:
                    while (begun := len(slot_of)) < len(items) and free and (worker := self._idle()):
                        slot = slot_of[begun] = free.pop()
                        if work is not None:
                            _fill(shared.slots[slot], work, begun)
                        worker.connection.send_bytes(ORDER.pack(what, items[begun], slot))
                        worker.orders.append(begun)
                    steps_of |= self._answers()
                yield shared.slots[slot_of[due]], steps_of[due]
                free.append(slot_of[due])
        finally:
            if any(worker.orders for worker in self.workers):  # given up in between: the answers are nobody's
                self.close()

    def _idle(self) -> Worker | None:
        worker = min(self.workers, key=lambda worker: len(worker.orders))
        return worker if len(worker.orders) < AHEAD else None

    def _answers(self) -> dict[int, int]:
        """Numbers and steps of orders that were done, one at least."""
        answers = {}
        ready = wait([worker.connection for worker in self.workers])
        for worker in self.workers:
            if worker.connection in ready:
                answers[worker.orders.pop(0)] = self._answer(worker)
        return answers

    def _answer(self, worker: Worker) -> int:
        try:
            answer = worker.connection.recv_bytes()
        except (EOFError, ConnectionError):
            worker.process.join()
            raise OSError(
                f"a worker process ended (exit code {worker.process.exitcode}); it may have run out of memory"
            ) from None
        (steps,) = DONE.unpack_from(answer)
        if steps < 0:
            kind, _, reason = answer[DONE.size :].decode().partition("\n")
            raise KeelError(reason) if kind == KeelError.__name__ else RuntimeError(f"in a worker process:\n{reason}")
        return steps


def _work(connection: Connection, ends: Iterable[Connection], problem: Problem, shared: Shared) -> None:
    """A worker: does what it is told until its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent alone answers it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for end in ends:  # those that the fork copied: while one is open, nobody sees that the parent is gone
        if end is not connection:
            end.close()
    torch.set_num_threads(1)
    tune()
    model = FlatModel(problem.task.module, problem.task.moving)
    evaluator = Evaluator(problem.task, problem.local_buffers)
    while True:
        try:
            what, item, slot = ORDER.unpack(connection.recv_bytes())
        except EOFError:
            return
        try:
            if what == MEASURE:
                evaluator.look_at(shared.theta, shared.buffers if shared.buffers.numel() else None)
                shared.measured[item] = evaluator.measure(item)
                steps = 0
            else:
                steps = _client(what, item, shared, shared.slots[slot], problem, model)
            answer = DONE.pack(steps)
        except KeelError as error:
            answer = DONE.pack(-1) + f"{KeelError.__name__}\n{error}".encode()
        except Exception:  # whatever it is, the parent raises it
            answer = DONE.pack(-1) + f"\n{format_exc()}".encode()
        connection.send_bytes(answer)


def _client(what: int, client: int, shared: Shared, slot: Slot, problem: Problem, model: FlatModel) -> int:
    """One client's part of a round, from its slot into its slot; its steps."""
    recipe, examples = problem.recipe, problem.task.data.held(client)
    round, clients, cohort, *rates = shared.ctx.tolist()
    ctx = Context(int(round), int(clients), int(cohort), *rates)
    buffers = slot.buffers if slot.buffers.numel() else None
    if what == PROBE:
        slot.gradient.copy_(probe_client(recipe, model, client, examples, shared.received, ctx, buffers)["gradient"])
        return 0
    result = train_client(recipe, model, client, examples, shared.received, slot.memory, ctx, buffers)
    _put(slot.message, result.message)
    _put(slot.kept, result.memory)
    slot.loss.copy_(result.loss)
    if result.buffers is not None:
        slot.buffers.copy_(result.buffers)
    return result.steps


def _fill(slot: Slot, work: RoundWork, number: int) -> None:
    _put(slot.memory, work.memories[number])
    if (buffers := work.buffers[number]) is not None:
        slot.buffers.copy_(buffers)


def _put(place: Message, values: Message) -> None:
    if place.keys() != values.keys() or not _alike(place, values):
        raise KeelError(
            f"algorithm: what it keeps or sends changes its form (from {sorted(place)} to {sorted(values)}), which the "
            "engine 'pool' cannot carry; accepted: engine.name = 'serial'"
        )
    for name, value in values.items():
        place[name].copy_(value)


def _alike(place: Message, values: Message) -> bool:
    """Whether there is room for each of the values."""
    return all(
        name in place and place[name].shape == value.shape and place[name].dtype == value.dtype
        for name, value in values.items()
    )


def _copies(tensors: Message) -> Message:
    return {name: value.clone() for name, value in tensors.items()}


def _shares(tensors: Message) -> Message:
    return {name: _share(value) for name, value in tensors.items()}


def _share(like: Tensor) -> Tensor:
    """A tensor of this form in memory that a fork shares."""
    if like.numel() == 0:
        return like
    memory = mmap(-1, like.numel() * like.element_size())
    return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)
