"""Sweeps: the selected point, the files, pruning, and that no run is repeated."""

import json
import sys
import tomllib
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keel import make_spec
from keel.core.records import PrimaryMetric
from keel.runs.folder import RunFolder
from keel.runs.optuna_search import worst_value
from tests.conftest import Called, stopped_by_ctrl_c

Keel = Callable[..., Called]
SHORT = ["--rounds", "6", "--set", "evaluation.last=2"]
OPTUNA = ["sweep", *SHORT, "--method", "optuna", "--sampler", "random", "--out", "o"]


@pytest.fixture(autouse=True)
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """One run at a time, so that the pruner always compares the same runs."""
    for module in ("sweep", "optuna_search"):
        monkeypatch.setattr(f"keel.runs.{module}.cores", lambda: 1)


def metrics(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("metrics.jsonl")}


def test_a_grid_runs_every_point_once_and_writes_the_best_one_as_a_spec(
    keel: Keel, tmp_path: Path, in_process: None
) -> None:
    command = ["sweep", *SHORT, "--seeds", "5,6", "--set", "seed=3", "--out", "s"]
    called = keel(*command, "--over", "local.lr=0.001,0.5,1e30", "--json")
    assert called.code == 0, called.err
    result = json.loads(called.out)
    rows = result["points"]
    assert [(row["fields"]["local.lr"], row["status"], row["best"]) for row in rows] == [
        (0.5, "finished", True),
        (0.001, "finished", False),
        (1e30, "diverged", False),
    ]
    for row in rows[:2]:
        runs = [RunFolder.open(tmp_path / "s" / row["path"] / f"seed{seed}") for seed in (5, 6)]
        assert {run.spec.evaluation.on for run in runs} == {"validation"}
        scores = [run.summary["accuracy"] for run in runs if run.summary]
        assert list(row["scores"].values()) == scores
        assert row["score"] == pytest.approx(sum(scores) / 2)
    saved = json.loads((tmp_path / "s/sweep.json").read_text())
    assert saved["points"] == rows
    assert (saved["seeds"], saved["on"], saved["fields"]) == ([5, 6], "validation", {"local.lr": [0.001, 0.5, 1e30]})

    best = tomllib.loads((tmp_path / "s/best.toml").read_text())
    expected = make_spec({"seed": 3, "rounds": 6, "local": {"lr": 0.5}, "evaluation": {"last": 2}})
    assert best == expected.model_dump(exclude_none=True)
    assert keel("run", result["best"], "--out", "best", "--quiet").code == 0

    before = metrics(tmp_path / "s")
    again = keel(*command, "--over", "local.lr=0.5,0.3")
    assert again.code == 0, again.err
    assert "2 of 4 runs" in again.err  # the other two exist
    after = metrics(tmp_path / "s")
    assert {path: after[path] for path in before} == before
    assert len(after) == len(before) + 2
    assert max(map(len, again.out.splitlines())) <= 80
    assert "keel run s/best.toml" in again.out

    other = keel(*command, "--over", "local.lr=0.5", "--set", "local.batch=4")
    assert (other.code, other.err.count("\n")) == (2, 1)
    assert "holds a run of another spec" in other.err


def test_points_are_selected_on_validation_examples_by_default(keel: Keel, tmp_path: Path, in_process: None) -> None:
    """All test labels are wrong, so that on them a learning rate that learns nothing looks better."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 120)
    for name, value in ("x", rng.normal(size=(120, 2)) + 6 * labels[:, None]), ("y", labels), ("z", 1 - labels):
        np.save(tmp_path / f"{name}.npy", value)
    (tmp_path / "sweep.toml").write_text("""
