"""What every algorithm keeps to. A user's own goes through the same suite: EXTRA holds one as an example."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from keel.algorithms import REGISTRY, describe, messages_of
from keel.algorithms.base import Algorithm, ClientContext, Context, Memory, Message, Report, State, weighted_mean
from keel.algorithms.base import Path as LocalPath
from keel.client import ClientResult
from keel.engines import RoundWork
from keel.engines.cohort import Cohort
from keel.engines.pool import Pool
from keel.rounds import Position, Record, Training
from keel.runs.folder import RunFolder
from tests.conftest import records_of, uneven_training
from tests.contract.own import Lookahead

ALGORITHMS: list[type[Algorithm]] = [*REGISTRY.values(), Lookahead]
every_algorithm = pytest.mark.parametrize("cls", ALGORITHMS, ids=lambda cls: cls.name)


def trained(cls: type[Algorithm], **tables: Any) -> tuple[Training, Position]:
    training = uneven_training({"algorithm": cls(), **tables})
    position = training.start()
    assert training.run(position, []) == "finished"
    return training, position


class Watched(Algorithm):
    """Passes every call on, and asserts that no input was changed by it."""

    inner: Algorithm
    observes = property(lambda self: self.inner.observes)
    local_momentum = property(lambda self: self.inner.local_momentum)
    probes = property(lambda self: self.inner.probes)
    pooled = property(lambda self: self.inner.pooled)

    def __init__(self, inner: Algorithm):
        object.__setattr__(self, "inner", inner)

    def init_server(self, theta: Tensor) -> State:
        return self._unchanged(lambda: self.inner.init_server(theta), {"theta": theta})

    def init_client(self, theta: Tensor) -> Memory:
        return self._unchanged(lambda: self.inner.init_client(theta), {"theta": theta})

    def broadcast(self, server: State, ctx: Context) -> Message:
        return self._unchanged(lambda: self.inner.broadcast(server, ctx), server)

    def absorb(self, server: State, probes: Iterable[Report], ctx: Context) -> tuple[State, Message]:
        received = list(probes)
        messages = [report.message for report in received]
        return self._unchanged(lambda: self.inner.absorb(server, received, ctx), server, *messages)

    def direction(self, w: Tensor, gradient: Any, received: Message, memory: Memory, ctx: ClientContext) -> Tensor:
        call = partial(self.inner.direction, w, gradient, received, memory, ctx)
        return self._unchanged(call, {"w": w}, received, memory)

    def report(self, path: LocalPath, received: Message, memory: Memory, ctx: ClientContext) -> tuple[Message, Memory]:
        seen = {name: value for name, value in vars(path).items() if value is not None}
        return self._unchanged(partial(self.inner.report, path, received, memory, ctx), seen, received, memory)

    def aggregate(self, server: State, reports: Iterable[Report], ctx: Context) -> State:
        received = list(reports)
        messages = [report.message for report in received]
        return self._unchanged(lambda: self.inner.aggregate(server, received, ctx), server, *messages)

    def _unchanged(self, call: Callable[[], Any], *inputs: dict[str, Tensor]) -> Any:
        before = [{k: v.clone() for k, v in tensors.items()} for tensors in inputs]
        result = call()
        for tensors, copies in zip(inputs, before, strict=True):
            assert tensors.keys() == copies.keys()
            assert all(torch.equal(tensors[k], copies[k]) for k in copies)
        return result


@every_algorithm
@pytest.mark.parametrize("engine", ["serial", "cohort"])
def test_no_input_is_changed(cls: type[Algorithm], engine: str) -> None:
    training = uneven_training({"algorithm": cls(), "rounds": 6, "engine": {"name": engine, "workers": 1}})
    plain = training.start()
    training.run(plain, [])
    watched = Watched(cls())
    object.__setattr__(training.engine.recipe, "algorithm", watched)  # type: ignore[attr-defined]
    object.__setattr__(training.spec, "__dict__", {**training.spec.__dict__, "algorithm": watched})
    position = training.start()
    training.run(position, [])
    assert torch.equal(plain.server["theta"], position.server["theta"])


@every_algorithm
def test_equal_seeds_give_equal_bits(cls: type[Algorithm]) -> None:
    (_, one), (_, two) = trained(cls), trained(cls)
    assert torch.equal(one.server["theta"], two.server["theta"])


@every_algorithm
@pytest.mark.parametrize(("alone", "shared"), [("serial", "pool"), ("cohort", "cohort")])
def test_bits_are_the_same_whatever_the_number_of_workers(
    cls: type[Algorithm], alone: str, shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cohort, "group", 2)
    reference = uneven_training({"algorithm": cls(), "rounds": 8, "engine": {"name": alone, "workers": 1}})
    position = reference.start()
    records: list[Record] = []
    reference.run(position, [lambda record, *_: records.append(record)])
    for workers in (1, 3):
        pool = uneven_training({"algorithm": cls(), "rounds": 8, "engine": {"name": shared, "workers": workers}})
        assert isinstance(pool.engine, Pool) or workers == 1
        other = pool.start()
        again: list[Record] = []
        pool.run(other, [lambda record, *_, again=again: again.append(record)])
        assert again == records
        assert other.server.keys() == position.server.keys()
        assert all(torch.equal(other.server[name], value) for name, value in position.server.items())
        assert other.memories.keys() == position.memories.keys()
        for client, memory in position.memories.items():
            assert all(torch.equal(other.memories[client][name], value) for name, value in memory.items())


@every_algorithm
def test_cohort_agrees_with_serial_to_rounding(cls: type[Algorithm]) -> None:
    # small steps: large ones make training chaotic, and rounding would grow to anything
    calm = {"rounds": 8, "local": {"lr": 0.01}, "server": {"lr": 0.1}}
    (_, serial), (_, cohort) = trained(cls, **calm), trained(cls, **calm, engine={"name": "cohort"})
    torch.testing.assert_close(cohort.server["theta"], serial.server["theta"], rtol=1e-4, atol=1e-5)
    assert serial.memories.keys() == cohort.memories.keys()
    for client, memory in serial.memories.items():
        for name, value in memory.items():
            torch.testing.assert_close(cohort.memories[client][name], value, rtol=1e-4, atol=1e-5)


@every_algorithm
@pytest.mark.parametrize("stop", [1, 7, 24])
def test_a_position_that_went_through_a_file_goes_on_to_the_same_bits(
    cls: type[Algorithm], stop: int, tmp_path: Path
) -> None:
    training, whole = trained(cls)
    folder = RunFolder.create(tmp_path / "run", training.spec, {})
    position, rounds = training.start(folder.memory_file), [0]

    def enough() -> bool:
        rounds[0] += 1
        return rounds[0] == stop

    assert training.run(position, [], enough) == "interrupted"
    folder.save(position)
    training.run(position, [])  # what is written after a checkpoint does not harm it
    restored = folder.restore(training.memories(folder.memory_file))
    assert restored is not None
    assert restored.round == stop
    training.run(restored, [])
    assert torch.equal(restored.server["theta"], whole.server["theta"])


@every_algorithm
def test_messages_have_one_form_and_the_bytes_that_are_declared(cls: type[Algorithm]) -> None:
    training = uneven_training({"algorithm": cls()})
    records = records_of(training)
    declared = describe(cls)
    model = 4 * training.parameters
    for record in records:
        assert record["bytes_down"] == declared["down"] * model * len(record["cohort"])
        assert record["bytes_up"] == declared["up"] * model * len(record["cohort"])


@every_algorithm
def test_every_tensor_is_float32_and_as_long_as_the_model_or_of_one_element(cls: type[Algorithm]) -> None:
    training, position = trained(cls)
    ctx = ClientContext(26, 6, 3, 0.5, 2.0, 0.1, 1.0, steps=3)
    received = cls().broadcast(position.server, ctx)
    memory = next(iter(position.memories.values()), {})
    there = training.initial
    path = LocalPath(there, there, mean_gradient=there, full_gradient=there, velocity=there)
    message, memory = cls().report(path, {**received, "c": there}, memory, ctx)
    for tensors in (position.server, received, message, memory):
        for tensor in tensors.values():
            assert tensor.dtype == torch.float32
            assert tuple(tensor.shape) in {(training.parameters,), (1,)}


@every_algorithm
def test_only_clients_that_took_part_have_a_memory(cls: type[Algorithm]) -> None:
    training = uneven_training({"algorithm": cls(), "rounds": 2, "participation": {"rate": 0.2}})
    records, position = [], training.start()
    training.run(position, [lambda record, *_: records.append(record)])
    took_part = {client for record in records for client in record["cohort"]}
    assert cls.pooled or len(took_part) < 6
    assert set(position.memories) == (took_part if describe(cls)["stateful"] else set())


@every_algorithm
def test_a_client_that_comes_back_after_a_hundred_rounds_goes_on_from_its_memory(cls: type[Algorithm]) -> None:
    training = uneven_training({"algorithm": cls(), "rounds": 103})
    if cls.pooled:
        pytest.skip("has one client, which never is away")
    away = [3, 4, 5]
    training.sampler = SimpleNamespace(  # type: ignore[assignment]
        clients=6, period=2.0, cohort=lambda t: np.array(away if t in (1, 102) else [0, 1, 2])
    )
    position, memories = training.start(), {}

    def remember(record: dict[str, Any], position: Position, _: float) -> None:
        memories[record["round"]] = dict(position.memories)

    assert training.run(position, [remember]) == "finished"
    if describe(cls)["stateful"]:
        for client in away:
            assert all(torch.equal(memories[1][client][k], memories[101][client][k]) for k in memories[1][client])
            assert any(not torch.equal(memories[101][client][k], memories[102][client][k]) for k in memories[1][client])


@every_algorithm
@pytest.mark.parametrize("engine", ["serial", "cohort", "pool"])
def test_reports_come_in_the_order_of_the_cohort(cls: type[Algorithm], engine: str) -> None:
    if cls.pooled:
        pytest.skip("has one client")
    training = uneven_training({"algorithm": cls(), "engine": {"name": engine}})
    ctx = Context(1, 6, 6, 1.0, 1.0, 0.1, 1.0)
    received = cls().broadcast(training.start().server, ctx)
    memory = cls().init_client(training.initial)

    def results(cohort: list[int]) -> list[ClientResult]:
        there = {**received, "c": training.initial}
        return list(
            training.engine.train(RoundWork(np.array(cohort), there, [memory] * len(cohort), ctx, [None] * len(cohort)))
        )

    alone = {client: results([client])[0] for client in range(6)}
    for client, result in zip([4, 0, 5, 2], results([4, 0, 5, 2]), strict=True):
        assert result.steps == alone[client].steps
        for name, value in result.message.items():
            torch.testing.assert_close(value, alone[client].message[name], rtol=1e-4, atol=1e-6)
    training.engine.close()


@every_algorithm
def test_the_mean_of_the_reports_suffices_where_an_algorithm_says_so(cls: type[Algorithm]) -> None:
    """What secure aggregation would hand over: one report that is the weighted mean, in both phases of a round."""
    algorithm, size = cls(), 7
    generator = torch.Generator().manual_seed(0)
    theta = torch.randn(size, generator=generator)
    ctx = Context(round=1, clients=10, cohort=3, share=0.3, period=10 / 3, lr=0.1, server_lr=0.7)
    server = algorithm.init_server(theta)
    _, up = messages_of(algorithm, theta)

    def reports_like(message: Message) -> list[Report]:
        messages = [{name: torch.randn(value.shape, generator=generator) for name, value in message.items()}] * 2
        messages.append({name: -2 * value for name, value in messages[0].items()})
        return [Report(m, weight, steps) for m, weight, steps in zip(messages, (0.5, 0.3, 0.2), (3, 8, 5), strict=True)]

    def state(reduce: Callable[[list[Report]], list[Report]]) -> State:
        generator.manual_seed(1)
        known = server
        if algorithm.probes:
            known, _ = algorithm.absorb(known, reduce(reports_like(up[0])), ctx)
        return algorithm.aggregate(known, reduce(reports_like(up[-1])), ctx)

    each = state(lambda reports: reports)
    mean = state(lambda reports: [Report(weighted_mean(reports), 1.0, 4)])
    alike = all(torch.allclose(each[name], mean[name], atol=1e-6) for name in each)
    assert alike == (cls.mean_suffices or algorithm.pooled)
