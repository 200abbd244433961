"""Early stopping and model selection in run folders: statuses, resumes, comparisons and sweeps."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import keel as keel_api
from keel.config.overrides import read_spec
from keel.core.examples import Examples, FederatedData
from keel.core.flat_model import fingerprint
from keel.report.comparison import compare
from keel.runs import execute
from keel.runs.build import build, make_task
from keel.runs.folder import RunFolder, best_model
from keel.runs.resources import footprint_of
from keel.runs.sealed import seal
from tests.conftest import Called, Killed, kill_at, one_line_error, uneven_data

Keel = Callable[..., Called]
PATIENT = {"rounds": 60, "evaluation": {"every": 2, "last": 5}, "stop": {"patience": 3, "min_delta": 0.02}}
SELECT = {"rounds": 14, "evaluation": {"every": 2, "last": 1, "on": "validation", "select": True}}


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> keel_api.Run:
    """A run that stops because accuracy does not improve."""
    return keel_api.run(PATIENT, out=tmp_path_factory.mktemp("patient") / "run")


@pytest.fixture(scope="module")
def selected(tmp_path_factory: pytest.TempPathFactory) -> keel_api.Run:
    """A run that keeps the best model on validation examples, which is not the last one."""
    return keel_api.run(SELECT, out=tmp_path_factory.mktemp("selected") / "run")


def test_a_stopped_run_has_the_mean_of_its_last_rounds(patient: keel_api.Run) -> None:
    summary = patient.summary
    assert (patient.status, summary["rounds"]) == ("stopped", len(patient.records))
    assert 6 < summary["rounds"] < 55
    assert summary["stop_reason"] == "no improvement of accuracy in 3 evaluations"
    last = [r["accuracy"] for r in patient.records if r["round"] > summary["rounds"] - 5 and "accuracy" in r]
    assert summary["value"] == summary["accuracy"] == patient.accuracy == fmean(last)


def test_the_mean_of_a_stopped_run_covers_at_most_a_third_of_its_rounds(tmp_path: Path) -> None:
    """Otherwise a run that stops before round `evaluation.last` would have the mean of its whole curve."""
    table = {"rounds": 90, "evaluation": {"every": 1, "last": 30}, "stop": {"target": 0.3}}
    run = keel_api.run(table, out=tmp_path / "run")
    assert 3 <= run.summary["rounds"] < 30
    assert run.accuracy == fmean(r["accuracy"] for r in run.records[-(run.summary["rounds"] // 3) :])


def test_the_rounds_of_a_stopped_run_are_those_of_the_whole_run(patient: keel_api.Run, tmp_path: Path) -> None:
    whole = keel_api.run({key: value for key, value in PATIENT.items() if key != "stop"}, out=tmp_path / "whole")
    assert (whole.status, whole.summary["stop_reason"]) == ("finished", None)
    assert whole.records[: len(patient.records)] == patient.records


def test_resuming_a_stopped_run_changes_nothing(patient: keel_api.Run) -> None:
    before = {p: p.read_bytes() for p in patient.path.rglob("*") if p.is_file()}
    assert keel_api.resume(patient.path).summary == patient.summary
    assert {p: p.read_bytes() for p in patient.path.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("checkpoint_seconds", [0.0, 1e9], ids=["checkpoints", "no checkpoint"])
def test_a_run_killed_while_it_is_patient_stops_in_the_same_round(
    checkpoint_seconds: float, patient: keel_api.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute, "CHECKPOINT_SECONDS", checkpoint_seconds)
    monkeypatch.setattr(execute, "SAVING_SHARE", 0)
    with pytest.raises(Killed):
        keel_api.run(PATIENT, out=tmp_path / "run", hooks=[kill_at(patient.summary["rounds"] - 3)])
    with pytest.raises(Killed):
        keel_api.resume(tmp_path / "run", hooks=[kill_at(patient.summary["rounds"] - 1)])
    resumed = keel_api.resume(tmp_path / "run")
    times = {"seconds": 0.0}
    assert {**resumed.summary, **times} == {**patient.summary, **times}
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == (patient.path / "metrics.jsonl").read_bytes()


def test_a_run_killed_between_its_last_checkpoint_and_its_summary_does_not_continue(
    patient: keel_api.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(*_: object) -> None:
        raise Killed

    monkeypatch.setattr(RunFolder, "finish", kill)
    with pytest.raises(Killed):
        keel_api.run(PATIENT, out=tmp_path / "run")
    monkeypatch.undo()
    rounds: list[int] = []
    resumed = keel_api.resume(tmp_path / "run", hooks=[lambda record, *_: rounds.append(record["round"])])
    assert rounds == []
    assert resumed.summary["stop_reason"] == patient.summary["stop_reason"]
    assert resumed.summary["model_sha256"] == patient.summary["model_sha256"]


def test_the_model_is_evaluated_when_a_budget_is_used_up(tmp_path: Path) -> None:
    table = {"rounds": 40, "evaluation": {"every": 20, "last": 2}}
    model = keel_api.run({**table, "rounds": 1}, out=tmp_path / "one").summary
    per_round = model["bytes_down"] + model["bytes_up"]
    run = keel_api.run({**table, "stop": {"gigabytes": 6.5 * per_round / 1e9}}, out=tmp_path / "run")
    assert (run.status, run.summary["rounds"]) == ("stopped", 7)
    assert [r["round"] for r in run.records if "accuracy" in r] == [7]
    assert run.accuracy == run.records[-1]["accuracy"]


def test_the_wall_clock_budget_counts_the_rounds_before_a_resume(tmp_path: Path) -> None:
    table = {"rounds": 40, "evaluation": {"every": 20, "last": 2}, "stop": {"seconds": 1000}}
    interrupted = keel_api.run(table, out=tmp_path / "run", stop=lambda: True)
    assert (interrupted.status, interrupted.summary["stop_reason"]) == ("interrupted", None)
    (tmp_path / "run/timings.jsonl").write_bytes(seal({"round": 1, "seconds": 999.99999}))
    run = keel_api.resume(tmp_path / "run")
    assert (run.status, run.summary["rounds"]) == ("stopped", 2)
    assert "accuracy" in run.records[-1]


def test_a_rule_that_holds_in_the_last_round_leaves_the_run_finished(tmp_path: Path) -> None:
    run = keel_api.run({"rounds": 2, "evaluation": {"last": 1, "every": 9}, "stop": {"target": 0}}, out=tmp_path / "r")
    assert (run.status, run.summary["stop_reason"]) == ("finished", None)


def regression_data() -> FederatedData:
    data = uneven_data()
    examples = Examples(data.train.inputs, data.train.inputs.sum(dim=1, keepdim=True))
    return replace(data, train=examples, test=examples, classes=0)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets) ** 2).mean(dim=1)


def regression(out: Path, **tables: Any) -> keel_api.Run:
    torch.manual_seed(0)
    spec = {"rounds": 30, "local": {"lr": 0.003}, "participation": {"rate": 0.5}, "algorithm": {"name": "fedavg"},
            "evaluation": {"every": 1, "last": 1}, "engine": {"name": "serial"}, **tables}  # fmt: skip
    return keel_api.run(spec, model=nn.Linear(5, 1), data=regression_data(), loss=squared_error, out=out)


def test_the_rules_follow_a_metric_that_is_minimised(tmp_path: Path) -> None:
    losses = [r["test_loss"] for r in regression(tmp_path / "whole").records]
    target = sorted(losses)[len(losses) // 2]
    first = next(t for t, loss in enumerate(losses, start=1) if loss <= target)
    run = regression(tmp_path / "run", stop={"target": target})
    assert (run.status, run.summary["rounds"]) == ("stopped", first)
    assert run.summary["stop_reason"] == f"test_loss reached {target:g}"
    assert run.summary["value"] == losses[first - 1]
    assert run.accuracy is None


def test_the_best_model_of_a_metric_that_is_minimised_has_the_smallest_value(tmp_path: Path) -> None:
    run = regression(tmp_path / "run", evaluation={"every": 1, "last": 1, "on": "validation", "select": True})
    best = min(run.records, key=lambda r: r["test_loss"])
    assert (run.summary["best_round"], run.summary["best_value"]) == (best["round"], best["test_loss"])


def test_the_best_model_is_kept_with_its_round_and_value(selected: keel_api.Run, tmp_path: Path) -> None:
    best = best_model(RunFolder.open(selected.path))
    assert best is not None
    record = max((r for r in selected.records if "accuracy" in r), key=lambda r: (r["accuracy"], -r["round"]))
    assert record["round"] < 14
    theta, buffers, round, value = best
    assert (round, value) == (record["round"], record["accuracy"])
    assert (selected.summary["best_round"], selected.summary["best_value"]) == (round, value)
    rounds: list[int] = []
    hooks = [lambda record, *_: rounds.append(record["round"])]
    at_best = keel_api.run(SELECT, out=tmp_path / "run", hooks=hooks, stop=lambda: rounds[-1] == round)
    assert fingerprint(theta, buffers) == at_best.summary["model_sha256"]
    assert selected.summary["model_sha256"] != at_best.summary["model_sha256"]


@pytest.mark.parametrize("checkpoint_seconds", [0.0, 1e9], ids=["checkpoints", "no checkpoint"])
def test_the_best_model_survives_a_kill(
    checkpoint_seconds: float, selected: keel_api.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute, "CHECKPOINT_SECONDS", checkpoint_seconds)
    monkeypatch.setattr(execute, "SAVING_SHARE", 0)
    with pytest.raises(Killed):
        keel_api.run(SELECT, out=tmp_path / "run", hooks=[kill_at(13)])
    resumed = keel_api.resume(tmp_path / "run")
    assert resumed.summary["best_round"] == selected.summary["best_round"]
    expected, found = (best_model(RunFolder.open(run.path)) for run in (selected, resumed))
    assert expected is not None
    assert found is not None
    assert torch.equal(expected.theta, found.theta)
    assert expected[1:] == found[1:]


def test_selection_changes_nothing_else(selected: keel_api.Run, tmp_path: Path) -> None:
    evaluation = {**SELECT["evaluation"], "select": False}  # type: ignore[dict-item]
    plain = keel_api.run({**SELECT, "evaluation": evaluation}, out=tmp_path / "run")
    assert plain.records == selected.records
    assert plain.summary["model_sha256"] == selected.summary["model_sha256"]
    assert (plain.summary["best_round"], plain.summary["best_value"]) == (None, None)
    assert best_model(RunFolder.open(plain.path)) is None


def test_the_footprint_counts_the_best_model() -> None:
    def disk(select: bool) -> int:
        spec = keel_api.make_spec({"evaluation": {"on": "validation", "select": select}})
        return footprint_of(build(spec, make_task(spec))).disk

    parameters = 64 * 64 + 64 + 64 * 10 + 10
    assert disk(True) - disk(False) == 2 * 4 * parameters  # once more until the next checkpoint replaces this one


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"evaluation": {"select": True}}, "evaluation: select = true requires on = 'validation' (got 'test')"),
        ({"stop": {"patience": 0}}, "stop.patience must be greater than or equal to 1 (got 0)"),
        ({"stop": {"min_delta": 0.1}}, "stop: min_delta requires patience (got min_delta = 0.1 alone)"),
        ({"stop": {"gigabytes": 0}}, "stop.gigabytes must be greater than 0 (got 0)"),
        ({"stop": {"patiense": 3}}, "unknown stop field 'patiense'; did you mean 'patience'?"),
        ({"stop": 3}, "stop must be a table (got 3)"),
    ],
    ids=["select", "patience", "min_delta", "gigabytes", "unknown", "number"],
)
def test_an_invalid_rule_gives_one_line(table: dict[str, Any], message: str) -> None:
    with one_line_error(message):
        keel_api.make_spec(table)


def test_rules_are_part_of_the_identity_of_a_spec() -> None:
    plain = keel_api.make_spec({})
    assert "stop" not in plain.to_toml()
    assert keel_api.make_spec({"stop": {"patience": None}}) == plain
    assert keel_api.make_spec({"stop": {"patience": 3}}).identity != plain.identity


def test_the_command_prints_the_reason_and_compares_stopped_runs(keel: Keel, in_process: None) -> None:
    rules = ["--rounds", "40", "--set", "stop.target=0.3", "--set", "evaluation.last=2"]
    called = keel("run", "--algorithm", "fedavg", *rules, "--out", "one", "--quiet")
    assert called.code == 0, called.err
    summary = json.loads(Path("one/summary.json").read_text())
    start = f"stopped after {summary['rounds']} rounds: accuracy reached 0.3; accuracy "
    assert called.out.startswith(start)

    called = keel("compare", "--methods", "fedavg,fedhbm", *rules, "--seeds", "2", "--out", "c", "--json", "--quiet")
    assert called.code == 0, called.err
    rows = json.loads(called.out)
    assert [row["status"] for row in rows] == ["stopped"] * 2
    assert all(row["accuracy_mean"] is not None and len(row["accuracy_seeds"]) == 2 for row in rows)
    assert all("cost" in row for row in rows)
    again = keel("compare", "--methods", "fedavg,fedhbm", *rules, "--seeds", "2", "--out", "c", "--json", "--quiet")
    assert json.loads(again.out) == rows
    comparison = compare([RunFolder.open(path) for path in sorted(Path("c").glob("*-seed*"))])
    assert [method.value_mean for method in comparison.methods] == [row["accuracy_mean"] for row in rows]


@pytest.mark.parametrize(
    "method", [["--method", "grid"], ["--method", "optuna", "--points", "2"]], ids=["grid", "optuna"]
)
def test_a_sweep_ranks_stopped_runs_and_its_best_spec_is_valid(method: list[str], keel: Keel, in_process: None) -> None:
    sets = [f"--set={field}" for field in ("stop.patience=1", "evaluation.on=validation", "evaluation.select=true")]
    called = keel("sweep", "--rounds", "30", *sets, "--over", "local.lr=0.001,0.5", *method, "--out", "s", "--json")
    assert called.code == 0, called.err
    result = json.loads(called.out)
    folders = [RunFolder.open(path.parent) for path in Path("s").rglob("spec.toml")]
    assert "stopped" in {folder.summary["status"] for folder in folders if folder.summary}
    assert {row["status"] for row in result["points"]} == {"finished"}
    assert all(row["score"] is not None for row in result["points"])
    best = keel_api.make_spec(read_spec(Path(result["best"])))
    assert (best.evaluation.on, best.evaluation.select) == ("test", None)
