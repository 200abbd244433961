"""The contract of an algorithm. `cls` is the algorithm's class."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from keel.algorithms import messages_of
from keel.algorithms.base import (
    Algorithm,
    ClientContext,
    Context,
    Direction,
    Gradient,
    Message,
    Report,
    State,
    weighted_mean,
)
from keel.algorithms.base import Path as LocalPath
from keel.config.schema import LocalSpec
from keel.core.client import ClientResult
from keel.core.engine import RoundWork
from keel.core.loop import Loop
from keel.core.observers import size_in_bytes
from keel.core.program import Program
from keel.core.records import Record
from keel.core.torch_adapter import Losses
from keel.core.training_state import TrainingState
from keel.engines.cohort import Cohort
from keel.errors import KeelError
from keel.runs.checkpoint import load_checkpoint, save_checkpoint
from keel.testing.tasks import records_of, uneven_loop

ROUNDS = 12
SMALL = 16
"""Tensors with fewer elements may have any dtype; the model of these tests has more."""

Tensors = dict[str, Tensor]


@pytest.fixture(autouse=True)
def programs_are_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share the recorded programs between loops: they depend on the model, which is one, and not on the algorithm.

    Recording takes longer than the training of these tests.
    """
    for kind in ("of_clients", "of_one_client"):
        record = getattr(Program, kind)

        def shared(losses: Losses, example: list[Tensor], record: Callable[..., Program] = record) -> Program:
            layout = tuple((part.shape, part.stride(), part.dtype) for part in example)
            key = record.__name__, losses.__qualname__, layout
            if key not in _programs:
                _programs[key] = record(losses, example)
            return _programs[key]

        monkeypatch.setattr(Program, kind, shared)


_programs: dict[Any, Program] = {}


def trained(cls: type[Algorithm], **tables: Any) -> tuple[Loop, TrainingState]:
    loop = uneven_loop({"algorithm": cls(), "rounds": ROUNDS, **tables})
    state = loop.start()
    assert loop.run(state) == "finished"
    return loop, state


def reference(cls: type[Algorithm]) -> TrainingState:
    """The state after an uninterrupted run with the serial engine, which is run once per algorithm."""
    if cls not in _references:
        _references[cls] = trained(cls)[1]
    return _references[cls]


_references: dict[type[Algorithm], TrainingState] = {}


def require_batchable(cls: type[Algorithm]) -> None:
    try:
        uneven_loop({"algorithm": cls(), "engine": {"name": "cohort"}})
    except KeelError as reason:
        pytest.skip(f"{cls.__name__} runs one client at a time: {reason}")


class Watched(Algorithm):
    """Forwards every call and asserts that it did not change its inputs."""

    inner: Algorithm
    observes = property(lambda self: self.inner.observes)
    probes = property(lambda self: self.inner.probes)
    pooled = property(lambda self: self.inner.pooled)
    personalised = property(lambda self: self.inner.personalised)

    def __init__(self, inner: Algorithm):
        object.__setattr__(self, "inner", inner)

    def init_server(self, theta: Tensor) -> State:
        return self._unchanged(lambda: self.inner.init_server(theta), {"theta": theta})

    def init_client(self, theta: Tensor) -> State:
        return self._unchanged(lambda: self.inner.init_client(theta), {"theta": theta})

    def broadcast(self, server: State, ctx: Context) -> Message:
        return self._unchanged(lambda: self.inner.broadcast(server, ctx), server)

    def absorb(self, server: State, probes: Iterable[Report], ctx: Context) -> tuple[State, Message]:
        received = list(probes)
        messages = [report.message for report in received]
        return self._unchanged(lambda: self.inner.absorb(server, received, ctx), server, *messages)

    def start(self, received: Message, state: State, ctx: ClientContext) -> Tensor:
        return self._unchanged(lambda: self.inner.start(received, state, ctx), received, state)

    def init_steps(self, received: Message, state: State, ctx: ClientContext) -> State:
        return self._unchanged(lambda: self.inner.init_steps(received, state, ctx), received, state)

    def direction(
        self, w: Tensor, gradient: Gradient, received: Message, state: State, ctx: ClientContext
    ) -> Direction:
        call = partial(self.inner.direction, w, gradient, received, state, ctx)
        return self._unchanged(call, {"w": w}, received, state)

    def displacement(self, w: Tensor, received: Message, state: State, ctx: ClientContext) -> Tensor | None:
        call = partial(self.inner.displacement, w, received, state, ctx)
        return self._unchanged(call, {"w": w}, received, state)

    def report(self, path: LocalPath, received: Message, state: State, ctx: ClientContext) -> tuple[Message, State]:
        on_path = {name: value for name, value in vars(path).items() if isinstance(value, Tensor)}
        call = partial(self.inner.report, path, received, state, ctx)
        return self._unchanged(call, on_path, path.step_state, received, state)

    def aggregate(self, server: State, reports: Iterable[Report], ctx: Context) -> State:
        received = list(reports)
        messages = [report.message for report in received]
        return self._unchanged(lambda: self.inner.aggregate(server, received, ctx), server, *messages)

    def personal_model(self, theta: Tensor, state: State, sizes: Sequence[int]) -> Tensor:
        return self._unchanged(lambda: self.inner.personal_model(theta, state, sizes), {"theta": theta}, state)

    def _unchanged(self, call: Callable[[], Any], *inputs: Tensors) -> Any:
        before = [{k: v.clone() for k, v in tensors.items()} for tensors in inputs]
        result = call()
        for tensors, copies in zip(inputs, before, strict=True):
            assert tensors.keys() == copies.keys()
            assert all(torch.equal(tensors[k], copies[k]) for k in copies)
        return result


