"""The paper's linear regression, and the example that draws it."""

import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from keel.config.defaults import make_spec
from keel.core.examples import Examples, FederatedData, Partition
from keel.paper import regression
from keel.paper.computed import regression_panels, regression_records
from keel.paper.stability import theory_limit
from keel.runs.build import build, make_task

EXAMPLE = Path(__file__).parents[2] / "examples" / "linear_regression.py"
FAST, STABLE = regression.LEARNING_RATES


def final_losses(method: str, lr: float, orders: int = 4) -> Tensor:
    return regression.loss_curves(method, lr, rounds=300, orders=orders)[:, -1]


def test_the_practical_version_ends_near_fedcm_with_all_clients_whatever_the_order() -> None:
    [full] = final_losses(regression.BASELINE, FAST)
    assert (final_losses("GHBM, C = 0.2", FAST) <= regression.NEAR * full).all()


def test_the_theory_version_ends_near_fedcm_with_all_clients_at_a_stable_step() -> None:
    [full] = final_losses(regression.BASELINE, STABLE)
    assert (final_losses("GHBM (theory), C = 0.2", STABLE) <= regression.NEAR * full).all()


def test_the_stability_limit_says_at_which_learning_rate_the_theory_version_diverges() -> None:
    curvature = float(torch.linalg.eigvalsh(regression.hessians().mean(dim=0)).max())
    limit = theory_limit(tau=regression.CLIENTS // regression.COHORT, beta=regression.WEIGHT)
    assert regression.STEPS * STABLE * curvature < limit < regression.STEPS * FAST * curvature
    initial = regression.loss_curves("GHBM (theory), C = 0.2", FAST, rounds=1, orders=1)[0, 0]
    assert (final_losses("GHBM (theory), C = 0.2", FAST) > initial).all()


def test_fedcm_with_few_clients_ends_far_above_in_some_order() -> None:
    [full] = final_losses(regression.BASELINE, FAST)
    assert final_losses("FedCM, C = 0.2", FAST, orders=regression.ORDERS).max() > regression.FAR * full


@pytest.mark.parametrize("method", ["FedCM, C = 0.2", "GHBM, C = 0.2", "GHBM (theory), C = 0.2"])
def test_the_simulation_is_what_keels_loop_computes(method: str) -> None:
    simulated = regression.loss_curves(method, STABLE, rounds=12, orders=1)[0]
    losses = loop_losses(regression.METHODS[method], rounds=12)
    torch.testing.assert_close(losses, simulated[1:].float(), rtol=2e-3, atol=0.0)
    assert simulated[-1] < 0.5 * simulated[0]


def loop_losses(method: regression.Method, rounds: int) -> Tensor:
    """Return the losses after each round of a training of Keel, whose vectors have single precision."""
    inputs, targets = regression.observations()
    examples = Examples(inputs.reshape(-1, 3).float(), targets.reshape(-1).float())
    parts = list(torch.arange(len(examples)).reshape(regression.CLIENTS, -1).numpy())
    data = FederatedData("regression", examples, examples, Partition.of(parts), classes=0)
    local, server = method.rates(STABLE)
    spec = make_spec(
        {
            "rounds": rounds,
            "algorithm": {"name": method.algorithm.name, **method.algorithm.settings()},
            "data": {"name": "custom"},
            "model": {"name": "custom"},
            "local": {"steps": regression.STEPS, "batch": regression.EXAMPLES, "lr": local},
            "server": {"lr": server},
            "participation": {"rate": method.cohort / regression.CLIENTS, "sampler": "cyclic"},
            "evaluation": {"every": 1, "last": 1},
            "engine": {"name": "serial"},
        }
    )
    module = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(module.weight)
    loop = build(spec, make_task(spec, module=module, data=data, loss=squared_error)).loop
    losses: list[float] = []
    loop.run(loop.start(), [lambda record, *_: losses.append(record["test_loss"])])
    return torch.tensor(losses)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.squeeze(1) - targets) ** 2


def test_records_count_the_orders_and_diverged_curves_are_not_drawn() -> None:
    curves = {
        0.1: {
            regression.BASELINE: torch.tensor([[8.0, 2.0]]),
            "FedCM, C = 0.2": torch.tensor([[8.0, 1.0], [8.0, 2.4], [8.0, 30.0]]),
            "GHBM (theory), C = 0.2": torch.tensor([[8.0, 9.0], [8.0, 90.0], [8.0, 90.0]]),
        }
    }
    full, partial, diverged = regression_records(curves)
    assert (full["orders"], partial["orders"]) == (1, 3)
    assert (partial["near"], partial["far"]) == (2, 1)
    assert (diverged["near"], diverged["far"]) == (0, 2)
    assert [partial[name] for name in ("low", "median", "high")] == pytest.approx([1.0, 2.4, 30.0])
    [panel] = regression_panels(curves)
    assert {row["method"] for row in panel["rows"]} == {regression.BASELINE, "FedCM, C = 0.2"}


def test_the_example_draws_the_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["linear_regression.py", "3", "2"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert (tmp_path / "linear_regression.svg").read_text().startswith("<svg")
    assert "GHBM (theory), C = 0.2" in capsys.readouterr().out
