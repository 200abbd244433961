"""Simulated availability: who answers, what is sent, what a round without answers changes."""

from math import cos, pi
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keel.config.defaults import make_spec
from keel.config.network import Network
from keel.core.availability import Availability, Diurnal
from keel.core.loop import Loop
from keel.core.observers import Observer, RoundEnd
from keel.core.records import Record
from keel.core.sampling import Uniform
from keel.errors import KeelError
from keel.runs.build import build, make_task
from keel.testing.tasks import small_network, uneven_data
from tests.conftest import records_of, uneven_loop

HALF: dict[str, Any] = {"participation": {"rate": 1.0}, "availability": {"dropout": 0.5}}


def answering(availability: Availability, round: int, cohort: list[int]) -> set[int]:
    attendance = availability.attendance(round, cohort, [1] * len(cohort), 0, 0)
    return set(cohort) - set(attendance.offline) - set(attendance.failed)


@given(st.integers(0, 2**31), st.integers(1, 1000), st.permutations(range(8)), st.integers(0, 8))
def test_whether_a_client_answers_does_not_depend_on_the_rest_of_the_cohort(
    seed: int, round: int, order: list[int], first: int
) -> None:
    network = Network(straggle=1.0, stragglers=0.3)
    availability = Availability(seed, 0.3, Diurnal(7, 0.2, 1.0), 0.15, 0.05, network)
    every = answering(availability, round, list(range(8)))
    assert answering(availability, round, order[:first]) == every & set(order[:first])


def test_the_share_that_drops_out_is_the_probability() -> None:
    availability, clients = Availability(3, dropout=0.2), list(range(50))
    share = np.mean([len(answering(availability, t, clients)) / 50 for t in range(1, 201)])
    assert share == pytest.approx(0.8, abs=4 * np.sqrt(0.16 / 10_000))


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_diurnal_clients_are_online_by_day(spread: float) -> None:
    diurnal, clients = Diurnal(24, 0.1, spread), list(range(600))
    online = [len(answering(Availability(0, diurnal=diurnal), t, clients)) / 600 for t in range(1, 25)]
    expected = [0.1 + 0.9 * (1 + cos(2 * pi * t / 24)) / 2 if spread == 0 else 0.55 for t in range(1, 25)]
    assert online == pytest.approx(expected, abs=4 * np.sqrt(0.25 / 600))


def test_a_client_that_needs_longer_than_the_deadline_misses_it() -> None:
    network = Network(latency_ms=0, up_mbps=8, down_mbps=8)
    availability = Availability(0, deadline=10.0, step_seconds=1.0, devices=network)
    attendance = availability.attendance(1, [4, 7, 9], [8, 9, 7], down=1_000_000, up=500_000)
    assert {client: reply.reason for client, reply in attendance.failed.items()} == {7: "missed the deadline"}
    assert attendance.seconds == 10.0  # 9.5, 10.5 and 8.5 seconds: the server waits for client 7 until the deadline
    assert availability.attendance(1, [4, 9], [8, 7], 1_000_000, 500_000).seconds == pytest.approx(9.5)


def test_stragglers_are_slow_in_every_round() -> None:
    network = Network(latency_ms=0, stragglers=0.25, straggler_slowdown=4.0)
    seconds = np.array([[network.client_seconds(1, t, c, 0, 0, 1.0) for c in range(400)] for t in (1, 2)])
    assert (seconds[0] == seconds[1]).all()
    assert set(seconds[0]) == {1.0, 4.0}
    assert np.mean(seconds[0] == 4.0) == pytest.approx(0.25, abs=0.09)
    assert network.round_seconds(1, 1, list(range(400)), 0, 0, 1.0) == 4.0


