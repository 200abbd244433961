"""Algorithms that must coincide, and steps that are computed by hand."""

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from keel.algorithms import make_algorithm
from keel.algorithms.base import ClientContext, Path, Report
from keel.config.defaults import make_spec
from keel.core.examples import Partition
from keel.runs.build import make_task
from tests.conftest import make_loop, small_network, uneven_data, uneven_loop

ROUNDS = 10
FEDAVG = {"name": "fedavg"}


def final_model(algorithm: dict[str, Any], sampler: str = "uniform") -> Tensor:
    return _final_model(json.dumps(algorithm), sampler)


@cache
def _final_model(algorithm: str, sampler: str) -> Tensor:
    participation = {"rate": 0.5, "sampler": sampler}
    loop = uneven_loop({"algorithm": json.loads(algorithm), "rounds": ROUNDS, "participation": participation})
    state = loop.start()
    loop.run(state)
    return state.server["theta"]


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "fedavgm", "beta": 0.0},
        {"name": "ghbm", "beta": 0.0},
        {"name": "localghbm", "beta": 0.0},
        {"name": "fedhbm", "beta": 0.0},
        {"name": "ghbm", "tau": 1000},
        {"name": "ghbm_lookahead", "beta": 0.0, "lookahead": 0.0},
        {"name": "ghbm_lookahead", "tau": 1000},
        {"name": "fedprox", "mu": 0.0},
        {"name": "fedacg", "lambda_": 0.0, "beta": 0.0},
        {"name": "fedcm", "alpha": 1.0},
        {"name": "fedadc", "beta": 0.0},
        {"name": "adabest", "mu": 0.0, "beta": 0.0},
    ],
    ids=str,
)
def test_it_equals_fedavg_without_its_extra_term(algorithm: dict[str, Any]) -> None:
    torch.testing.assert_close(final_model(algorithm), final_model(FEDAVG))


@pytest.mark.parametrize(
    ("special", "simpler"),
    [
        ({"name": "scaffold_m", "beta": 1.0}, {"name": "scaffold"}),
        ({"name": "mimemom", "beta": 0.0}, {"name": "mime"}),
        ({"name": "ghbm", "tau": 1, "beta": 0.7}, {"name": "fedadc", "beta": 0.7}),
        ({"name": "mimelitemom", "beta": 0.0}, FEDAVG),
        ({"name": "ghbm_lookahead", "tau": 1, "beta": 0.7, "lookahead": 0.0}, {"name": "fedavgm", "beta": 0.7}),
        (
            {"name": "ghbm_lookahead", "tau": 1, "beta": 0.7, "lookahead": 0.7, "mu": 0.1},
            {"name": "fedacg", "lambda_": 0.7, "beta": 0.1},
        ),
        ({"name": "ghbm_lookahead", "beta": 0.0, "lookahead": 0.0, "mu": 0.3}, {"name": "fedprox", "mu": 0.3}),
    ],
    ids=str,
)
def test_a_special_case_equals_the_simpler_algorithm(special: dict[str, Any], simpler: dict[str, Any]) -> None:
    torch.testing.assert_close(final_model(special), final_model(simpler), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["scaffold", "mime"])
def test_drift_correction_has_no_effect_with_one_client(name: str) -> None:
    # One client has all examples and trains on them in one minibatch: the corrections cancel out.
    table = {"participation": {"rate": 1.0}, "local": {"batch": 1000, "epochs": 3, "lr": 0.05}, "rounds": 8}
    settings = make_spec({**table, "data": {"name": "custom"}, "model": {"name": "custom"}})
    data = uneven_data()
    pooled = replace(data, partition=Partition.of([data.partition.indices]))
    ends = []
    for algorithm in (name, "fedavg"):
        spec = settings.model_copy(update={"algorithm": make_algorithm(algorithm)})
        loop = make_loop(spec, make_task(spec, module=small_network(), data=pooled))
        state = loop.start()
        loop.run(state)
        ends.append(state.server["theta"])
    if name == "mime":
        torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)
    else:  # c_i = c after every round
        torch.testing.assert_close(*ends, rtol=1e-3, atol=1e-4)


def test_localghbm_equals_ghbm_under_cyclic_participation() -> None:
    ghbm = final_model({"name": "ghbm", "tau": 2}, "cyclic")
    torch.testing.assert_close(final_model({"name": "localghbm"}, "cyclic"), ghbm)


def test_localghbm_differs_from_ghbm_under_uniform_participation() -> None:
    assert not torch.allclose(final_model({"name": "localghbm"}), final_model({"name": "ghbm", "tau": 2}), atol=1e-3)


def context(t: int = 1, lr: float = 0.5, steps: int = 4, period: float = 2.0) -> ClientContext:
    return ClientContext(round=t, clients=4, cohort=2, share=0.5, period=period, lr=lr, server_lr=1.0, steps=steps)


def test_ghbm_by_hand() -> None:
    ghbm = make_algorithm("ghbm", beta=0.5, tau=2)
    server = ghbm.init_server(torch.tensor([8.0]))
    for step in (1.0, 2.0):  # theta: 8, 7, 5
        assert ghbm.broadcast(server, context())["m"].item() == 0  # fewer than two rounds so far
        server = ghbm.aggregate(server, [Report({"delta": torch.tensor([step])}, 1.0, 4)], context())
    message = ghbm.broadcast(server, context())
    assert message["theta"].item() == 5
    assert message["m"].item() == 1.5  # (8 - 5) / 2
    displacement = ghbm.displacement(message["theta"], message, {}, context())
    assert displacement is not None
    assert displacement.item() == -0.5 * 1.5 / 4
    server = ghbm.aggregate(server, [Report({"delta": torch.tensor([4.0])}, 1.0, 4)], context())
    assert ghbm.broadcast(server, context())["m"].item() == 3  # (7 - 1) / 2
    assert len(server) == 3  # theta and the last two models


