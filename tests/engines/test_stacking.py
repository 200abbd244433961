"""An algorithm that mixes stacked clients is found before the first round, and trained client by client."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import keel
from keel import KeelError
from keel.algorithms import REGISTRY
from keel.algorithms.base import Algorithm
from keel.core.loop import Loop
from keel.engines.stacking import stacking_error
from tests.conftest import uneven_loop
from tests.contract.own import Lookahead

PARAMETERS = 1000


class UserAlgorithm(keel.Algorithm):
    name = "user"
    title = "User"
    paper = "none"


class FedNorm(UserAlgorithm):
    """Reports normalised updates; the norm runs over all elements, so over all stacked clients."""

    def report(self, path: Any, received: Any, state: Any, ctx: Any) -> Any:
        delta = path.start - path.end
        return {"delta": delta / delta.norm()}, state


class FedNormAfterWarmUp(FedNorm):
    def report(self, path: Any, received: Any, state: Any, ctx: Any) -> Any:
        return (
            super().report(path, received, state, ctx) if ctx.round > 6 else ({"delta": path.start - path.end}, state)
        )


class FedNormInFirstRound(FedNorm):
    def report(self, path: Any, received: Any, state: Any, ctx: Any) -> Any:
        return (
            super().report(path, received, state, ctx) if ctx.round == 1 else ({"delta": path.start - path.end}, state)
        )


class RowNorm(UserAlgorithm):
    """The same, written for stacked clients."""

    def report(self, path: Any, received: Any, state: Any, ctx: Any) -> Any:
        delta = path.start - path.end
        return {"delta": delta / torch.linalg.vector_norm(delta, dim=-1, keepdim=True)}, state


class NormalisedGradient(UserAlgorithm):
    def direction(self, w: Any, gradient: Any, received: Any, state: Any, ctx: Any) -> Any:
        g = gradient(w)
        return g / g.norm()


class ProjectedOnMomentum(UserAlgorithm):
    """Its momentum is zero in the first round, which would hide the sum over clients."""

    def init_server(self, theta: Tensor) -> Any:
        return {"theta": theta, "m": torch.zeros_like(theta)}

    def broadcast(self, server: Any, ctx: Any) -> Any:
        return dict(server)

    def direction(self, w: Any, gradient: Any, received: Any, state: Any, ctx: Any) -> Any:
        return gradient(w) - (gradient(w) * received["m"]).sum() * received["m"]


class LongestSteps(UserAlgorithm):
    """Divides by the largest number of local steps instead of the client's."""

    def report(self, path: Any, received: Any, state: Any, ctx: Any) -> Any:
        return {"delta": (path.start - path.end) / torch.as_tensor(ctx.steps).max()}, state


class MeanState(UserAlgorithm):
    """Keeps the mean of its last update, taken over all elements."""

    def init_client(self, theta: Tensor) -> Any:
        return {"mean": torch.zeros(1)}

    def report(self, path: Any, received: Any, state: Any, ctx: Any) -> Any:
        delta = path.start - path.end
        return {"delta": delta}, {"mean": 0 * state["mean"] + delta.mean()}


class BranchOnState(UserAlgorithm):
    def init_client(self, theta: Tensor) -> Any:
        return {"rounds": torch.zeros(1)}

    def direction(self, w: Any, gradient: Any, received: Any, state: Any, ctx: Any) -> Any:
        return gradient(w) if state["rounds"] < 3 else 0.1 * gradient(w)

    def report(self, path: Any, received: Any, state: Any, ctx: Any) -> Any:
        return {"delta": path.start - path.end}, {"rounds": state["rounds"] + 1}


class CountSteps(UserAlgorithm):
    def report(self, path: Any, received: Any, state: Any, ctx: Any) -> Any:
        return {"delta": (path.start - path.end) / len(range(ctx.steps))}, state


class NewNames(UserAlgorithm):
    """Has no state at first. Stacked with a returning client, a new one would hide the state of the other."""

    def direction(self, w: Any, gradient: Any, received: Any, state: Any, ctx: Any) -> Any:
        return gradient(w) + 0.1 * state.get("last", 0 * w)

    def report(self, path: Any, received: Any, state: Any, ctx: Any) -> Any:
        delta = path.start - path.end
        return {"delta": delta}, {"last": delta}


class IntegerCounter(UserAlgorithm):
    """Correct, with an integer counter in its state."""

    def init_client(self, theta: Tensor) -> Any:
        return {"rounds": torch.zeros(1, dtype=torch.int64), "last": torch.zeros_like(theta)}

    def direction(self, w: Any, gradient: Any, received: Any, state: Any, ctx: Any) -> Any:
        return gradient(w) + state["last"] / (1 + state["rounds"])

    def report(self, path: Any, received: Any, state: Any, ctx: Any) -> Any:
        delta = path.start - path.end
        return {"delta": delta}, {"rounds": state["rounds"] + 1, "last": delta}


