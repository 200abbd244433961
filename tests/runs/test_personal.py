"""Personal models: `evaluation.clients` measures each client with its own, whatever engine trains it."""

from pathlib import Path
from statistics import fmean
from typing import Any, cast

import numpy as np
import pytest
import torch

import keel
from keel.config.defaults import make_spec
from keel.core.flat_model import FlatModel
from keel.core.measurement import measure_examples
from keel.core.records import Record
from keel.runs.build import make_task
from tests.conftest import make_loop, records_of, small_network, uneven_data, uneven_loop

PERSONALISED = ["ditto", "fedper"]


def digits(name: str, **tables: Any) -> dict[str, Any]:
    """A few rounds on digits whose clients have few of the ten classes, evaluated at the end."""
    return {
        "algorithm": {"name": name},
        "rounds": 15,
        "data": {"clients": 20, "alpha": 0.1},
        "local": {"lr": 0.3},
        "participation": {"rate": 0.5},
        "evaluation": {"every": 15, "last": 1, "clients": 20},
        **tables,
    }


def of_clients(record: Record) -> dict[str, Any]:
    return cast(dict[str, Any], record)["clients"]


def test_personal_models_are_better_on_their_clients_than_that_of_fedavg(tmp_path: Path) -> None:
    records = {name: keel.run(digits(name), out=tmp_path / name).records[-1] for name in ("fedavg", "fedper", "ditto")}
    mean = {name: of_clients(record)["mean"] for name, record in records.items()}
    assert mean["fedper"] > mean["fedavg"] + 0.05
    assert mean["ditto"] > mean["fedavg"] + 0.05
    assert records["ditto"]["accuracy"] == records["fedavg"]["accuracy"]  # on the test examples, the server's model


@pytest.mark.parametrize("name", PERSONALISED)
def test_each_client_is_measured_with_its_own_model(name: str) -> None:
    """Clients that have never taken part have the model of their initial state."""
    evaluation = {"every": 2, "clients": 6}
    table = {"algorithm": {"name": name}, "rounds": 2, "evaluation": evaluation, "participation": {"rate": 0.2}}
    loop, records = uneven_loop(table), list[Record]()
    state = loop.start()
    loop.run(state, [lambda record, *_: records.append(record)])
    tests, theta, expected = loop.task.client_tests, state.server["theta"], []
    assert tests is not None
    assert 0 < len(state.clients) < len(tests.clients)
    model = FlatModel(loop.task.module)
    model.module.eval()
    for position, client in enumerate(tests.clients.tolist()):
        client_state = state.clients.get(client) or loop.algorithm.init_client(loop.initial)
        model.weights.copy_(loop.algorithm.personal_model(theta, client_state, loop.participation.sizes))
        rows = tests.partition[position]
        expected.append(len(measure_examples(loop.task, model, tests.examples[rows]).correct) / len(rows))
    assert of_clients(records[-1])["mean"] == pytest.approx(fmean(expected))


@pytest.mark.parametrize("name", PERSONALISED)
def test_pool_records_what_serial_records(name: str) -> None:
    evaluation = {"every": 2, "clients": 6, "finetune_steps": 1}
    table = {"algorithm": {"name": name}, "rounds": 4, "evaluation": evaluation}
    engines: list[dict[str, Any]] = [{"name": "serial"}, {"name": "pool", "workers": 2}]
    serial, pool = (records_of(uneven_loop({**table, "engine": engine})) for engine in engines)
    assert of_clients(serial[-1])["count"] > 0
    assert pool == serial


@pytest.mark.parametrize("name", PERSONALISED)
def test_a_resumed_run_records_the_same_personal_models(name: str, tmp_path: Path) -> None:
    spec = digits(name, rounds=4, evaluation={"every": 1, "clients": 5})
    whole = keel.run(spec, out=tmp_path / "whole")
    rounds = iter(range(1, 5))
    part = keel.run(spec, out=tmp_path / "part", stop=lambda: next(rounds) == 2)
    assert part.status == "interrupted"
    resumed = keel.resume(part.path)
    assert resumed.records == whole.records
    assert resumed.summary["model_sha256"] == whole.summary["model_sha256"]


def test_the_deviation_of_an_algorithm_that_sends_a_part_of_the_model_is_recorded() -> None:
    table = {
        "algorithm": {"name": "fedper"},
        "rounds": 4,
        "evaluation": {"every": 2, "deviation": [1, 2], "drift": True},
    }
    record = cast(dict[str, Any], records_of(uneven_loop(table))[-1])
    assert record["drift"] > 0
    assert all(np.isfinite(value) for value in record["deviation"].values())


class MeanStart(keel.Algorithm):
    """Clients start half way between the server's model and their last one, and need the full gradient there."""

    name, title, paper = "mean_start", "Mean start", "none"
    mean_suffices = True
    observes = frozenset({"full_gradient"})

    def init_client(self, theta: torch.Tensor) -> Any:
        return {"model": theta, "full": torch.zeros_like(theta)}

    def start(self, received: Any, state: Any, ctx: Any) -> torch.Tensor:
        return (received["theta"] + state["model"]) / 2

    def report(self, path: Any, received: Any, state: Any, ctx: Any) -> Any:
        return {"delta": received["theta"] - path.end}, {"model": path.end, "full": path.full_gradient}


def test_full_gradients_of_a_cohort_are_taken_where_each_client_starts() -> None:
    """The clients are so unequal that their full gradients take more than one program."""
    states, local = [], {"epochs": 1, "batch": 4, "lr": 0.05}
    for engine in ("serial", "cohort"):
        table = {"rounds": 4, "local": local, "participation": {"rate": 1.0}, "engine": {"name": engine}}
        spec = make_spec({"algorithm": MeanStart(), "data": {"name": "custom"}, "model": {"name": "custom"}, **table})
        data = uneven_data(sizes=(3, 90, 7, 40, 16, 9))
        loop = make_loop(spec, make_task(spec, module=small_network(), data=data))
        state = loop.start()
        loop.run(state)
        states.append(state)
    serial, cohort = states
    for client in serial.clients:
        torch.testing.assert_close(cohort.clients[client]["full"], serial.clients[client]["full"], rtol=1e-4, atol=1e-5)
