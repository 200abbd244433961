"""FedLESAM, FedSpeed, Delta-SGD and FedAdamW against reference implementations of their rules, and special cases."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import keel
from keel import KeelError, make_spec
from keel.algorithms import make_algorithm
from keel.algorithms.base import ClientContext
from keel.algorithms.base import Path as LocalPath
from tests.algorithms.naive import Layers, Problem
from tests.algorithms.naive_delta_sgd import delta_sgd
from tests.algorithms.naive_fedadamw import fedadamw
from tests.algorithms.naive_fedlesam import fedlesam
from tests.algorithms.naive_fedspeed import fedspeed
from tests.algorithms.test_oracles import problem_of
from tests.conftest import uneven_loop

CASES: list[tuple[dict[str, Any], Callable[[Problem], Layers]]] = [
    ({"name": "fedlesam", "rho": 0.5}, lambda p: fedlesam(p, 0.5)),
    ({"name": "fedspeed", "lambda_": 20.0, "alpha": 0.6, "rho": 0.3}, lambda p: fedspeed(p, 20.0, 0.6, 0.3)),
    ({"name": "fedspeed", "corrections": "all"}, lambda p: fedspeed(p, 10.0, 1.0, 0.1, "all")),
    ({"name": "delta_sgd"}, lambda p: delta_sgd(p, 2.0, 0.1)),
    ({"name": "delta_sgd", "gamma": 0.5, "delta": 1.0}, lambda p: delta_sgd(p, 0.5, 1.0)),
    ({"name": "fedadamw", "epsilon": 0.01}, lambda p: fedadamw(p, 0.5, 0.9, 0.999, 0.01)),
    ({"name": "fedadamw", "alpha": 0.0, "beta2": 0.9}, lambda p: fedadamw(p, 0.0, 0.9, 0.9, 1e-8)),
]
SMALL_STEPS = {"fedadamw": {"lr": 0.01}}
"""AdamW's steps are about as long as the learning rate."""
ROUNDS = 20


def trained(algorithm: dict[str, Any], **tables: Any) -> Tensor:
    loop = uneven_loop({"algorithm": algorithm, "rounds": ROUNDS, **tables})
    state = loop.start()
    assert loop.run(state) == "finished"
    return state.server["theta"]


@pytest.mark.parametrize("engine", ["serial", "cohort"])
@pytest.mark.parametrize(
    ("algorithm", "reference"), CASES, ids=lambda case: str(case) if isinstance(case, dict) else ""
)
def test_the_algorithm_equals_its_reference(algorithm: dict[str, Any], reference: Any, engine: str) -> None:
    schedule = "linear" if engine == "serial" else "constant"
    local = {**SMALL_STEPS.get(algorithm["name"], {}), "schedule": schedule}
    table = {"algorithm": algorithm, "rounds": ROUNDS, "engine": {"name": engine, "workers": 1}}
    loop = uneven_loop({**table, "local": local, "server": {"lr": 0.9}})
    state = loop.start()
    assert loop.run(state) == "finished"
    expected = torch.cat([layer.reshape(-1) for layer in reference(problem_of(loop))])
    assert (expected - loop.initial).norm() > 0.3  # far from the initial model, so that the comparison means something
    torch.testing.assert_close(state.server["theta"], expected, rtol=1e-4, atol=1e-5)


def test_fedlesam_without_a_perturbation_is_fedavg() -> None:
    torch.testing.assert_close(trained({"name": "fedlesam", "rho": 0.0}), trained({"name": "fedavg"}))


