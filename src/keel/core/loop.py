"""The federated loop: sample a cohort, broadcast, train, aggregate, evaluate, notify the observers.

It is given a task, an algorithm, a sampler and an engine, and imports nothing about specs, folders, terminals or
clusters.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from keel.algorithms import messages_of
from keel.algorithms.base import ClientState, Message, Report, State
from keel.core.availability import Attendance, Availability
from keel.core.choices import Clip, Precision
from keel.core.client import ClientResult, LocalTraining
from keel.core.client_state import ClientStates, algorithm_state, within_budget
from keel.core.clipping import RoundClipping
from keel.core.devices import single_thread
from keel.core.engine import Dropped, Engine, RoundWork
from keel.core.flat_model import FlatModel
from keel.core.mechanisms import Phase, Sender, ServerMean, ServerRound, TakenMean
from keel.core.observers import Hook, Observer, RoundEnd, Traffic, as_observer, make_record, size_in_bytes
from keel.core.participation import Participation
from keel.core.records import Record
from keel.core.reports import Decode, ReportCollector, client_inputs
from keel.core.sampling import Sampler
from keel.core.schedules import LearningRate
from keel.core.stopping import EarlyStopping
from keel.core.task import Task
from keel.core.torch_randomness import keyed_torch_rng
from keel.core.training_state import BUFFERS, TrainingState
from keel.errors import KeelError

Reply = TypeVar("Reply")


@dataclass(frozen=True)
class LoopSettings:
    """The settings of the loop itself."""

    seed: int
    rounds: int
    local_lr: LearningRate
    server_lr: LearningRate
    evaluated: Callable[[int], bool]
    """Whether the model is evaluated after round t."""
    weighting: Literal["examples", "uniform"] = "examples"
    largest_weight: float = 1.0
    """The largest weight of a client in a mean."""
    clip: Clip | None = None
    """The largest norm of a report, or how it is learned; None if reports are not clipped."""
    local_buffers: bool = False
    """Whether each client keeps the buffers that training changes."""
    server_ram: float = 4e9
    """Bytes of server state kept in RAM; beyond it, tensors that a round leaves unchanged go to files."""
    state_precision: Precision = "float32"
    state_keep: int | None = None
    """How many clients' states are kept at most."""
    availability: Availability | None = None
    """Which simulated clients answer; None if all do."""