def test_a_dropped_client_is_not_trained_and_counts_in_the_bytes_down_alone() -> None:
    loop = uneven_loop({**HALF, "rounds": 6})
    trained: list[list[int]] = []
    train = loop.engine.train
    loop.engine.train = lambda work: (trained.append(work.cohort.tolist()), train(work))[1]  # type: ignore[method-assign]
    records, model = records_of(loop), 4 * loop.parameters
    assert {len(record["cohort"]) for record in records} > {2, 3}
    for record, clients in zip(records, trained, strict=True):
        assert record["cohort"] == clients
        assert set(record["dropped"].values()) == {"dropped out"}
        assert len(record["cohort"]) + len(record["dropped"]) == 6
        assert (record["bytes_down"], record["bytes_up"]) == (6 * 2 * model, len(clients) * model)


def test_nothing_is_sent_to_a_client_that_is_offline() -> None:
    night = {"diurnal_rounds": 10, "diurnal_least": 0.3}
    loop = uneven_loop({"algorithm": {"name": "fedavg"}, "availability": night, "participation": {"rate": 1.0}})
    for record in records_of(loop):
        assert record["bytes_down"] == record["bytes_up"] == len(record["cohort"]) * 4 * loop.parameters
        assert set(record.get("dropped", {}).values()) <= {"offline"}


def test_the_weights_and_the_share_are_those_of_the_clients_that_answer() -> None:
    seen: list[tuple[float, float, int]] = []

    class Watch(Observer):
        def round_ended(self, event: RoundEnd) -> None:
            examples = loop.task.data.partition.sizes_of(event.work.cohort).sum() / 50
            seen.append((sum(event.weights), event.work.ctx.share - examples, event.work.ctx.cohort))

    loop = uneven_loop({**HALF, "rounds": 8})
    loop.run(loop.start(), [Watch()])
    assert all(weights == pytest.approx(1) and share == pytest.approx(0) for weights, share, cohort in seen if cohort)
    assert {cohort for *_, cohort in seen} != {6}


@pytest.mark.parametrize("algorithm", ["ghbm", "fedhbm", "mime", "scaffold", "fedadam"])
def test_a_round_without_answers_is_recorded_and_changes_nothing(algorithm: str) -> None:
    table = {"algorithm": {"name": algorithm}, "participation": {"rate": 0.17}, "availability": {"dropout": 0.6}}
    loop = uneven_loop({**table, "rounds": 12, "evaluation": {"drift": True, "every": 1}})
    records: list[Record] = []
    states = [(loop.initial.clone(), 0)]

    def keep(record: Record, state: Any, _: float) -> None:
        records.append(record)
        states.append((state.server["theta"].clone(), len(state.clients)))

    assert loop.run(loop.start(), [keep]) == "finished"
    empty = [record["round"] for record in records if not record["cohort"]]
    assert [record["round"] for record in records] == list(range(1, 13))
    assert 0 < len(empty) < 12
    for record, (before, clients), (after, clients_after) in zip(records, states, states[1:], strict=False):
        assert torch.equal(before, after) == (record["round"] in empty)
        if record["round"] in empty:
            assert (record["train_loss"], record["bytes_up"], clients) == (None, 0, clients_after)
            assert record["bytes_down"] > 0
            assert "accuracy" in record


def test_the_actual_tau_counts_from_the_last_round_that_a_client_answered() -> None:
    loop = uneven_loop({**HALF, "algorithm": {"name": "localghbm"}, "rounds": 9})
    state = loop.start()
    answered: dict[int, int] = {}
    loop.run(state, [lambda record, *_: answered.update(dict.fromkeys(record["cohort"], record["round"]))])
    assert {client: int(state.clients[client]["last"]) for client in state.clients} == answered


@pytest.mark.parametrize("availability", [{"dropout": 0.0}, {"diurnal_rounds": 5, "diurnal_least": 1.0}])
def test_with_clients_that_always_answer_the_bits_are_those_without_the_table(availability: dict[str, Any]) -> None:
    models = []
    for table in ({}, {"availability": availability}):
        loop = uneven_loop({"rounds": 4, **table})
        state = loop.start()
        loop.run(state)
        models.append(state.server["theta"])
    assert torch.equal(*models)