@pytest.mark.parametrize(
    ("settings", "rate"),
    [
        ({"alpha": 0.0}, 1.0),
        ({"rho": 0.0}, 1.0),
        ({"rho": 0.0, "corrections": "all"}, 1.0),
        ({"alpha": 0.0, "corrections": "all"}, 0.5),
    ],
    ids=str,
)
def test_fedspeed_without_a_perturbation_is_feddyn(settings: dict[str, Any], rate: float) -> None:
    tables = {"participation": {"rate": rate}, "local": {"lr": 0.05}}
    speed = trained({"name": "fedspeed", "lambda_": 5.0, **settings}, **tables)
    torch.testing.assert_close(speed, trained({"name": "feddyn", "alpha": 0.2}, **tables), rtol=1e-4, atol=1e-5)


def test_fedspeed_differs_from_feddyn_under_partial_participation() -> None:
    speed, dyn = {"name": "fedspeed", "lambda_": 5.0, "rho": 0.0}, {"name": "feddyn", "alpha": 0.2}
    assert not torch.allclose(trained(speed, local={"lr": 0.05}), trained(dyn, local={"lr": 0.05}), atol=1e-3)


def test_delta_sgd_is_fedavg_where_the_step_size_cannot_change() -> None:
    constant = {"name": "delta_sgd", "gamma": 1e9, "delta": 0.0}
    torch.testing.assert_close(trained(constant), trained({"name": "fedavg"}))


def test_fedadamw_in_its_first_round_is_local_adamw() -> None:
    local = {"lr": 0.02, "weight_decay": 0.3}
    adamw = trained({"name": "fedavg"}, rounds=1, local={**local, "optimizer": "adamw"})
    torch.testing.assert_close(trained({"name": "fedadamw"}, rounds=1, local=local), adamw, rtol=1e-4, atol=1e-5)


def context(t: int = 1, lr: float = 0.5, steps: int = 4) -> ClientContext:
    return ClientContext(t, 4, 2, 0.5, 2.0, lr=lr, server_lr=1.0, steps=steps, sizes=(2, 1))


def test_fedlesam_by_hand() -> None:
    algorithm = make_algorithm("fedlesam", rho=10.0)
    theta = torch.tensor([3.0, 4.0, 0.0])
    state = algorithm.init_client(torch.tensor([9.0, 9.0, 9.0]))
    assert algorithm.init_steps({"theta": theta}, state, context())["delta"].tolist() == [0, 0, 0]  # its first round
    _, state = algorithm.report(LocalPath(theta, theta - 1), {"theta": theta}, state, context())
    delta = algorithm.init_steps({"theta": torch.zeros(3)}, state, context(t=2))["delta"]
    torch.testing.assert_close(delta, torch.tensor([6.0, 8.0, 0.0]))  # uphill: away from where the model moved
    assert algorithm.init_steps({"theta": theta}, state, context(t=3))["delta"].tolist() == [0, 0, 0]


def test_fedspeed_by_hand() -> None:
    algorithm = make_algorithm("fedspeed", lambda_=2.0, alpha=0.25, rho=0.5)
    state, received = {"g": torch.tensor([1.0])}, {"theta": torch.tensor([4.0])}
    u = algorithm.direction(torch.tensor([6.0]), lambda point: 2 * point, received, state, context())
    assert u.item() == 0.75 * 12 + 0.25 * 2 * (6 + 0.5 * 12) - 1 + (6 - 4) / 2  # type: ignore[union-attr]
    path = LocalPath(torch.tensor([4.0]), torch.tensor([1.0]))
    message, state = algorithm.report(path, received, state, context())
    assert state["g"].item() == 1 - (1 - 4) / 2
    assert 4 - message["delta"].item() == 1 - 2 * state["g"].item()


def test_delta_sgd_by_hand() -> None:
    algorithm = make_algorithm("delta_sgd", gamma=2.0, delta=0.44)
    ctx, w = context(lr=0.5), torch.tensor([8.0, 0.0, 0.0])
    state, etas = algorithm.init_steps({"theta": w}, {}, ctx), []
    for curvature in (1.0, 1.0, 10.0):
        u, state = algorithm.direction(w, lambda point, c=curvature: c * point, {"theta": w}, state, ctx)
        etas.append(state["eta"].item())
        torch.testing.assert_close(u, etas[-1] / 0.5 * curvature * w)
        w = w - 0.5 * u
    # w = 8, 4, 1.6: at first the second bound, sqrt(1 + 0.44) eta, is the lower one; then |w_2 - w_1| / |g_2 - g_1|
    assert etas == pytest.approx([0.5, 0.5 * 1.2, (4 - 1.6) / (10 * 1.6 - 4)])