rounds = 6
[data]
name = "arrays"
inputs = "x.npy"
labels = "y.npy"
test_inputs = "x.npy"
test_labels = "z.npy"
clients = 6
partition = "iid"
[search.fields]
"local.lr" = [1e-9, 0.1]
""")
    selected = {}
    for on in ("validation", "test"):
        called = keel("sweep", "sweep.toml", "--on", on, "--out", on, "--json", "--quiet")
        assert called.code == 0, called.err
        selected[on] = json.loads(called.out)["points"][0]["fields"]["local.lr"]
    assert selected == {"validation": 0.1, "test": 1e-9}


def test_optuna_prunes_poor_trials_and_continues_with_more_points(keel: Keel, tmp_path: Path, in_process: None) -> None:
    space = ["--over", "local.lr=0.0001..1.0,log", "--seeds", "2", "--pruner", "halving", "--json", "--quiet"]
    called = keel(*OPTUNA, "--points", "5", *space)
    assert called.code == 0, called.err
    rows = json.loads(called.out)["points"]
    assert len(rows) == 5
    pruned = [row for row in rows if row["status"] == "pruned"]
    assert pruned
    assert rows[0]["best"]
    assert rows[0]["score"] == max(row["score"] for row in rows if row["status"] == "finished")
    for row in pruned:
        last = RunFolder.open(max((tmp_path / "o" / row["path"]).iterdir()))
        assert not last.ended
        assert len(last.records()) < 6

    before = metrics(tmp_path / "o")
    more = json.loads(keel(*OPTUNA, "--points", "6", *space).out)["points"]
    assert len(more) == 6
    assert {row["path"] for row in rows} < {row["path"] for row in more}
    after = metrics(tmp_path / "o")
    assert {path: after[path] for path in before} == before

    other = keel(*OPTUNA, "--points", "6", *space, "--set", "local.batch=4")
    assert (other.code, other.err.count("\n")) == (2, 1)
    assert "'o' holds another search" in other.err


SOFT = """
import keel
import torch
from torch import nn


def data():
    inputs = torch.randn(120, 2, generator=torch.Generator().manual_seed(0))
    examples = keel.Examples(inputs, torch.softmax(3 * inputs, 1))
    return keel.Dataset(examples, examples, 0)


def linear():
    return nn.Linear(2, 2)
"""
"""Targets that are no classes, so that the primary metric is the test loss."""


@pytest.fixture
def soft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Options for runs whose primary metric is minimised."""
    (tmp_path / "soft.py").write_text(SOFT)
    monkeypatch.syspath_prepend(tmp_path)
    task = ["--data", "soft:data", "--model", "soft:linear", "--set", "data.clients=6", "--set", "data.partition=iid"]
    yield [*task, "--algorithm", "fedavg"]
    sys.modules.pop("soft", None)


def test_a_sweep_selects_the_lowest_value_of_a_minimised_metric(
    keel: Keel, tmp_path: Path, in_process: None, soft: list[str]
) -> None:
    command = ["sweep", *SHORT, *soft, "--over", "local.lr=0.001,0.5,0.1", "--seeds", "2", "--out", "s"]
    called = keel(*command, "--json", "--quiet")
    assert called.code == 0, called.err
    result = json.loads(called.out)
    assert (result["metric"], result["maximize"]) == ("test_loss", False)
    assert [row["fields"]["local.lr"] for row in result["points"]] == [0.5, 0.1, 0.001]
    scores = [row["score"] for row in result["points"]]
    assert scores == sorted(scores)
    saved = json.loads((tmp_path / "s/sweep.json").read_text())
    assert (saved["metric"], saved["maximize"]) == ("test_loss", False)
    assert tomllib.loads((tmp_path / "s/best.toml").read_text())["local"]["lr"] == 0.5
    assert keel("run", result["best"], "--out", "best", "--quiet").out.startswith("finished after 6 rounds: test loss ")
    printed = keel(*command).out
    assert printed.splitlines()[0].split() == ["lr", "test", "loss"]
    assert "Test loss on a validation split" in printed
    assert "%" not in printed


def test_optuna_minimises_a_minimised_metric(keel: Keel, tmp_path: Path, in_process: None, soft: list[str]) -> None:
    options = [*soft, "--set", "evaluation.every=1", "--points", "5", "--pruner", "halving"]
    called = keel(*OPTUNA, *options, "--over", "local.lr=0.0001..1.0,log", "--json")
    assert called.code == 0, called.err
    assert "test loss" in called.err  # in the progress lines
    rows = json.loads(called.out)["points"]
    finished = [row for row in rows if row["status"] == "finished"]
    pruned = [row for row in rows if row["status"] == "pruned"]
    assert rows[0]["score"] == min(row["score"] for row in finished)
    assert pruned
    assert max(row["fields"]["local.lr"] for row in pruned) < rows[0]["fields"]["local.lr"]


def test_the_value_of_a_diverged_trial_is_worse_than_any_other() -> None:
    cases = {("accuracy", True): 0.0, ("hamming_distance", False): 1.0, ("rmse", False): inf, ("r2", True): -inf}
    assert {case: worst_value(PrimaryMetric(*case)) for case in cases} == cases


