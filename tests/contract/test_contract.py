"""What every algorithm keeps to. A user's own goes through the same suite: EXTRA holds one as an example."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from keel.algorithms import REGISTRY, describe
from keel.algorithms.base import Algorithm, ClientContext, Context, Memory, Message, Report, State
from keel.algorithms.base import Path as LocalPath
from keel.engines import RoundWork
from keel.rounds import Position, Training, size_in_bytes
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

    def __init__(self, inner: Algorithm):
        object.__setattr__(self, "inner", inner)

    def init_server(self, theta: Tensor) -> State:
        return self.inner.init_server(theta)  # type: ignore[attr-defined]

    def init_client(self, theta: Tensor) -> Memory:
        return self.inner.init_client(theta)  # type: ignore[attr-defined]

    def _unchanged(self, call: Any, *inputs: dict[str, Tensor]) -> Any:
        before = [{k: v.clone() for k, v in tensors.items()} for tensors in inputs]
        result = call()
        for tensors, copies in zip(inputs, before, strict=True):
            assert tensors.keys() == copies.keys()
            assert all(torch.equal(tensors[k], copies[k]) for k in copies)
        return result

    def broadcast(self, server: State, ctx: Context) -> Message:
        return self._unchanged(lambda: self.inner.broadcast(server, ctx), server)  # type: ignore[attr-defined]

    def direction(self, w: Tensor, gradient: Any, received: Message, memory: Memory, ctx: ClientContext) -> Tensor:
        def call() -> Tensor:
            return self.inner.direction(w, gradient, received, memory, ctx)  # type: ignore[attr-defined]

        return self._unchanged(call, {"w": w}, received, memory)

    def report(self, path: LocalPath, received: Message, memory: Memory, ctx: ClientContext) -> tuple[Message, Memory]:
        def call() -> tuple[Message, Memory]:
            return self.inner.report(path, received, memory, ctx)  # type: ignore[attr-defined]

        return self._unchanged(call, {"start": path.start, "end": path.end}, received, memory)

    def aggregate(self, server: State, reports: Iterable[Report], ctx: Context) -> State:
        received = list(reports)
        return self._unchanged(
            lambda: self.inner.aggregate(server, received, ctx),  # type: ignore[attr-defined]
            server,
            *(report.message for report in received),
        )


@every_algorithm
@pytest.mark.parametrize("engine", ["serial", "cohort"])
def test_no_input_is_changed(cls: type[Algorithm], engine: str) -> None:
    training = uneven_training({"algorithm": cls(), "rounds": 6, "engine": {"name": engine}})
    plain = training.start()
    training.run(plain, [])
    watched = Watched(cls())
    problem = training.engine.problem  # type: ignore[attr-defined]
    object.__setattr__(problem, "algorithm", watched)
    object.__setattr__(training.spec, "__dict__", {**training.spec.__dict__, "algorithm": watched})
    position = training.start()
    training.run(position, [])
    assert torch.equal(plain.server["theta"], position.server["theta"])


@every_algorithm
def test_equal_seeds_give_equal_bits(cls: type[Algorithm]) -> None:
    (_, one), (_, two) = trained(cls), trained(cls)
    assert torch.equal(one.server["theta"], two.server["theta"])


@every_algorithm
def test_cohort_agrees_with_serial_to_rounding(cls: type[Algorithm]) -> None:
    (_, serial), (_, cohort) = trained(cls), trained(cls, engine={"name": "cohort"})
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
    position, rounds = training.start(), [0]

    def enough() -> bool:
        rounds[0] += 1
        return rounds[0] == stop

    assert training.run(position, [], enough) == "interrupted"
    folder = RunFolder.create(tmp_path / "run", training.spec, "serial")
    folder.save(position)
    restored = folder.restore()
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
    ctx = ClientContext(26, 6, 3, 2.0, 0.1, 1.0, steps=3)
    received = cls().broadcast(position.server, ctx)
    memory = next(iter(position.memories.values()), {})
    message, memory = cls().report(LocalPath(training.initial, training.initial), received, memory, ctx)
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
    assert len(took_part) < 6
    assert set(position.memories) == (took_part if describe(cls)["stateful"] else set())


@every_algorithm
def test_a_clients_hundredth_round_is_like_its_second(cls: type[Algorithm]) -> None:
    tables = {"participation": {"rate": 1.0}, "rounds": 100, "local": {"epochs": 1, "lr": 0.05}}
    _, position = trained(cls, **tables)
    assert torch.isfinite(position.server["theta"]).all()


@every_algorithm
def test_the_order_of_the_cohort_is_the_order_of_the_reports(cls: type[Algorithm]) -> None:
    training = uneven_training({"algorithm": cls()})
    position = training.start()
    ctx = ClientContext(1, 6, 6, 1.0, 0.1, 1.0, steps=0)
    received = cls().broadcast(position.server, ctx)
    memories = [cls().init_client(training.initial) for _ in range(6)]
    cohort = training.sampler.cohort(1)
    results = list(training.engine.train(RoundWork(cohort, received, memories[: len(cohort)], ctx)))
    sizes = training.task.data.partition.sizes[cohort]
    assert [r.steps for r in results] == [2 * -(-int(n) // 4) for n in sizes]
    assert all(size_in_bytes(r.message) > 0 for r in results)
