"""FedNova, FedExP, FedSAM and MoFedSAM against reference implementations of their update rules, and by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from keel.algorithms import make_algorithm
from keel.algorithms.base import ClientContext, Path, Report
from tests.algorithms.naive import Layers, Problem
from tests.algorithms.naive_fedexp import fedexp
from tests.algorithms.naive_fednova import fednova
from tests.algorithms.naive_fedsam import fedsam, mofedsam
from tests.algorithms.test_oracles import problem_of
from tests.conftest import uneven_loop

CASES: list[tuple[dict[str, Any], Callable[[Problem], Layers]]] = [
    ({"name": "fednova"}, fednova),
    ({"name": "fedexp"}, lambda p: fedexp(p, 0.001)),
    ({"name": "fedexp", "epsilon": 0.2}, lambda p: fedexp(p, 0.2)),
    ({"name": "fedsam", "rho": 0.3}, lambda p: fedsam(p, 0.3)),
    ({"name": "mofedsam", "rho": 0.3, "beta": 0.4}, lambda p: mofedsam(p, 0.3, 0.4)),
]
ROUNDS = 20


def trained(algorithm: dict[str, Any], **tables: Any) -> dict[str, Tensor]:
    """The server state after training without a reference."""
    loop = uneven_loop({"algorithm": algorithm, "rounds": ROUNDS, **tables})
    state = loop.start()
    assert loop.run(state) == "finished"
    return state.server


def assert_equals_reference(
    algorithm: dict[str, Any], reference: Callable[[Problem], Layers], engine: str, **local: Any
) -> None:
    local["schedule"] = "linear" if engine == "serial" else "constant"
    table = {"algorithm": algorithm, "rounds": ROUNDS, "engine": {"name": engine, "workers": 1}, "local": local}
    loop = uneven_loop({**table, "server": {"lr": 0.9}})
    state = loop.start()
    assert loop.run(state) == "finished"
    expected = torch.cat([layer.reshape(-1) for layer in reference(problem_of(loop))])
    assert (expected - loop.initial).norm() > 0.3
    torch.testing.assert_close(state.server["theta"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("engine", ["serial", "cohort"])
@pytest.mark.parametrize(
    ("algorithm", "reference"), CASES, ids=lambda case: str(case) if isinstance(case, dict) else ""
)
def test_the_algorithm_equals_its_reference(
    algorithm: dict[str, Any], reference: Callable[[Problem], Layers], engine: str
) -> None:
    assert_equals_reference(algorithm, reference, engine)


@pytest.mark.parametrize("engine", ["serial", "cohort"])
def test_fednova_equals_its_reference_with_momentum_in_the_local_optimiser(engine: str) -> None:
    assert_equals_reference(
        {"name": "fednova", "momentum": 0.6}, lambda p: fednova(p, 0.6), engine, momentum=0.6, lr=0.05
    )


@pytest.mark.parametrize(
    ("special", "simpler"),
    [
        ({"name": "fedsam", "rho": 0.0}, {"name": "fedavg"}),
        ({"name": "mofedsam", "beta": 1.0, "rho": 0.3}, {"name": "fedsam", "rho": 0.3}),
        ({"name": "mofedsam", "beta": 0.3, "rho": 0.0}, {"name": "fedcm", "alpha": 0.3}),
    ],
    ids=str,
)
def test_a_special_case_equals_the_simpler_algorithm(special: dict[str, Any], simpler: dict[str, Any]) -> None:
    torch.testing.assert_close(trained(special)["theta"], trained(simpler)["theta"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_fednova_equals_fedavg_if_all_clients_take_the_same_number_of_steps(momentum: float) -> None:
    local = {"steps": 3, "momentum": momentum}
    nova = trained({"name": "fednova", "momentum": momentum}, local=local)
    torch.testing.assert_close(nova["theta"], trained({"name": "fedavg"}, local=local)["theta"], rtol=1e-4, atol=1e-5)


def test_fedexp_with_a_large_epsilon_takes_the_steps_of_fedavg() -> None:
    torch.testing.assert_close(
        trained({"name": "fedexp", "epsilon": 1e9})["x"], trained({"name": "fedavg"})["theta"], rtol=1e-4, atol=1e-5
    )


def test_fedexp_takes_longer_steps_than_fedavg() -> None:
    assert not torch.allclose(trained({"name": "fedexp"})["x"], trained({"name": "fedavg"})["theta"], atol=1e-2)


def context(steps: int) -> ClientContext:
    return ClientContext(round=1, clients=4, cohort=2, share=0.5, period=2.0, lr=0.5, server_lr=1.0, steps=steps)


def reports_of(algorithm: Any, ends: list[tuple[list[float], float, int]]) -> list[Report]:
    """The reports of clients that moved from zero to the given models."""
    return [
        Report(algorithm.report(Path(torch.zeros(len(end)), torch.tensor(end)), {}, {}, context(steps))[0], weight, 0)
        for end, weight, steps in ends
    ]


def test_fednova_by_hand() -> None:
    nova = make_algorithm("fednova")
    reports = reports_of(nova, [([-4.0], 0.25, 2), ([-8.0], 0.75, 8)])
    server = nova.aggregate({"theta": torch.tensor([10.0])}, reports, context(0))
    tau_eff = 0.25 * 2 + 0.75 * 8
    assert server["theta"].item() == 10 - tau_eff * (0.25 * 4 / 2 + 0.75 * 8 / 8)
    (report,) = reports_of(make_algorithm("fednova", momentum=0.5), [([-4.0], 1.0, 3)])
    assert report.message["norm"].item() == 1.75 + 1.5 + 1  # the first gradient is in 1 + 1/2 + 1/4 of the update


def test_fedexp_by_hand() -> None:
    exp = make_algorithm("fedexp", epsilon=0.75)
    server = exp.init_server(torch.zeros(2))
    server = exp.aggregate(server, reports_of(exp, [([-3.0, 0.5], 0.5, 1), ([3.0, 0.5], 0.5, 1)]), context(0))
    eta_g = 9.25 / (2 * (0.25 + 0.75))
    assert server["x"].tolist() == [0, eta_g * 0.5]
    assert server["theta"].tolist() == [0, eta_g * 0.5 / 2]
    server = exp.aggregate(server, reports_of(exp, [([1.0, 0.0], 0.5, 1), ([1.0, 0.0], 0.5, 1)]), context(0))
    assert server["x"].tolist() == [1, eta_g * 0.5]  # the clients agree: eta_g is 1, not 1/3.5


def test_fedsam_by_hand() -> None:
    points: list[list[float]] = []

    def gradient(point: Tensor) -> Tensor:
        points.append(point.tolist())
        return 2 * point

    w = torch.tensor([3.0, 4.0])
    u = make_algorithm("fedsam", rho=5.0).direction(w, gradient, {}, {}, context(1))
    assert points == [[3, 4], [6, 8]]
    assert isinstance(u, Tensor)
    assert u.tolist() == [12, 16]


def test_fedsam_does_not_divide_by_the_norm_of_a_gradient_of_zero() -> None:
    u = make_algorithm("fedsam").direction(torch.zeros(3), torch.zeros_like, {}, {}, context(1))
    assert isinstance(u, Tensor)
    assert u.tolist() == [0, 0, 0]
