"""The loop: sample, broadcast, train, aggregate, evaluate, tell the hooks. Knows no algorithm, engine or file."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import acos, degrees, isfinite
from pathlib import Path as FilePath
from statistics import fmean
from time import perf_counter
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from keel.algorithms.base import Context, Memory, Message, Report, State
from keel.client import LocalWork, Recipe
from keel.devices import find_device
from keel.engines import Absent, Engine, Problem, RoundWork, cores, make_engine
from keel.engines.base import Each
from keel.engines.cluster import Cluster, in_slot
from keel.errors import KeelError
from keel.memories import Memories, on_disk
from keel.params import FlatModel
from keel.runs.spec import Spec
from keel.sampling import Cyclic, Sampler, Uniform, Weighted
from keel.schedules import learning_rate
from keel.task import Task

Answer = TypeVar("Answer")
Record = dict[str, Any]
"""What a round was: a line of metrics.jsonl. Never a time, so that equal runs have equal records."""


@dataclass
class Position:
    """All that is needed to go on: the round that was finished last, the server's state, the clients' memories.

    `buffers` are the model's averaged ones. A client that keeps its own has them in its memory, under BUFFERS.
    `updates` are the last pseudo-gradients, the newest last, where `evaluation.deviation` asks for them.
    """

    round: int
    server: State
    memories: Memories = field(default_factory=Memories)
    buffers: Tensor | None = None
    updates: list[Tensor] = field(default_factory=list)


BUFFERS = "keel.buffers"  # a name that no algorithm gives

Hook = Callable[[Record, Position, float], None]
"""Called after each round with its record, the position after it and the seconds it took."""


class Training:
    """One run of one spec on one task, from any position."""

    def __init__(
        self,
        spec: Spec,
        task: Task,
        workers: int | None = None,
        engine: Callable[[Problem], Engine] | None = None,
    ):
        """`engine` makes another one than the spec names: one whose clients are elsewhere."""
        self.spec, self.task = spec, task
        recipe = make_recipe(spec, task)
        self.local_buffers = spec.model.buffers == "local"
        asked = workers or spec.engine.workers
        cluster = None
        if engine is None and spec.engine.on_ray and not in_slot():
            cluster = Cluster(spec.engine.address, spec.engine.gpus, asked or cores())
        self.device = find_device(spec.engine.where) if cluster is None else torch.device(spec.engine.where)
        problem = Problem(task, recipe, self.local_buffers, spec.engine.compile, self.device)
        room = cores() if cluster is None else cluster.slots()
        self.workers = asked or room
        try:
            self.engine = engine(problem) if engine else make_engine(spec.engine.name, problem, self.workers, cluster)
        except BaseException:  # whatever it is, a cluster that was joined has to be left
            if cluster is not None:
                cluster.leave()
            raise
        self.sampler = make_sampler(spec, task)
        model = FlatModel(task.module, task.moving)
        self.initial, self.initial_buffers = model.weights, model.buffers()
        self._examples = int(task.data.partition.sizes.sum())

    @property
    def parameters(self) -> int:
        return self.initial.numel()

    def start(self, path: FilePath | None = None) -> Position:
        return Position(0, self.spec.algorithm.init_server(self.initial), self.memories(path), self.initial_buffers)

    def memories(self, path: FilePath | None = None) -> Memories:
        """Room for what the clients remember, in a file of that name or in one that vanishes."""
        return Memories(path, self.spec.memory.precision, self.spec.memory.keep)

    def run(self, position: Position, hooks: Sequence[Hook], stop: Callable[[], bool] = lambda: False) -> str:
        """Runs what is left; the answer is finished, diverged or (when `stop` said so) interrupted."""
        try:
            return self._run(position, hooks, stop)
        finally:
            self.engine.close()

    def _run(self, position: Position, hooks: Sequence[Hook], stop: Callable[[], bool]) -> str:
        while position.round < self.spec.rounds:
            began = perf_counter()
            with one_thread():
                record = self._round(position)
            for hook in hooks:
                hook(record, position, perf_counter() - began)
            if record.get("diverged"):
                return "diverged"
            if stop() and position.round < self.spec.rounds:
                return "interrupted"
        return "finished"

    def _round(self, position: Position) -> Record:
        algorithm, t = self.spec.algorithm, position.round + 1
        cohort = self._longest_first(self.sampler.cohort(t))
        ctx = self._context(t, cohort)
        traffic = Traffic(counts=not algorithm.pooled)
        absent: dict[int, Absent] = {}
        server = position.server
        received = traffic.down(algorithm.broadcast(server, ctx), len(cohort))
        position.memories.discard()  # of a round that was given up
        mean = None if position.buffers is None or self.local_buffers else torch.zeros_like(position.buffers)
        if mean is not None:
            traffic.down({BUFFERS: mean}, len(cohort))
        memories, buffers = self._known(cohort, position)
        work = RoundWork(cohort, received, memories, ctx, buffers)
        if algorithm.probes:
            work, probes = self._answered(work, self.engine.probe(work), absent)
            weighed = zip(probes, self._weights(work.cohort), strict=True)
            gradients = (Report(traffic.up(message), weight, steps=0) for message, weight in weighed)
            server, more = algorithm.absorb(server, gradients, work.ctx)
            work = replace(work, received={**received, **traffic.down(more, len(work.cohort))})
        work, results = self._answered(work, self.engine.train(work), absent)
        cohort, ctx, weights = work.cohort, work.ctx, self._weights(work.cohort)
        losses: list[float] = []
        distances: list[float] = []
        pseudo_gradient = torch.zeros_like(self.initial)
        taus = self.spec.evaluation.deviation

        def receive() -> Iterator[Report]:
            """The reports as they come, in the order of the cohort."""
            for client, weight, result in zip(cohort.tolist(), weights, results, strict=True):
                memory = dict(result.memory)
                if mean is not None and result.buffers is not None:
                    traffic.up({BUFFERS: result.buffers})
                    mean.add_(result.buffers, alpha=weight)
                elif result.buffers is not None:
                    memory[BUFFERS] = result.buffers
                if memory:
                    position.memories.stage(client, memory)
                losses.append(float(result.loss))
                if self.spec.evaluation.drift and "delta" in result.message:
                    distances.append(float(torch.linalg.vector_norm(result.message["delta"])))
                if taus and "delta" in result.message:
                    pseudo_gradient.add_(result.message["delta"], alpha=weight)
                yield Report(traffic.up(result.message), weight, result.steps)

        reports = receive()
        server = algorithm.aggregate(server, reports, ctx)
        for _ in reports:  # an algorithm may not have needed them all; the clients took part all the same
            pass
        if "theta" not in server or server["theta"].shape != self.initial.shape:
            raise KeelError(
                f"algorithm: {type(algorithm).__name__}.aggregate has to return a state whose theta is a model "
                f"of {self.parameters} parameters"
            )
        before = position.server["theta"]
        deviation: Record = {}
        if taus:
            position.updates = [*position.updates, pseudo_gradient][-max(taus) :]
            if self._due(t):
                deviation = {"deviation": _deviations(position.updates, self._of_all_clients(work, position), taus)}
        position.round, position.server = t, self._within_budget(position, server)
        position.memories.commit()
        position.buffers = position.buffers if mean is None else mean
        sent = {**traffic.bytes, **self.engine.traffic()}
        record: Record = {"round": t, "cohort": cohort.tolist(), "lr": ctx.lr, **sent}
        if absent:
            record["set_aside"] = {str(client): one.reason for client, one in absent.items()}
        record["train_loss"] = _finite(float(np.mean(losses)))
        theta = position.server["theta"]
        if not torch.isfinite(theta).all():
            return {**record, "diverged": True}
        if self.spec.evaluation.drift:
            record |= _drift(distances, work.received.get("m", server.get("m")), before - theta)
        record |= deviation
        if self._due(t):
            quality = self.engine.evaluator.quality(self.engine.measure(theta, position.buffers))
            if not isfinite(quality.get("test_loss", 0.0)):  # sites that test may all be away
                return {**record, "diverged": True}
            record.update(quality)
        return record

    def _answered(
        self, work: RoundWork, answers: Iterator[Answer | Absent], absent: dict[int, Absent]
    ) -> tuple[RoundWork, Iterable[Answer]]:
        """The round of those who answered, and their answers; the others are added to `absent`.

        Clients on this machine all do: their answers are read one by one, when they are needed.
        """
        if not self.engine.remote:
            return work, cast(Iterator[Answer], answers)
        there: dict[int, Answer] = {}
        for row, answer in enumerate(answers):
            if isinstance(answer, Absent):
                absent[int(work.cohort[row])] = answer
            else:
                there[row] = answer
        if len(there) < len(work.cohort):
            rows = list(there)
            work = work.of(rows, self._context(work.ctx.round, work.cohort[rows]))
        return work, there.values()

    def _of_all_clients(self, work: RoundWork, position: Position) -> Tensor:
        """The pseudo-gradient of this round if every client took part in it; nobody's memory changes."""
        clients = self._longest_first(np.arange(self.sampler.clients))
        memories, buffers = self._known(clients, position)
        whole = replace(work, cohort=clients, memories=memories, buffers=buffers)
        mean = torch.zeros_like(self.initial)
        _, results = self._answered(whole, self.engine.train(whole), {})
        for weight, result in zip(self._weights(clients), results, strict=True):
            if "delta" not in result.message:
                name = type(self.spec.algorithm).__name__
                raise KeelError(f"evaluation.deviation: clients of {name} report no delta; accepted: [] for it")
            mean.add_(result.message["delta"], alpha=weight)
        return mean

    def _within_budget(self, position: Position, server: State) -> State:
        """The server's state; where it is beyond its budget in RAM, what a round left as it was goes to files."""
        if sum(map(_bytes, server.values())) <= self.spec.memory.ram_gb * 1e9:
            return server
        cold = {id(tensor) for tensor in position.server.values()}
        folder = None if position.memories.path is None else position.memories.path.parent
        return {name: on_disk(tensor, folder) if id(tensor) in cold else tensor for name, tensor in server.items()}

    def _longest_first(self, cohort: np.ndarray) -> np.ndarray:
        """The cohort's order, which is that of its reports: those who have most to do first, so that no core waits."""
        return cohort[np.argsort(-self.task.data.partition.sizes_of(cohort), kind="stable")]

    def _known(self, cohort: np.ndarray, position: Position) -> tuple[Sequence[Memory], Sequence[Tensor | None]]:
        """What the algorithm keeps for each client, and the buffers that it starts from."""

        @lru_cache(maxsize=1)
        def known(client: int) -> Memory:
            return position.memories.get(client, {})

        def memory(client: int) -> Memory:
            kept = {name: value for name, value in known(client).items() if name != BUFFERS}
            return kept or self.spec.algorithm.init_client(self.initial)

        def buffers(client: int) -> Tensor | None:
            return known(client).get(BUFFERS, position.buffers) if own else position.buffers

        clients, own = cohort.tolist(), self.local_buffers
        return Each(clients, memory), Each(clients, buffers)

    def _weights(self, cohort: np.ndarray) -> list[float]:
        if self.spec.server.weighting == "uniform":
            return [1 / len(cohort)] * len(cohort)
        sizes = self.task.data.partition.sizes_of(cohort)
        return (sizes / sizes.sum()).tolist()

    def _context(self, t: int, cohort: np.ndarray) -> Context:
        spec, partition = self.spec, self.task.data.partition
        by_examples = spec.server.weighting == "examples"
        return Context(
            round=t,
            clients=self.sampler.clients,
            cohort=len(cohort),
            share=partition.sizes_of(cohort).sum().item() / self._examples
            if by_examples
            else len(cohort) / self.sampler.clients,
            period=self.sampler.period,
            lr=learning_rate(spec.local.lr, spec.local.schedule, spec.local.decay, t, spec.rounds),
            server_lr=learning_rate(spec.server.lr, spec.server.schedule, spec.server.decay, t, spec.rounds),
        )

    def _due(self, t: int) -> bool:
        return self.spec.evaluation.due(t, self.spec.rounds)