class Loop:
    """One federated run, from any training state."""

    def __init__(
        self,
        task: Task,
        local: LocalTraining,
        sampler: Sampler,
        engine: Engine,
        settings: LoopSettings,
        observers: Sequence[Observer] = (),
        mean: ServerMean | None = None,
    ):
        self.task, self.local, self.engine, self.settings = task, local, engine, settings
        self.mean = mean
        self.algorithm = local.algorithm
        self.observers = [Traffic(), *observers]
        model = FlatModel(task.module, task.moving)
        self.participation = Participation(
            sampler,
            task.data.partition,
            settings.weighting,
            settings.local_lr,
            settings.server_lr,
            tuple(model.sizes),
            settings.largest_weight,
            mean is not None and mean.fixed_cohort,
        )
        self.initial, self.initial_buffers = model.weights, model.buffers()

    @property
    def sampler(self) -> Sampler:
        return self.participation.sampler

    @property
    def parameters(self) -> int:
        return self.initial.numel()

    def start(self, path: Path | None = None) -> TrainingState:
        """The state before the first round. Client states go to the file at `path`, or to a temporary one."""
        with keyed_torch_rng(self.settings.seed, "server", 0):
            server = self.algorithm.init_server(self.initial)
        return TrainingState(0, server, self.client_states(path), self.initial_buffers)

    def client_states(self, path: Path | None = None) -> ClientStates:
        return ClientStates(path, self.settings.state_precision, self.settings.state_keep, self.parameters)

    def run(
        self,
        state: TrainingState,
        hooks: Sequence[Observer | Hook] = (),
        stop: Callable[[], bool] = lambda: False,
        stopping: EarlyStopping | None = None,
    ) -> str:
        """Run the remaining rounds.

        Returns:
            "finished", "diverged", "stopped" if a rule of `stopping` holds before the last round, or "interrupted" if
            `stop` returned True.
        """
        observers = [*self.observers, *map(as_observer, hooks)]
        stopping = stopping or EarlyStopping()
        try:
            while state.round < self.settings.rounds and stopping.reason is None:
                began = perf_counter()
                with single_thread(), keyed_torch_rng(self.settings.seed, "server", state.round + 1):
                    record = self._round(state, observers)
                    trained = perf_counter()
                    stopping.count_cost(record, trained - began)
                    if self.settings.evaluated(state.round) or stopping.reason is not None:
                        record = self._evaluated(record, state)
                    stopping.count_evaluation(record, perf_counter() - trained)
                for observer in observers:
                    observer.round_recorded(record, state, perf_counter() - began)
                if record.get("diverged"):
                    return "diverged"
                if stop() and state.round < self.settings.rounds and stopping.reason is None:
                    return "interrupted"
            return "finished" if state.round >= self.settings.rounds else "stopped"
        finally:
            self.engine.close()

    def _round(self, state: TrainingState, observers: Sequence[Observer]) -> Record:
        """One round before its evaluation, as in the paper's listing. `state` becomes that after the round."""
        algorithm, server, dropped = self.algorithm, state.server, dict[int, Dropped]()
        work, attendance = self._broadcast(state, observers)
        dropped |= {**attendance.offline, **attendance.failed}
        clipping = self._clipping(state)
        if algorithm.probes and len(work.cohort):
            work, server = self._probe(work, server, dropped, observers, clipping)
        replies = self.engine.train(work) if len(work.cohort) else iter(())
        work, results = self._replies(work, replies, dropped)
        collector = ReportCollector(state, not self.settings.local_buffers, observers, self._decoder(work.ctx.round))
        received: Iterable[ClientResult] = collector.received(
            work.cohort.tolist(), self.participation.weights(work.cohort), results
        )
        if clipping is not None and len(work.cohort):
            received = collector.clipped(clipping, work.cohort.tolist(), received)
            work = self._without(work, clipping.rejected, dropped)
        weights = self.participation.weights(work.cohort)
        reports = collector.reports(work.cohort.tolist(), weights, received)
        server, taken = self._aggregated(server, reports, work, state)
        for _ in reports:  # an algorithm may not need all of them; the clients took part all the same
            pass
        event = RoundEnd(self, state, work, weights, server, self.settings.evaluated(work.ctx.round))
        losses = [collector.losses[client] for client in work.cohort.tolist()]
        record = make_record(event, dropped, losses, observers, clipping, attendance.seconds)
        cast(dict[str, Any], record).update({} if taken is None else taken.recorded)
        state.round, state.server = (
            work.ctx.round,
            within_budget(server, state.server, self.settings.server_ram, state.clients.path),
        )
        state.clients.commit()
        if collector.mean_buffers is not None and len(work.cohort):
            state.buffers = collector.mean_buffers
        state.norms = {} if clipping is None else clipping.recorded
        state.mean = {} if taken is None else dict(taken.state)
        return record

    def _aggregated(
        self, server: State, reports: Iterable[Report], work: RoundWork, state: TrainingState
    ) -> tuple[State, TakenMean | None]:
        """The new server state, from the reports or from the mean that a mechanism takes of them, and this mean."""
        if self.mean is None:
            if not len(work.cohort):
                return server, None
            return self._checked(self.algorithm.aggregate(server, reports, work.ctx)), None
        at = ServerRound(work.ctx, work.cohort.tolist(), self._example_report, state.mean, self.settings.seed)
        taken = self.mean.mean(reports, at)
        return self._checked(self.algorithm.aggregate(server, [Report(taken.message, 1.0, 1)], work.ctx)), taken

    @cached_property
    def _example_report(self) -> Message:
        """A message like those that clients report."""
        return messages_of(self.algorithm, torch.zeros_like(self.initial), self.participation.sizes)[1][-1]

    def _decoder(self, round: int, phase: Phase = "report") -> Decode | None:
        """What decodes the messages of a round; None if they are not encoded."""
        mechanisms, seed = self.local.mechanisms, self.settings.seed
        if not mechanisms:
            return None
        return lambda message, client: mechanisms.decode(message, Sender(seed, round, client, phase))

    def _broadcast(self, state: TrainingState, observers: Sequence[Observer]) -> tuple[RoundWork, Attendance]:
        """Sample the next round's cohort and send it the server's message, with the buffers if they are averaged.

        Returns:
            The work of the clients that will answer, as far as that is known, and who they are.
        """
        t = state.round + 1
        state.clients.discard()  # of a round that was interrupted
        for observer in observers:
            observer.round_started(t)
        sampled = self.participation.cohort(t)
        attendance = self.attendance(t, sampled)
        cohort = _without_clients(sampled, attendance.offline)
        ctx = self.participation.context(t, cohort)
        received = self.algorithm.broadcast(state.server, ctx)
        if self.algorithm.probes and "theta" not in received:
            raise KeelError(f"{type(self.algorithm).__name__} sets probes = True, so broadcast() must send 'theta'")
        averaged = None if self.settings.local_buffers else state.buffers
        sent, received = self._encoded(received, t)
        _sent(sent if averaged is None else {**sent, BUFFERS: averaged}, cohort, observers)
        answering = _without_clients(cohort, attendance.failed)
        states, buffers = self.client_inputs(answering, state)
        return RoundWork(answering, received, states, ctx, buffers), attendance

    def _encoded(self, message: Message, round: int) -> tuple[Message, Message]:
        """A message to the cohort as it travels, and as the engine takes it: sites decode it themselves."""
        downlink = self.local.downlink
        if downlink is None:
            return message, message
        sent = downlink.encode(message, self.settings.seed, round)
        return sent, sent if self.engine.remote else downlink.decode(sent, message)

    def attendance(self, t: int, cohort: np.ndarray) -> Attendance:
        """Who of a cohort answers in round t."""
        availability = self.settings.availability
        if availability is None:
            return Attendance()
        sizes = self.task.data.partition.sizes_of(cohort).tolist()
        steps = [self.local.config.count(size) for size in sizes]
        return availability.attendance(t, cohort.tolist(), steps, *self._message_bytes)

    @cached_property
    def _message_bytes(self) -> tuple[int, int]:
        """The bytes that a client receives in a round, and that it sends."""
        with keyed_torch_rng(self.settings.seed, "trial"):
            messages = messages_of(self.algorithm, self.initial, self.participation.sizes)
        messages = self.local.encoded_forms(*messages)
        averaged = None if self.settings.local_buffers else self.initial_buffers
        buffers = 0 if averaged is None else averaged.numel() * averaged.element_size()
        down, up = (sum(map(size_in_bytes, of_one)) + buffers for of_one in messages)
        return down, up

    def _clipping(self, state: TrainingState) -> RoundClipping | None:
        """What clips the messages of the next round; None if they are not clipped."""
        if self.settings.clip is None:
            return None
        return RoundClipping(self.settings.clip, state.round + 1, len(self.participation.sizes), state.norms)

    def _probe(
        self,
        work: RoundWork,
        server: State,
        dropped: dict[int, Dropped],
        observers: Sequence[Observer],
        clipping: RoundClipping | None,
    ) -> tuple[RoundWork, State]:
        """The first phase: the cohort sends full gradients at the server's model, and receives a second message."""

        def received() -> Iterator[Message]:
            for client, message in zip(work.cohort.tolist(), probes, strict=True):
                for observer in observers:
                    observer.message_received(message)
                yield message if decode is None else decode(message, client)

        decode = self._decoder(work.ctx.round, "probe")
        work, probes = self._replies(work, self.engine.probe(work), dropped)
        messages: Iterable[Message] = received()
        if clipping is not None:
            messages = clipping.probes(work.cohort.tolist(), messages)
            work = self._without(work, clipping.rejected, dropped)
        weights = self.participation.weights(work.cohort)
        reports = (Report(message, weight, steps=0) for message, weight in zip(messages, weights, strict=True))
        server, message = self.algorithm.absorb(server, reports, work.ctx)
        sent, message = self._encoded(message, work.ctx.round)
        _sent(sent, work.cohort, observers)
        return replace(work, received={**work.received, **message}), server

    def _replies(
        self, work: RoundWork, replies: Iterator[Reply | Dropped], dropped: dict[int, Dropped]
    ) -> tuple[RoundWork, Iterable[Reply]]:
        """The work of the clients that answered, and their replies; the others are added to `dropped`.

        It is known before which simulated clients answer, so their replies are read one by one, when they are needed.
        """
        if not self.engine.remote:
            if len(work.cohort) < work.ctx.cohort:
                work = replace(work, ctx=self.participation.context(work.ctx.round, work.cohort))
            return work, cast(Iterator[Reply], replies)
        every = dict(zip(work.cohort.tolist(), replies, strict=True))
        failed = {client: reply for client, reply in every.items() if isinstance(reply, Dropped)}
        answered = [reply for reply in every.values() if not isinstance(reply, Dropped)]
        return self._without(work, failed, dropped), answered

    def _without(self, work: RoundWork, failed: Mapping[int, Dropped], dropped: dict[int, Dropped]) -> RoundWork:
        """The work without clients that did not answer or were rejected, which are added to `dropped`."""
        dropped |= failed
        rows = [row for row, client in enumerate(work.cohort.tolist()) if client not in failed]
        if len(rows) == len(work.cohort):
            return work
        return work.of(rows, self.participation.context(work.ctx.round, work.cohort[rows]))

    def _evaluated(self, record: Record, state: TrainingState) -> Record:
        """The record with the model's metrics on the test examples."""
        if not record.get("diverged"):
            metrics = self.engine.evaluator.quality(self._measured(state))
            if isfinite(metrics.get("test_loss", 0.0)):  # missing where no site with test examples answered
                cast(dict[str, Any], record).update(metrics)
            else:
                record["diverged"] = True
        return record

    def _measured(self, state: TrainingState) -> Iterator[Tensor]:
        """The parts of an evaluation. The engine measures the server's model, this process the personal ones."""
        theta, clients = state.server["theta"], self.engine.evaluator.clients
        yield from self.engine.measure(theta, state.buffers)
        if clients is None or not clients.personalised:
            return

        def personal_model(client: int) -> Tensor:
            (client_state,), _ = self.client_inputs(np.array([client]), state)
            return self.algorithm.personal_model(theta, algorithm_state(client_state), self.participation.sizes)

        for part in range(clients.tests.parts):
            yield clients.measure(part, personal_model, state.buffers)

    def client_inputs(
        self, cohort: np.ndarray, state: TrainingState
    ) -> tuple[Sequence[ClientState], Sequence[Tensor | None]]:
        """Each client's state and the buffers it starts from, read when they are needed."""
        initial = self.local.init_client(self.initial)
        return client_inputs(cohort.tolist(), state, initial, self.settings.local_buffers)

    def _checked(self, server: State) -> State:
        if "theta" not in server or server["theta"].shape != self.initial.shape:
            raise KeelError(
                f"{type(self.algorithm).__name__}.aggregate must return a server state whose 'theta' has "
                f"{self.parameters} elements, as the model does"
            )
        return server


def _without_clients(cohort: np.ndarray, clients: Mapping[int, Dropped]) -> np.ndarray:
    return cohort[[client not in clients for client in cohort.tolist()]] if clients else cohort


def _sent(message: Message, cohort: np.ndarray, observers: Sequence[Observer]) -> None:
    for observer in observers:
        observer.message_sent(message, len(cohort))