@pytest.mark.parametrize("engine", ["serial", "cohort"])
def test_no_function_changes_its_inputs(cls: type[Algorithm], engine: str) -> None:
    if engine == "cohort":
        require_batchable(cls)
    evaluation = {"clients": 6} if cls().personalised else {}
    table = {"algorithm": cls(), "rounds": 6, "evaluation": evaluation}
    loop = uneven_loop({**table, "engine": {"name": engine, "workers": 1}})
    plain = loop.start()
    loop.run(plain)
    loop.algorithm = Watched(cls())
    object.__setattr__(loop.engine.local, "algorithm", loop.algorithm)  # type: ignore[attr-defined]
    watched = loop.start()
    loop.run(watched)
    assert torch.equal(plain.server["theta"], watched.server["theta"])


def test_equal_seeds_give_equal_bits(cls: type[Algorithm]) -> None:
    assert torch.equal(reference(cls).server["theta"], trained(cls)[1].server["theta"])


@pytest.mark.parametrize(("alone", "shared"), [("serial", "pool"), ("cohort", "cohort")])
def test_the_number_of_workers_does_not_change_the_bits(
    cls: type[Algorithm], alone: str, shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if alone == "cohort":
        require_batchable(cls)
    monkeypatch.setattr(Cohort, "group", 2)
    (single, records), (several, again) = (
        _recorded({"algorithm": cls(), "rounds": 4, "engine": {"name": name, "workers": workers}})
        for name, workers in ((alone, 1), (shared, 3))
    )
    assert again == records
    assert_equal_states(single, several)


def _recorded(table: dict[str, Any]) -> tuple[TrainingState, list[Record]]:
    loop, records = uneven_loop(table), list[Record]()
    state = loop.start()
    loop.run(state, [lambda record, *_: records.append(record)])
    return state, records


def assert_equal_states(one: TrainingState, other: TrainingState) -> None:
    assert one.server.keys() == other.server.keys()
    assert all(torch.equal(other.server[name], value) for name, value in one.server.items())
    assert one.clients.keys() == other.clients.keys()
    for client, state in one.clients.items():
        assert all(torch.equal(other.clients[client][name], value) for name, value in state.items())


def test_cohort_agrees_with_serial_to_rounding(cls: type[Algorithm]) -> None:
    require_batchable(cls)
    # small steps: with large ones training is chaotic, and rounding errors grow without bound
    calm = {"rounds": 8, "local": {"lr": 0.01}, "server": {"lr": 0.1}}
    (_, serial), (_, cohort) = trained(cls, **calm), trained(cls, **calm, engine={"name": "cohort"})
    torch.testing.assert_close(cohort.server["theta"], serial.server["theta"], rtol=1e-4, atol=1e-5)
    assert serial.clients.keys() == cohort.clients.keys()
    for client, state in serial.clients.items():
        for name, value in state.items():
            torch.testing.assert_close(cohort.clients[client][name], value, rtol=1e-4, atol=1e-5)


LOCAL_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "momentum": {"optimizer": "sgd", "momentum": 0.9, "optimizer_state": "keep"},
    "adamw": {"optimizer": "adamw", "lr": 0.01},
}