def test_ghbm_lookahead_by_hand() -> None:
    algorithm = make_algorithm("ghbm_lookahead", beta=0.5, tau=2, lookahead=2.0, mu=0.25)
    server = algorithm.init_server(one(8.0))
    for step in (1.0, 2.0):  # theta: 8, 7, 5
        assert algorithm.broadcast(server, context())["theta"] == server["theta"]  # fewer than two rounds so far
        server = algorithm.aggregate(server, [Report({"delta": one(step)}, 1.0, 4)], context())
    received = algorithm.broadcast(server, context())
    assert {name: value.item() for name, value in received.items()} == {"theta": 5 - 2 * (8 - 5)}
    assert algorithm.direction(one(3.0), lambda w: 2 * w, received, {}, context()).item() == 6 + 0.25 * (3 - -1)  # type: ignore[union-attr]
    server = algorithm.aggregate(server, [Report({"delta": one(4.0)}, 1.0, 4)], context())
    assert server["theta"].item() == 5 - 0.5 * 1.5 - 4
    assert len(server) == 3  # theta and the last two models


def test_fedhbm_by_hand() -> None:
    fedhbm = make_algorithm("fedhbm", beta=1.0)
    received, state = {"theta": torch.tensor([3.0])}, fedhbm.init_client(torch.tensor([9.0]))

    def displacement(w: float, t: int) -> float:
        d = fedhbm.displacement(torch.tensor([w]), received, state, context(t))
        assert d is not None
        return d.item()

    assert displacement(2.0, t=4) == 0  # no momentum in the first participation
    message, state = fedhbm.report(Path(torch.tensor([3.0]), torch.tensor([2.5])), received, state, context(4))
    assert message["delta"].item() == 0.5
    assert displacement(2.0, t=9) == pytest.approx(-(2.5 - 2.0) / (5 * 4))


def one(value: float) -> Tensor:
    return torch.tensor([value])


def test_scaffold_by_hand() -> None:
    scaffold = make_algorithm("scaffold")
    server = {"theta": one(10.0), "c": one(1.0)}
    received = scaffold.broadcast(server, context())
    assert scaffold.direction(one(10.0), lambda w: one(5.0), received, {"c": one(2.0)}, context()).item() == 5 - 2 + 1
    path = Path(one(10.0), one(7.0), mean_gradient=one(6.0))
    message, state = scaffold.report(path, received, {"c": one(2.0)}, context())
    assert (message["delta"].item(), message["control"].item(), state["c"].item()) == (3, 4, 6)
    reports = [Report(message, 0.5, 4), Report({"delta": one(1.0), "control": one(2.0)}, 0.5, 4)]
    server = scaffold.aggregate(server, reports, context())
    assert server["theta"].item() == 10 - 2
    assert server["c"].item() == 1 + 2 / 4 * 3  # S/N = 2/4: without it c would be 4


def test_feddyn_by_hand() -> None:
    feddyn = make_algorithm("feddyn", alpha=0.5)
    server, state = {"theta": one(4.0), "h": one(1.0)}, {"g": one(2.0)}
    u = feddyn.direction(one(3.0), lambda w: one(7.0), {"theta": one(4.0)}, state, context())
    assert u.item() == 7 - 2 + 0.5 * (3 - 4)
    message, state = feddyn.report(Path(one(4.0), one(2.0)), {}, state, context())
    assert state["g"].item() == 2 + 0.5 * 2
    server = feddyn.aggregate(server, [Report(message, 1.0, 4)], context())
    assert server["h"].item() == 1 + 0.5 * 2 / 4 * 2
    assert server["theta"].item() == 4 - 2 - 1.5 / 0.5


def test_adabest_by_hand() -> None:
    adabest = make_algorithm("adabest", mu=0.5, beta=0.25)
    state = {"h": one(6.0), "last": one(4.0)}
    message, state = adabest.report(Path(one(4.0), one(2.0)), {}, state, context(t=7))
    assert state["h"].item() == 6 / 3 + 0.5 * 2
    assert state["last"].item() == 7
    server = adabest.aggregate({"theta": one(4.0), "average": one(10.0)}, [Report(message, 1.0, 4)], context())
    assert server["average"].item() == 2
    assert server["theta"].item() == 2 - 0.25 * (10 - 2)


def test_fedadam_and_its_siblings_by_hand() -> None:
    report = [Report({"delta": one(3.0)}, 1.0, 4)]
    state = {"theta": one(1.0), "m": one(1.0), "v": one(16.0)}
    expected = {"fedadam": 0.75 * 16 + 0.25 * 9, "fedyogi": 16 - 0.25 * 9, "fedadagrad": 16 + 9}
    for name, v in expected.items():
        server = make_algorithm(
            name, beta1=0.5, epsilon=1.0, **({} if name == "fedadagrad" else {"beta2": 0.75})
        ).aggregate(state, report, context())
        assert server["v"].item() == v
        assert server["theta"].item() == pytest.approx(1 - 2 / (v**0.5 + 1))


def test_weights_and_unequal_steps_enter_fedcm() -> None:
    reports = [Report({"delta": one(4.0)}, 0.25, 2), Report({"delta": one(8.0)}, 0.75, 8)]
    server = make_algorithm("fedcm").aggregate({"theta": one(0.0), "m": one(0.0)}, reports, context(lr=0.5))
    assert server["theta"].item() == -(0.25 * 4 + 0.75 * 8)
    assert server["m"].item() == 0.25 * 4 / (0.5 * 2) + 0.75 * 8 / (0.5 * 8)
