"""Sweeps of real runs: what they choose, what they leave, that nothing is run twice."""

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keel import make_spec
from keel.runs.folder import RunFolder
from keel.runs.run import ensure
from tests.conftest import Called, stopped_by_ctrl_c

Keel = Callable[..., Called]
SHORT = ["--rounds", "6", "--set", "evaluation.last=2"]
OPTUNA = ["sweep", *SHORT, "--method", "optuna", "--sampler", "random", "--out", "o"]


@pytest.fixture(autouse=True)
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """One run after the other: one process to start, and what the pruner sees is always the same."""
    for module in ("sweep", "trials"):
        monkeypatch.setattr(f"keel.runs.{module}.cores", lambda: 1)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in this process, where how they are spread over others is not the matter."""
    monkeypatch.setattr("keel.runs.sweep.run_all", lambda jobs, *_: [ensure(job.spec, job.path) for job in jobs])


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("metrics.jsonl")}


def test_a_grid_over_seeds_is_run_once_and_its_best_point_is_a_spec(keel: Keel, tmp_path: Path) -> None:
    command = ["sweep", *SHORT, "--seeds", "5,6", "--set", "seed=3", "--out", "s"]
    called = keel(*command, "--over", "local.lr=0.001,0.5,1e30", "--json")
    assert called.code == 0, called.err
    told = json.loads(called.out)
    rows = told["points"]
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
    kept = json.loads((tmp_path / "s/sweep.json").read_text())
    assert kept["points"] == rows
    assert (kept["seeds"], kept["on"], kept["fields"]) == ([5, 6], "validation", {"local.lr": [0.001, 0.5, 1e30]})

    best = tomllib.loads((tmp_path / "s/best.toml").read_text())
    expected = make_spec({"seed": 3, "rounds": 6, "local": {"lr": 0.5}, "evaluation": {"last": 2}})
    assert best == expected.model_dump(exclude_none=True)
    assert keel("run", told["best"], "--out", "best", "--quiet").code == 0

    before = contents(tmp_path / "s")
    again = keel(*command, "--over", "local.lr=0.5,0.3")
    assert again.code == 0, again.err
    assert "2 of 4 runs" in again.err  # the other two were there
    after = contents(tmp_path / "s")
    assert {path: after[path] for path in before} == before
    assert len(after) == len(before) + 2
    assert max(map(len, again.out.splitlines())) <= 80
    assert "keel run s/best.toml" in again.out

    other = keel(*command, "--over", "local.lr=0.5", "--set", "local.batch=4")
    assert (other.code, other.err.count("\n")) == (2, 1)
    assert "holds a run of another spec" in other.err


def test_the_test_set_is_not_chosen_on_unless_asked(keel: Keel, tmp_path: Path, in_process: None) -> None:
    """The test labels are all wrong, so that there the rate that learns nothing looks better."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 120)
    for name, value in ("x", rng.normal(size=(120, 2)) + 6 * labels[:, None]), ("y", labels), ("z", 1 - labels):
        np.save(tmp_path / f"{name}.npy", value)
    (tmp_path / "sweep.toml").write_text("""
rounds = 8
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
    chosen = {}
    for on in ("validation", "test"):
        called = keel("sweep", "sweep.toml", "--on", on, "--out", on, "--json", "--quiet")
        assert called.code == 0, called.err
        chosen[on] = json.loads(called.out)["points"][0]["fields"]["local.lr"]
    assert chosen == {"validation": 0.1, "test": 1e-9}


def test_optuna_prunes_what_is_behind_and_goes_on_with_more_points(keel: Keel, tmp_path: Path) -> None:
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

    before = contents(tmp_path / "o")
    more = json.loads(keel(*OPTUNA, "--points", "6", *space).out)["points"]
    assert len(more) == 6
    assert {row["path"] for row in rows} < {row["path"] for row in more}
    after = contents(tmp_path / "o")
    assert {path: after[path] for path in before} == before

    other = keel(*OPTUNA, "--points", "6", *space, "--set", "local.batch=4")
    assert (other.code, other.err.count("\n")) == (2, 1)
    assert "'o' holds another search" in other.err


def test_a_point_that_optuna_proposes_again_is_not_run_again(keel: Keel, tmp_path: Path) -> None:
    called = keel(*OPTUNA, "--points", "6", "--over", "model.hidden=[8],[16]", "--json")
    assert called.code == 0, called.err
    rows = json.loads(called.out)["points"]
    assert sorted(row["fields"]["model.hidden"] for row in rows) == [[8], [16]]
    assert len(contents(tmp_path / "o")) == 2


def test_ctrl_c_stops_trials_and_the_same_command_goes_on(tmp_path: Path) -> None:
    options = ["--method", "optuna", "--points", "3", "--over", "local.lr=0.1..1.0", "--pruner", "median"]
    command = [sys.executable, "-m", "keel", "sweep", "--rounds", "60", *options, "--out", "o", "--json"]
    stopped_by_ctrl_c(command, tmp_path, "o/*/seed0/metrics.jsonl", 5)
    begun = {path.parents[1].name for path in tmp_path.glob("o/*/seed0/metrics.jsonl")}
    assert not (tmp_path / "o/sweep.json").exists()
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    rows: list[dict[str, Any]] = json.loads(done.stdout)["points"]
    assert len(rows) == 3
    assert begun <= {row["path"] for row in rows}
    assert {row["status"] for row in rows} == {"finished"}


def test_a_sweep_in_which_everything_diverges_chooses_nothing(keel: Keel, tmp_path: Path, in_process: None) -> None:
    called = keel("sweep", *SHORT, "--over", "local.lr=1e30", "--out", "s", "--quiet")
    assert called.code == 1
    assert called.err == "keel: no point finished, so that none is chosen\n"
    assert "diverged" in called.out
    assert not (tmp_path / "s/best.toml").exists()


def test_a_run_that_cannot_be_stops_the_others_at_their_round(
    keel: Keel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keel.runs.sweep.check_tasks", lambda specs: None)  # which would find it before
    called = keel("sweep", "--rounds", "1000000", "--over", "data.clients=5000,100", "--out", "s", "--quiet")
    assert (called.code, called.err.count("\n")) == (2, 1)
    assert "5000 clients for 1500 training examples" in called.err
    assert not list(tmp_path.glob("s/data.clients=5000/*"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "search.fields: nothing to search; accepted: --over local.lr=0.01,0.1 or --grid paper"),
        (["--over", "local.lr"], "--over: 'local.lr'; accepted: key=value,value"),
        (["--over", "local.lr=0.1,0"], "local.lr: input should be greater than 0, not 0"),
        (["--over", "local.lr=0.1", "--set", "local.lr=0.2"], "local.lr: is searched, and set too"),
        (["--over", "local.lr=0.1", "--seeds", "two"], "--seeds: 'two'; accepted: a number"),
        (["--over", "local.lr=0.1", "--on", "train"], "search.on: input should be 'validation' or 'test'"),
        (["--over", "local.lr=0.1,0.2", "--method", "random"], "needs points, a number (--points)"),
        (["--over", "data.clients=100,5000"], "5000 clients for 1500 training examples"),
        (["--grid", "paper"], "search.grid: 'paper' has none for digits with mlp"),
        (["--over", "local.lr=0.1", "--method", "optuna", "--points", "0"], "search.points"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    keel: Keel, tmp_path: Path, arguments: list[str], words: str
) -> None:
    called = keel("sweep", *arguments)
    assert (called.code, called.err.count("\n"), called.out) == (2, 1, "")
    assert words in called.err
    assert list(tmp_path.iterdir()) == []


def test_without_optuna_the_extra_is_named(keel: Keel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    called = keel("sweep", "--method", "optuna", "--points", "2", "--over", "local.lr=0.1,0.2")
    assert called.code == 2
    assert called.err == "keel: search.method: 'optuna' needs Optuna; accepted: pip install 'keel-fl[sweep]'\n"
    assert list(tmp_path.iterdir()) == []