def make_recipe(spec: Spec, task: Task) -> Recipe:
    local = spec.local
    work = LocalWork(local.epochs, local.steps, local.batch, local.drop_last, local.weight_decay, local.clip)
    return Recipe(spec.algorithm, task.loss, work, spec.seed, task.data.prepare, task.data.at_once)


def make_sampler(spec: Spec, task: Task) -> Sampler:
    sizes = task.data.partition.sizes
    clients = len(sizes)
    size = max(1, round(spec.participation.rate * clients))
    match spec.participation.sampler:
        case "uniform":
            return Uniform(clients, size, spec.seed)
        case "cyclic":
            return Cyclic(clients, size, spec.seed)
        case "weighted":
            return Weighted(size, sizes, spec.seed)


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread within an operation: how PyTorch splits a sum over threads changes its bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Traffic:
    """Counts the bytes of a round from its messages: each that goes down once per client, each that comes up."""

    def __init__(self, counts: bool):
        self.counts = counts
        self.bytes = {"bytes_down": 0, "bytes_up": 0}

    def down(self, message: Message, clients: int) -> Message:
        self.bytes["bytes_down"] += self.counts * clients * size_in_bytes(message)
        return message

    def up(self, message: Message) -> Message:
        self.bytes["bytes_up"] += self.counts * size_in_bytes(message)
        return message