@pytest.mark.parametrize("cls", [*REGISTRY.values(), Lookahead], ids=lambda cls: cls.name)
def test_every_algorithm_runs_on_stacked_clients(cls: type[Algorithm]) -> None:
    assert stacking_error(cls(), [PARAMETERS - 17, 10, 6, 1]) is None


@pytest.mark.parametrize("settings", [{"tau_i": "actual"}, {"tau_i": "expected"}])
@pytest.mark.parametrize("name", ["localghbm", "fedhbm"])
def test_counters_of_rounds_run_on_stacked_clients(name: str, settings: dict[str, Any]) -> None:
    assert stacking_error(REGISTRY[name](**settings), [PARAMETERS]) is None


@pytest.mark.parametrize("cls", [RowNorm, IntegerCounter])
def test_a_users_algorithm_that_keeps_clients_apart_runs_on_stacked_clients(cls: type[Algorithm]) -> None:
    assert stacking_error(cls(), [PARAMETERS]) is None


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (FedNorm, "FedNorm.report gives different results when two clients are stacked in one tensor (two new clients"),
        (NormalisedGradient, "NormalisedGradient.direction gives"),
        (ProjectedOnMomentum, "ProjectedOnMomentum.direction gives"),
        (LongestSteps, "LongestSteps.report gives"),
        (MeanState, "MeanState.report gives"),
        (BranchOnState, "BranchOnState.direction fails when two clients are stacked in one tensor (RuntimeError"),
        (CountSteps, "CountSteps.report fails when two clients are stacked in one tensor (TypeError"),
        (FedNormAfterWarmUp, "FedNormAfterWarmUp.report gives"),
        (FedNormInFirstRound, "FedNormInFirstRound.report gives"),
        (NewNames, "NewNames changes the names in its client state from [] to ['last']"),
    ],
)
@pytest.mark.parametrize("parameters", [2, 5, 40_000])
def test_an_algorithm_that_mixes_clients_is_found(cls: type[Algorithm], reason: str, parameters: int) -> None:
    error = stacking_error(cls(), [parameters])
    assert error is not None
    assert error.startswith(reason)
    assert "\n" not in error


def test_the_check_leaves_the_callers_random_stream_and_threads_alone() -> None:
    torch.manual_seed(3)
    expected, threads = torch.randn(4), torch.get_num_threads()
    torch.manual_seed(3)
    stacking_error(REGISTRY["scaffold"](), [PARAMETERS])
    assert torch.equal(torch.randn(4), expected)
    assert torch.get_num_threads() == threads


def trained(algorithm: Algorithm, **engine: Any) -> tuple[Loop, Tensor]:
    training = uneven_loop({"algorithm": algorithm, "rounds": 4, "engine": engine})
    state = training.start()
    training.run(state, [])
    return training, state.server["theta"]


@pytest.mark.parametrize("cls", [FedNorm, NormalisedGradient, BranchOnState])
def test_auto_trains_an_algorithm_that_mixes_clients_one_by_one(
    cls: type[Algorithm], caplog: pytest.LogCaptureFixture
) -> None:
    _, expected = trained(cls(), name="serial")
    with caplog.at_level(logging.WARNING, "keel"):
        training, theta = trained(cls(), name="auto", workers=2)
    assert training.engine.name == "pool"
    assert torch.equal(theta, expected)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{cls.__name__}.")
    assert record.getMessage().endswith("; training one client at a time")


def test_without_fork_it_is_trained_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keel.engines.selection.FORKS", False)
    assert trained(FedNorm(), name="auto", workers=2)[0].engine.name == "serial"


def test_auto_batches_an_algorithm_that_keeps_clients_apart(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "keel"):
        assert trained(RowNorm(), name="auto")[0].engine.name == "cohort"
    assert caplog.records == []


def test_cohort_is_refused_for_an_algorithm_that_mixes_clients() -> None:
    expected = (
        "engine.name = 'cohort' cannot batch this algorithm: FedNorm.report gives different results when two "
        "clients are stacked in one tensor (two new clients, round 1); use 'pool' or 'serial'"
    )
    with pytest.raises(KeelError) as raised:
        uneven_loop({"algorithm": FedNorm(), "engine": {"name": "cohort"}})
    assert str(raised.value) == expected


def test_the_record_of_a_run_has_the_engine_that_was_used(tmp_path: Path) -> None:
    run = keel.run({"rounds": 2, "engine": {"workers": 2}}, algorithm=FedNorm(), out=tmp_path / "run")
    assert run.summary["engine"] == "pool"
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["engine"] == "pool"


def test_the_check_of_a_large_model_takes_little_memory() -> None:
    assert stacking_error(REGISTRY["ghbm"](), (10**12, 64)) is None  # two of its vectors are 8 TB
