"""DiLoCo, FedPer and Ditto against reference implementations of their update rules, personal models included."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from keel.algorithms import make_algorithm
from keel.algorithms.base import ClientContext, Path, Report
from keel.errors import KeelError
from tests.algorithms.naive import Layers, Problem
from tests.algorithms.naive_diloco import diloco
from tests.algorithms.naive_ditto import ditto
from tests.algorithms.naive_fedper import fedper
from tests.algorithms.test_oracles import problem_of
from tests.conftest import uneven_loop

Models = tuple[Layers, dict[int, Layers]]
"""The server's model and the personal models of the clients that took part."""
ADAMW = {"lr": 0.01, "optimizer": "adamw", "optimizer_state": "keep"}
CASES: list[tuple[dict[str, Any], dict[str, Any], Callable[[Problem], Models]]] = [
    ({"name": "diloco", "momentum": 0.8}, ADAMW, lambda p: (diloco(p, 0.8, "adamw"), {})),
    ({"name": "diloco", "momentum": 0.5}, {"optimizer": "sgd"}, lambda p: (diloco(p, 0.5, "sgd"), {})),
    ({"name": "fedper"}, {}, lambda p: fedper(p, 2)),
    ({"name": "fedper", "personal_tensors": 3}, {}, lambda p: fedper(p, 3)),
    ({"name": "ditto", "lambda_": 0.3}, {}, lambda p: ditto(p, 0.3)),
]
ROUNDS = 20


@pytest.mark.parametrize("engine", ["serial", "cohort"])
@pytest.mark.parametrize(
    ("algorithm", "local", "reference"), CASES, ids=lambda case: str(case) if isinstance(case, dict) else ""
)
def test_the_algorithm_equals_its_reference(
    algorithm: dict[str, Any], local: dict[str, Any], reference: Callable[[Problem], Models], engine: str
) -> None:
    local = {"optimizer_state": "reset", **local, "schedule": "linear" if engine == "serial" else "constant"}
    table = {"algorithm": algorithm, "rounds": ROUNDS, "engine": {"name": engine, "workers": 1}}
    loop = uneven_loop({**table, "local": local, "server": {"lr": 0.7}})
    state = loop.start()
    assert loop.run(state) == "finished"
    theta, personal = reference(problem_of(loop))
    expected = flat(theta)
    assert (expected - loop.initial).norm() > 0.3
    torch.testing.assert_close(state.server["theta"], expected, rtol=1e-4, atol=1e-5)
    for client, layers in personal.items():
        model = loop.algorithm.personal_model(expected, state.clients[client], loop.participation.sizes)
        assert (model - expected).norm() > 0.1
        torch.testing.assert_close(model, flat(layers), rtol=1e-4, atol=1e-5)


def flat(layers: Layers) -> Tensor:
    return torch.cat([layer.reshape(-1) for layer in layers])


def final_model(algorithm: dict[str, Any], **local: Any) -> Tensor:
    loop = uneven_loop({"algorithm": algorithm, "rounds": 6, "local": local, "server": {"lr": 0.7}})
    state = loop.start()
    loop.run(state)
    return state.server["theta"]


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "diloco", "momentum": 0.0},
        {"name": "fedper", "personal_tensors": 0},
        {"name": "ditto", "lambda_": 0.0},
        {"name": "ditto", "lambda_": 2.0},
    ],
    ids=str,
)
def test_the_servers_model_equals_that_of_fedavg(algorithm: dict[str, Any]) -> None:
    fedavg = final_model({"name": "fedavg"})
    torch.testing.assert_close(final_model(algorithm, optimizer="sgd", optimizer_state="reset"), fedavg)