def _drift(distances: list[float], momentum: Tensor | None, update: Tensor) -> Record:
    """How far the clients went from the server's model in the mean, and by how many degrees momentum is off the way.

    The way is the server's update of this round; the angle is there for algorithms that have a momentum, once it moves.
    """
    record: Record = {"drift": _finite(fmean(distances))} if distances else {}
    if momentum is not None:
        lengths = torch.linalg.vector_norm(momentum) * torch.linalg.vector_norm(update)
        if lengths > 0:
            cosine = float(torch.dot(momentum, update) / lengths)
            record["momentum_angle"] = _finite(degrees(acos(max(-1.0, min(1.0, cosine)))))
    return record


def _deviations(updates: list[Tensor], of_all: Tensor, taus: list[int]) -> dict[str, float | None]:
    """For each tau how far the mean of the last tau pseudo-gradients is from that of all clients, by its length.

    A tau is left out until there are so many.
    """
    length = torch.linalg.vector_norm(of_all)
    means = {tau: torch.stack(updates[-tau:]).mean(dim=0) for tau in taus if len(updates) >= tau}
    return {str(tau): _finite(float(torch.linalg.vector_norm(mean - of_all) / length)) for tau, mean in means.items()}


def size_in_bytes(message: Message) -> int:
    return sum(map(_bytes, message.values()))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None