def test_a_point_that_optuna_proposes_twice_is_run_once(keel: Keel, tmp_path: Path, in_process: None) -> None:
    called = keel(*OPTUNA, "--points", "6", "--over", "model.hidden=[8],[16]", "--json")
    assert called.code == 0, called.err
    rows = json.loads(called.out)["points"]
    assert sorted(row["fields"]["model.hidden"] for row in rows) == [[8], [16]]
    assert len(metrics(tmp_path / "o")) == 2


def test_ctrl_c_stops_trials_and_the_same_command_continues(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    options = ["--method", "optuna", "--points", "3", "--over", "local.lr=0.1..1.0", "--pruner", "median"]
    arguments = ["sweep", "--rounds", "40", *options, "--out", "o", "--json"]
    stopped_by_ctrl_c(arguments, tmp_path, "o/*/seed0/metrics.jsonl", 3)
    started = {path.parents[1].name for path in tmp_path.glob("o/*/seed0/metrics.jsonl")}
    assert not (tmp_path / "o/sweep.json").exists()
    request.getfixturevalue("in_process")
    again: Called = request.getfixturevalue("keel")(*arguments)
    assert again.code == 0, again.err
    rows: list[dict[str, Any]] = json.loads(again.out)["points"]
    assert len(rows) == 3
    assert started <= {row["path"] for row in rows}
    assert {row["status"] for row in rows} == {"finished"}


def test_a_sweep_in_which_every_run_diverges_selects_nothing(keel: Keel, tmp_path: Path, in_process: None) -> None:
    called = keel("sweep", *SHORT, "--over", "local.lr=1e30", "--out", "s", "--quiet")
    assert called.code == 1
    assert called.err.startswith("keel: no point finished, so ")
    assert called.err.count("\n") == 1
    assert "diverged" in called.out
    assert not (tmp_path / "s/best.toml").exists()


def test_a_run_that_fails_stops_the_others_after_their_round(
    keel: Keel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keel.runs.sweep.check_tasks", lambda specs: None)  # it would refuse the sweep at the start
    called = keel("sweep", "--rounds", "1000000", "--over", "data.clients=5000,100", "--out", "s", "--quiet")
    assert (called.code, called.err.count("\n")) == (2, 1)
    assert "data.clients must be from 1 to 1500, the number of training examples (got 5000)" in called.err
    assert not list(tmp_path.glob("s/data.clients=5000/*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "search.fields is empty; use --over local.lr=0.01,0.1 or --grid paper"),
        (["--over", "local.lr"], "--over must be key=value,value or key=low..high[,log] (got 'local.lr')"),
        (["--over", "local.lr=0.1,0"], "local.lr must be greater than 0 (got 0)"),
        (["--over", "local.lr=0.1", "--set", "local.lr=0.2"], "local.lr is both searched and set; remove it from"),
        (
            ["--over", "local.lr=0.1", "--seeds", "two"],
            "--seeds must be a number, as in 3, or seeds, as in 100,101 (got 'two')",
        ),
        (["--over", "local.lr=0.1", "--on", "train"], "search.on must be 'validation' or 'test'"),
        (["--over", "local.lr=0.1,0.2", "--method", "random"], "points must be set (--points)"),
        (
            ["--over", "data.clients=100,5000"],
            "data.clients must be from 1 to 1500, the number of training examples (got 5000)",
        ),
        (["--grid", "paper"], "search.grid = 'paper' has no grid for digits with mlp"),
        (["--over", "local.lr=0.1", "--method", "optuna", "--points", "0"], "search.points"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_invalid_sweep_gives_an_error_of_one_line_and_writes_nothing(
    keel: Keel, tmp_path: Path, arguments: list[str], message: str
) -> None:
    called = keel("sweep", *arguments)
    assert (called.code, called.err.count("\n"), called.out) == (2, 1, "")
    assert message in called.err
    assert list(tmp_path.iterdir()) == []


def test_without_optuna_the_error_names_the_extra(keel: Keel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    called = keel("sweep", "--method", "optuna", "--points", "2", "--over", "local.lr=0.1,0.2")
    assert called.code == 2
    assert "Optuna" in called.err
    assert called.err.endswith("pip install 'keel-fl[sweep]'\n")
    assert list(tmp_path.iterdir()) == []