def test_dilocos_server_takes_the_steps_of_sgd_with_nesterov_momentum() -> None:
    algorithm = make_algorithm("diloco", momentum=0.6)
    weights = torch.linspace(-1, 1, 5)
    server = algorithm.init_server(weights.clone())
    optimizer = torch.optim.SGD([weights], lr=0.7, momentum=0.6, nesterov=True)
    for t in range(1, 5):
        delta = torch.cos(torch.arange(5.0) + t)
        weights.grad = delta.clone()
        optimizer.step()
        server = algorithm.aggregate(server, [Report({"delta": delta}, 1.0, 1)], context(t))
    torch.testing.assert_close(server["theta"], weights)


def test_dilocos_clients_keep_the_state_of_adamw_by_default() -> None:
    loop = uneven_loop({"algorithm": {"name": "diloco"}, "rounds": 2, "participation": {"rate": 1.0}})
    state = loop.start()
    loop.run(state)
    assert {"keel.optimizer.exp_avg", "keel.optimizer.exp_avg_sq"} < state.clients[0].keys()
    assert int(state.clients[0]["keel.optimizer.rounds"]) == 2


def test_ditto_by_hand() -> None:
    algorithm = make_algorithm("ditto", lambda_=0.25)
    received, state = {"theta": torch.tensor([2.0])}, algorithm.init_client(torch.tensor([4.0]))
    step_state = algorithm.init_steps(received, state, context(1))
    known = {**state, **step_state}
    u, step_state = algorithm.direction(torch.tensor([3.0]), lambda w: 10 * w, received, known, context(1))
    assert u.item() == 30
    assert step_state["v"].item() == 4 - 0.5 * (40 + 0.25 * (4 - 2))
    path = Path(received["theta"], torch.tensor([1.5]), step_state=step_state)
    message, state = algorithm.report(path, received, state, context(1))
    assert message["delta"].item() == 0.5
    assert algorithm.personal_model(received["theta"], state, [1]).item() == step_state["v"].item()


def test_fedper_sends_the_base_alone() -> None:
    algorithm, ctx = make_algorithm("fedper", personal_tensors=1), context(1, sizes=(2, 1))
    server = algorithm.init_server(torch.tensor([1.0, 2.0, 3.0]))
    received = algorithm.broadcast(server, ctx)
    assert {name: value.tolist() for name, value in received.items()} == {"base": [1, 2]}
    start = algorithm.start(received, {"model": torch.tensor([7.0, 8.0, 9.0])}, ctx)
    assert start.tolist() == [1, 2, 9]
    message, state = algorithm.report(Path(start, torch.tensor([0.0, 4.0, 5.0])), received, {}, ctx)
    assert message["delta"].tolist() == [1, -2]
    server = algorithm.aggregate(server, [Report(message, 1.0, 1)], ctx)
    torch.testing.assert_close(server["theta"], torch.tensor([1 - 0.7, 2 + 1.4, 3.0]))
    assert algorithm.personal_model(torch.tensor([1.0, 2.0, 3.0]), state, ctx.sizes).tolist() == [1, 2, 5]


def test_fedpers_records_count_the_bytes_of_the_base() -> None:
    loop = uneven_loop({"algorithm": {"name": "fedper"}, "rounds": 2})
    records: list[Any] = []
    loop.run(loop.start(), [lambda record, *_: records.append(record)])
    base = 4 * (20 + 4)  # the first layer of the network; the second, of 12 + 3 elements, is personal
    assert [(r["bytes_down"], r["bytes_up"]) for r in records] == [(3 * base, 3 * base)] * 2


@pytest.mark.parametrize("engine", ["auto", "cohort"])
def test_fedper_requires_a_base(engine: str) -> None:
    with pytest.raises(KeelError, match=r"^algorithm.personal_tensors must be less than .* tensors, 4 \(got 4\)$"):
        uneven_loop({"algorithm": {"name": "fedper", "personal_tensors": 4}, "engine": {"name": engine}})


def context(t: int, lr: float = 0.5, sizes: tuple[int, ...] = (5,)) -> ClientContext:
    return ClientContext(
        round=t, clients=4, cohort=2, share=0.5, period=2.0, lr=lr, server_lr=0.7, steps=3, sizes=sizes
    )