@pytest.mark.parametrize("gradients", [(0.0, 0.0, 1.0), (0.0, 1.0, 1.0)], ids=str)
def test_delta_sgd_keeps_a_positive_step_size_where_the_bound_is_undefined(gradients: tuple[float, ...]) -> None:
    algorithm, ctx, w = make_algorithm("delta_sgd"), context(), torch.ones(3)
    state = algorithm.init_steps({"theta": w}, {}, ctx)
    for value in gradients:
        u, state = algorithm.direction(w, lambda point, g=value: torch.full_like(point, g), {"theta": w}, state, ctx)
        w = w - 0.5 * u
        assert 0.5 <= state["eta"].item() < 1


def test_fedadamw_sends_a_mean_per_block_and_starts_from_it() -> None:
    algorithm, theta = make_algorithm("fedadamw", beta2=0.5, alpha=0.5), torch.zeros(3)
    server = algorithm.init_server(theta)
    received = algorithm.broadcast(server, context())
    assert [received[name].shape for name in ("v", "c")] == [(2,), (1,)]
    steps = algorithm.init_steps(received, {}, context())
    u, steps = algorithm.direction(theta, lambda w: torch.tensor([1.0, 3.0, -2.0]), received, steps, context())
    torch.testing.assert_close(u, torch.tensor([1.0, 1.0, -1.0]))  # Adam's first step is a sign
    message, _ = algorithm.report(LocalPath(theta, theta - 1, step_state=steps), received, {}, context())
    torch.testing.assert_close(message["v"], torch.tensor([0.5 * (1 + 9) / 2, 0.5 * 4]))
    assert message["c"].item() == 0.5
    server = {**server, "v": message["v"], "c": message["c"], "G": torch.full((3,), 8.0)}
    received = algorithm.broadcast(server, context(t=2))
    steps = algorithm.init_steps(received, {}, context(t=2))
    assert steps["v"].tolist() == [2.5, 2.5, 2.0]
    u, steps = algorithm.direction(theta, lambda w: torch.tensor([1.0, 3.0, -2.0]), received, steps, context(t=2))
    v = (0.5 * torch.tensor([2.5, 2.5, 2.0]) + 0.5 * torch.tensor([1.0, 9.0, 4.0])) / 0.75
    torch.testing.assert_close(u, torch.tensor([1.0, 3.0, -2.0]) / v.sqrt() + 0.5 * 8 / 4)


@pytest.mark.parametrize("name", ["delta_sgd", "fedadamw"])
@pytest.mark.parametrize(
    ("local", "got"),
    [({"optimizer": "adam"}, "'adam'"), ({"momentum": 0.9}, "'sgd', momentum = 0.9")],
    ids=str,
)
def test_an_algorithm_that_is_an_optimiser_refuses_another_one(name: str, local: dict[str, Any], got: str) -> None:
    with pytest.raises(KeelError) as caught:
        make_spec({"algorithm": {"name": name}, "local": local})
    rule = f"local.optimizer must be 'sgd' without momentum for {name}, whose rule is an optimiser itself"
    assert str(caught.value) == f"{rule} (got {got})"


def test_an_algorithm_that_is_an_optimiser_refuses_one_that_is_passed(tmp_path: Path) -> None:
    with pytest.raises(KeelError, match=r"local.optimizer must be 'sgd' .* for fedadamw, .* \(got 'custom'\)"):
        keel.run({"algorithm": {"name": "fedadamw"}}, optimizer=torch.optim.Adam, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