@pytest.mark.parametrize("optimizer", LOCAL_OPTIMIZERS)
def test_engines_agree_under_other_local_optimizers(cls: type[Algorithm], optimizer: str) -> None:
    tables = {"rounds": 4, "local": {"lr": 0.01, **LOCAL_OPTIMIZERS[optimizer]}, "server": {"lr": 0.1}}
    try:
        local = LocalSpec(epochs=1, **LOCAL_OPTIMIZERS[optimizer])
        cls().check_local(local.optimizer, local.settings)
    except KeelError as reason:
        pytest.skip(f"{cls.__name__} refuses it: {reason}")
    loop, serial = trained(cls, **tables)
    assert not torch.equal(serial.server["theta"], loop.initial)
    require_batchable(cls)
    _, cohort = trained(cls, **tables, engine={"name": "cohort"})
    torch.testing.assert_close(cohort.server["theta"], serial.server["theta"], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("stop", [1, 7])
def test_a_checkpoint_resumes_to_the_same_bits(cls: type[Algorithm], stop: int, tmp_path: Path) -> None:
    loop = uneven_loop({"algorithm": cls(), "rounds": ROUNDS})
    state, checkpoint = loop.start(tmp_path / "clients.bin"), tmp_path / "state.safetensors"
    assert loop.run(state, [], lambda: state.round == stop) == "interrupted"
    save_checkpoint(checkpoint, state)
    loop.run(state)  # rounds after a checkpoint leave it intact
    restored = load_checkpoint(checkpoint, loop.client_states(tmp_path / "clients.bin"))
    assert restored is not None
    assert restored.round == stop
    loop.run(restored)
    assert_equal_states(restored, reference(cls))


def test_every_round_sends_the_same_bytes(cls: type[Algorithm]) -> None:
    loop = uneven_loop({"algorithm": cls(), "rounds": 5})
    messages = messages_of(cls(), loop.initial, loop.participation.sizes)
    down, up = (0 if cls.pooled else sum(map(size_in_bytes, sent)) for sent in messages)
    for record in records_of(loop):
        assert record["bytes_down"] == down * len(record["cohort"])
        assert record["bytes_up"] == up * len(record["cohort"])


def test_tensors_are_float32_like_the_model_or_small(cls: type[Algorithm]) -> None:
    """Messages may have a part of the model; the local model and a client's own model have all of it."""
    state = reference(cls)
    theta, sizes = state.server["theta"], uneven_loop({"algorithm": cls()}).participation.sizes
    ctx = ClientContext(26, 6, 3, 0.5, 2.0, 0.1, 1.0, steps=3, sizes=sizes)
    received = received_by_a_client(cls(), state.server, ctx)
    client_state = next(iter(state.clients.values()), {})
    step_state = cls().init_steps(received, client_state, ctx)
    models = {
        "start": cls().start(received, client_state, ctx),
        "personal": cls().personal_model(theta, client_state, sizes),
    }
    path = LocalPath(theta, theta, mean_gradient=theta, full_gradient=theta, step_state=step_state)
    message, client_state = cls().report(path, received, client_state, ctx)
    for tensors in (state.server, client_state, step_state):
        for tensor in tensors.values():
            assert tensor.numel() < SMALL or (tensor.shape == theta.shape and tensor.dtype == torch.float32)
    for tensor in models.values():
        assert tensor.shape == theta.shape
        assert tensor.dtype == torch.float32
    for tensors in (received, message):
        for tensor in tensors.values():
            assert tensor.numel() < SMALL or (tensor.dim() == 1 and tensor.dtype == torch.float32)
            assert tensor.numel() <= theta.numel()


def received_by_a_client(algorithm: Algorithm, server: State, ctx: Context) -> Message:
    """The messages of both phases of a round."""
    received = algorithm.broadcast(server, ctx)
    if algorithm.probes:
        gradient = Report({"gradient": torch.zeros_like(server["theta"])}, 1.0, steps=0)
        received = {**received, **algorithm.absorb(server, [gradient], ctx)[1]}
    return received


def test_half_precision_keeps_counters(cls: type[Algorithm]) -> None:
    """Half precision stores model-sized tensors only: a counter beyond 256 would be rounded."""
    loop = uneven_loop({"algorithm": cls(), "memory": {"precision": "bfloat16"}})
    clients = loop.client_states()
    state = {
        name: value if value.shape == loop.initial.shape else torch.full_like(value, _large(value.dtype))
        for name, value in cls().init_client(loop.initial).items()
    }
    if not state:
        pytest.skip(f"{cls.__name__} has no client state")
    clients.stage(0, state)
    clients.commit()
    for name, value in state.items():
        tolerance = 1e-2 if value.shape == loop.initial.shape else 0.0
        torch.testing.assert_close(clients[0][name], value, rtol=tolerance, atol=tolerance)


def _large(dtype: torch.dtype) -> float:
    """261, which bfloat16 cannot hold, or the largest value of the dtype."""
    if dtype == torch.bool:
        return 1
    return min(261, (torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype).max)


def test_only_participants_have_state(cls: type[Algorithm]) -> None:
    loop = uneven_loop({"algorithm": cls(), "rounds": 2, "participation": {"rate": 0.2}})
    state, participants = loop.start(), set[int]()
    loop.run(state, [lambda record, *_: participants.update(record["cohort"])])
    assert cls.pooled or len(participants) < 6
    assert set(state.clients) == (participants if loop.local.init_client(loop.initial) else set())


class Absence:
    """A sampler that keeps three clients away between the first round and the last."""

    clients, size, period = 6, 3, 2.0

    def __init__(self, away: list[int], returns: int):
        self.away, self.returns = away, returns

    def cohort(self, round: int) -> np.ndarray:
        return np.array(self.away if round in (1, self.returns) else [0, 1, 2])


def test_a_returning_client_continues_from_its_state(cls: type[Algorithm]) -> None:
    if cls.pooled:
        pytest.skip("has a single client, which is never idle")
    away, returns = [3, 4, 5], 30
    loop = uneven_loop({"algorithm": cls(), "rounds": returns, "local": {"lr": 0.01}})
    loop.participation.sampler = Absence(away, returns)
    states: dict[int, dict[int, State]] = {}

    def keep(record: Record, state: TrainingState, seconds: float) -> None:
        states[record["round"]] = {client: state.clients[client] for client in state.clients}

    assert loop.run(loop.start(), [keep]) == "finished"
    if cls().init_client(loop.initial):
        for client in away:
            first, before, after = (states[round][client] for round in (1, returns - 1, returns))
            assert all(torch.equal(first[name], before[name]) for name in first)
            assert any(not torch.equal(before[name], after[name]) for name in first)


@pytest.mark.parametrize("engine", ["serial", "cohort", "pool"])
def test_results_come_in_the_order_of_the_cohort(cls: type[Algorithm], engine: str) -> None:
    if cls.pooled:
        pytest.skip("has a single client")
    if engine == "cohort":
        require_batchable(cls)
    loop = uneven_loop({"algorithm": cls(), "engine": {"name": engine}})
    ctx = Context(1, 6, 6, 1.0, 1.0, 0.1, 1.0, sizes=loop.participation.sizes)
    received = received_by_a_client(cls(), loop.start().server, ctx)
    state = loop.local.init_client(loop.initial)

    def results(cohort: list[int]) -> list[ClientResult]:
        work = RoundWork(np.array(cohort), received, [state] * len(cohort), ctx, [None] * len(cohort))
        return list(loop.engine.train(work))  # type: ignore[arg-type]

    alone = {client: results([client])[0] for client in range(6)}
    for client, result in zip([4, 0, 5, 2], results([4, 0, 5, 2]), strict=True):
        assert result.steps == alone[client].steps
        for name, value in result.message.items():
            torch.testing.assert_close(value, alone[client].message[name], rtol=1e-4, atol=1e-6)
    loop.engine.close()


def test_mean_suffices_is_declared_truly(cls: type[Algorithm]) -> None:
    """Secure aggregation would give the server one report, the weighted mean, in both phases of a round."""
    algorithm, sizes = cls(), (4, 1, 1, 1)
    generator = torch.Generator().manual_seed(0)
    theta = torch.randn(sum(sizes), generator=generator)
    ctx = Context(round=1, clients=10, cohort=3, share=0.3, period=10 / 3, lr=0.1, server_lr=0.7, sizes=sizes)
    initial = algorithm.init_server(theta)
    _, up = messages_of(algorithm, theta, sizes)

    def reports_like(message: Message) -> list[Report]:
        messages = [{name: torch.randn(value.shape, generator=generator) for name, value in message.items()}] * 2
        messages.append({name: -2 * value for name, value in messages[0].items()})
        return [Report(m, weight, steps) for m, weight, steps in zip(messages, (0.5, 0.3, 0.2), (3, 8, 5), strict=True)]

    def server(reduce: Callable[[list[Report]], list[Report]]) -> State:
        generator.manual_seed(1)
        state = initial
        if algorithm.probes:
            state, _ = algorithm.absorb(state, reduce(reports_like(up[0])), ctx)
        return algorithm.aggregate(state, reduce(reports_like(up[-1])), ctx)

    each = server(lambda reports: reports)
    mean = server(lambda reports: [Report(weighted_mean(reports), 1.0, 4)])
    suffices = all(torch.allclose(each[name], mean[name], atol=1e-6) for name in each)
    assert suffices == (cls.mean_suffices or algorithm.pooled), f"declare mean_suffices = {suffices} in {cls.__name__}"
