import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import keel
from keel.algorithms import REGISTRY
from keel.engines import cluster
from keel.engines.cohort import Cohort
from keel.engines.ray import Hand, Ray
from keel.rounds import Position, Record, Training
from tests.conftest import uneven_training
from tests.contract.own import Lookahead

ray = pytest.importorskip("ray", reason="the extra 'ray' is not installed")
ACTORS = 3


@pytest.fixture(scope="module")
def there() -> Iterator[None]:
    """A Ray that the tests of this module share: the engine leaves one that it has not begun as it is."""
    os.environ.update(cluster.SILENT)
    before = signal.getsignal(signal.SIGTERM)
    options = {"log_to_driver": False, "logging_level": "critical", "include_dashboard": False}
    ray.init("local", num_cpus=ACTORS + 1, num_gpus=1, object_store_memory=2**27, **options)
    yield
    ray.shutdown()
    signal.signal(signal.SIGTERM, before)


class Lent:
    """Actors that are lent from one engine to the next: to start one takes longer than a test."""

    def __init__(self) -> None:
        self.actors: list[Any] = []

    def to(self, training: Training) -> None:
        engine = training.engine
        assert isinstance(engine, Ray)
        engine.hands = [Hand(actor, engine._load(actor, by_file=True)) for actor in self.actors[: engine.count]]
        engine._staff()
        self.actors += [hand.actor for hand in engine.hands[len(self.actors) :]]
        engine._dismiss = engine.hands.clear  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def lent(there: None) -> Lent:
    return Lent()


def ended(training: Training) -> tuple[Position, list[Record]]:
    position, records = training.start(), []
    training.run(position, [lambda record, *_: records.append(record)])
    return position, records


def same(one: tuple[Position, list[Record]], other: tuple[Position, list[Record]]) -> None:
    assert one[1] == other[1]
    assert one[0].server.keys() == other[0].server.keys()
    assert all(torch.equal(one[0].server[name], value) for name, value in other[0].server.items())
    assert one[0].memories.keys() == other[0].memories.keys()
    for client, memory in one[0].memories.items():
        assert all(torch.equal(memory[name], value) for name, value in other[0].memories[client].items())


@pytest.mark.parametrize("actors", [1, ACTORS])
@pytest.mark.parametrize("cls", [*REGISTRY.values(), Lookahead], ids=lambda cls: cls.name)
def test_bits_are_those_of_serial(cls: type[keel.Algorithm], actors: int, lent: Lent) -> None:
    table: dict[str, Any] = {"algorithm": cls(), "rounds": 4, "evaluation": {"every": 2}}
    training = uneven_training({**table, "engine": {"name": "ray", "workers": actors}})
    lent.to(training)
    assert training.engine.name == "ray"
    same(ended(training), ended(uneven_training({**table, "engine": {"name": "serial"}})))


@pytest.mark.parametrize("actors", [1, ACTORS])
def test_groups_of_a_cohort_have_the_bits_of_cohort(actors: int, lent: Lent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cohort, "group", 2)
    table: dict[str, Any] = {"algorithm": {"name": "scaffold"}, "rounds": 3, "participation": {"rate": 1.0}}
    training = uneven_training({**table, "engine": {"name": "cohort", "workers": actors, "address": "local"}})
    lent.to(training)
    assert training.engine.name == "cohort"
    same(ended(training), ended(uneven_training({**table, "engine": {"name": "cohort", "workers": 1}})))
