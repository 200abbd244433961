"""Mechanisms on reports: the encoded message travels and is counted, the decoded one is aggregated, in every engine."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import keel
from keel.algorithms.base import ClientState, Message, Report, weighted_mean
from keel.config.defaults import make_spec
from keel.core.mechanisms import Mechanisms, Sender, ServerRound, TakenMean
from keel.runs.build import build, make_task

SMALL = {"rounds": 3, "data": {"clients": 20}, "participation": {"rate": 0.2}, "local": {"steps": 2}}


@dataclass(frozen=True)
class Halves:
    """Sends the sum of a report and of what was lost before in half precision, and keeps what is lost."""

    example: Message
    name = "halves"
    changes_form = True

    def init_client(self) -> ClientState:
        return {name: torch.zeros_like(value) for name, value in self.example.items()}

    def encode(self, message: Message, state: ClientState, sender: Sender) -> tuple[Message, ClientState]:
        whole = {name: value + state[name] if state else value for name, value in message.items()}
        sent = {f"half.{name}": value.half() for name, value in whole.items()}
        return sent, {name: value - sent[f"half.{name}"].float() for name, value in whole.items()} if state else {}

    def decode(self, message: Message, sender: Sender) -> Message:
        return {name.removeprefix("half."): value.float() for name, value in message.items()}


def trained(engine: str, algorithm: str = "scaffold", mechanism: bool = True, mean: Any = None, **more: Any) -> Any:
    spec = make_spec({**SMALL, "algorithm": {"name": algorithm}, "engine": {"name": engine, "workers": 2}, **more})
    training = build(spec, make_task(spec))
    loop = training.loop
    if mechanism:
        local = replace(loop.local, mechanisms=Mechanisms((Halves(loop._example_report),)))
        loop.local = local
        getattr(loop.engine, "engine", loop.engine).local = local
    loop.mean = mean
    state, records = loop.start(), []
    loop.run(state, [lambda record, state, seconds: records.append(record)])
    return loop, state, records


@pytest.mark.parametrize("algorithm", ["scaffold", "mime"])
def test_every_engine_applies_a_mechanism_with_the_same_bits(algorithm: str) -> None:
    _, serial, records = trained("serial", algorithm)
    _, pool, _ = trained("pool", algorithm)
    _, cohort, _ = trained("cohort", algorithm)
    assert torch.equal(serial.server["theta"], pool.server["theta"])
    assert torch.allclose(serial.server["theta"], cohort.server["theta"], atol=1e-3)
    _, plain, before = trained("serial", algorithm, mechanism=False)
    assert not torch.equal(plain.server["theta"], serial.server["theta"])
    assert 2 * records[0]["bytes_up"] == before[0]["bytes_up"]


def test_what_a_mechanism_keeps_is_part_of_the_client_state_and_hidden_from_the_algorithm() -> None:
    loop, state, _ = trained("serial", "scaffold")
    client = next(iter(state.clients))
    kept = state.clients[client]["keel.mechanism.halves.delta"]
    assert 0 < float(kept.abs().max()) < 1e-3
    assert set(loop.local.init_client(loop.initial)) == {
        "c",
        "keel.mechanism.halves.delta",
        "keel.mechanism.halves.control",
    }


def test_draws_of_a_mechanism_differ_by_purpose_phase_round_and_client() -> None:
    senders = [Sender(0, 1, 2), Sender(0, 1, 3), Sender(0, 2, 2), Sender(1, 1, 2), Sender(0, 1, 2, "probe")]
    drawn = [sender.rng("noise").random() for sender in senders] + [senders[0].rng("other").random()]
    assert len(set(drawn)) == 6
    assert drawn[0] == Sender(0, 1, 2).rng("noise").random()


class CountedMean:
    fixed_cohort = False

    def mean(self, reports: Iterable[Report], at: ServerRound) -> TakenMean:
        rounds = at.state.get("rounds", torch.zeros(1)) + 1
        return TakenMean(weighted_mean(reports), {"rounds": rounds}, {"counted": int(rounds)})


def test_a_mechanism_takes_the_mean_and_keeps_a_state() -> None:
    _, with_mean, records = trained("serial", "ghbm", mechanism=False, mean=CountedMean())
    _, without, _ = trained("serial", "ghbm", mechanism=False)
    assert torch.allclose(with_mean.server["theta"], without.server["theta"], atol=1e-6)
    assert [record["counted"] for record in records] == [1, 2, 3]
    assert with_mean.mean["rounds"] == 3


@dataclass(frozen=True)
class EmptyFirst:
    """No client takes part in the first round."""

    clients: int = 20
    size: int = 2
    period: float = 10.0
    may_be_empty = True

    def cohort(self, round: int) -> Any:
        return torch.arange(0 if round == 1 else 2).numpy()


def test_a_round_without_clients_leaves_the_model_as_it_is() -> None:
    run = keel.run({"rounds": 1, "data": {"clients": 20}, "local": {"steps": 2}}, sampler=EmptyFirst())
    assert run.records[0]["cohort"] == []
    assert run.records[0]["train_loss"] is None
    assert run.records[0]["bytes_up"] == 0