def test_the_duration_of_a_round_is_recorded_from_the_draws_of_the_deadline() -> None:
    network = {"straggle": 1.0, "latency_ms": 0.0}
    limits = {"deadline": 0.02, "step_seconds": 0.001}
    table = {"network": network, "availability": limits, "participation": {"rate": 1.0}, "rounds": 10}
    loop = uneven_loop(table)
    down, up = 8 * loop.parameters, 4 * loop.parameters
    for record in records_of(loop):
        seconds = {}
        for client, size in enumerate(loop.task.data.partition.sizes):
            computing = 0.001 * loop.local.config.count(int(size))
            seconds[client] = Network(**network).client_seconds(0, record["round"], client, down, up, computing)
        assert set(record["cohort"]) == {client for client, took in seconds.items() if took <= 0.02}
        longest = 0.02 if record.get("dropped") else max(seconds.values())
        assert record["federation_seconds"] == pytest.approx(longest)


def test_a_round_of_a_million_clients_draws_only_for_its_cohort(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    from keel.core import availability as module

    keyed = module.keyed_rng
    monkeypatch.setattr(module, "keyed_rng", lambda *key: (drawn.append(key), keyed(*key))[1])
    cohort = Uniform(1_000_000, 10, 0).cohort(1).tolist()
    Availability(0, 0.1, Diurnal(24)).attendance(1, cohort, [1] * 10, 0, 0)
    assert len(drawn) <= 3 * 10


def loop_with(engine: str, availability: dict[str, Any]) -> Loop:
    table = {"data": {"name": "custom"}, "model": {"name": "custom"}, "engine": {"name": engine, "workers": 2}}
    local = {"epochs": 1, "batch": 4}
    spec = make_spec({**table, "local": local, "rounds": 4, "participation": {"rate": 1.0}, **availability})
    return build(spec, make_task(spec, module=small_network(), data=uneven_data())).loop


@pytest.mark.parametrize("engine", ["pool", "cohort"])
def test_the_same_clients_answer_in_every_engine(engine: str) -> None:
    table = {"availability": {"dropout": 0.3, "diurnal_rounds": 4.0, "diurnal_least": 0.5}}
    models, cohorts = [], []
    for name in ("serial", engine):
        loop = loop_with(name, table)
        state = loop.start()
        records: list[Record] = []
        loop.run(state, [lambda record, *_, records=records: records.append(record)])
        models.append(state.server["theta"])
        cohorts.append([record["cohort"] for record in records])
    assert cohorts[0] == cohorts[1]
    torch.testing.assert_close(*models, **({"rtol": 0, "atol": 0} if engine == "pool" else {}))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"availability": {"dropout": 1.0}}, "availability.dropout must be less than 1 (got 1.0)"),
        ({"availability": {"deadline": 3.0}}, "availability: deadline requires step_seconds, the computing time"),
        (
            {"availability": {"deadline": 3.0, "step_seconds": 1.0}},
            "availability.deadline requires the table [network]",
        ),
        ({"availability": {"diurnal_least": 0.5}}, "availability: diurnal_least requires diurnal_rounds"),
        ({"availability": {"dropuot": 0.5}}, "unknown availability field 'dropuot'; did you mean 'dropout'?"),
        ({"network": {"straggler_slowdown": 2.0}}, "network: straggler_slowdown requires stragglers"),
        ({"algorithm": {"name": "centralized"}, "availability": {"dropout": 0.1}}, "availability must be left out for"),
    ],
)
def test_a_field_that_cannot_be_simulated_is_refused(table: dict[str, Any], message: str) -> None:
    with pytest.raises(KeelError) as error:
        make_spec(table)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_deadline_makes_the_network_part_of_the_experiment() -> None:
    limits = {"deadline": 3.0, "step_seconds": 1.0}
    slow, fast = (make_spec({"network": {"slowdown": s}, "availability": limits}) for s in (2.0, 1.0))
    assert slow.identity != fast.identity
    slow, fast = (make_spec({"network": {"slowdown": s}}) for s in (2.0, 1.0))
    assert slow.identity == fast.identity
    assert "availability" not in fast.to_toml()
