"""keel.sweep: searches over own models, data and algorithms."""

import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import keel
from keel.runs.folder import RunFolder
from tests.api.own import SPEC, own_algorithm, own_data, own_loss, own_model
from tests.conftest import one_line_error

SHARED = {key: value for key, value in SPEC.items() if key != "local"}
OBJECTS: dict[str, Any] = {"data": own_data(), "model": own_model(), "loss": own_loss()}


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> keel.Sweep:
    return keel.sweep(
        {"local.lr": (0.0001, 0.1), "algorithm.scale": [1.0, 2.0]},
        spec=SHARED,
        algorithm=own_algorithm(),
        seeds=2,
        **OBJECTS,
        out=tmp_path_factory.mktemp("sweep"),
        progress=False,
    )


def test_the_best_point_is_a_spec_that_runs_with_the_same_objects(swept: keel.Sweep, tmp_path: Path) -> None:
    best = swept.best
    assert best is not None
    assert best.fields["local.lr"] == 0.1
    assert best.score == max(row["score"] for row in swept.rows)
    assert best.spec.local.lr == 0.1
    assert best.spec.evaluation.on == "test"
    run = keel.run(best.spec, **OBJECTS, out=tmp_path / "run")
    assert run.status == "finished"
    assert run.value == run.accuracy == run.summary["value"]
    assert list(run.to_frame()["round"]) == [1, 2, 3]


def test_points_are_scored_on_validation_examples_of_every_seed(swept: keel.Sweep) -> None:
    row = swept.rows[0]
    folders = [RunFolder.open(swept.path / row["path"] / f"seed{seed}") for seed in (0, 1)]
    assert {folder.table["evaluation"]["on"] for folder in folders} == {swept.on} == {"validation"}
    assert [folder.summary["accuracy"] for folder in folders if folder.summary] == list(row["scores"].values())


def test_a_sweep_is_a_frame_and_a_table(swept: keel.Sweep) -> None:
    frame = swept.to_frame()
    assert len(frame) == 4
    assert {"local.lr", "algorithm.scale", "score", "status"} <= {*frame.columns}
    assert "| lr | scale | accuracy |" in swept.to_markdown()
    assert r"\toprule" in swept.to_latex()
    assert "<table>" in swept._repr_html_()
    assert "validation" in swept._repr_html_()


def test_a_report_shows_the_points_as_methods(swept: keel.Sweep, tmp_path: Path) -> None:
    page = keel.report(swept, tmp_path / "page.html")
    assert len(page.comparison.methods) == 4


def test_the_same_call_with_more_values_runs_only_the_new_ones(swept: keel.Sweep) -> None:
    before = {path: path.stat().st_mtime_ns for path in swept.path.rglob("metrics.jsonl")}
    over = {"local.lr": [0.1, 0.2], "algorithm.scale": [1.0]}
    again = keel.sweep(over, spec=SHARED, algorithm=own_algorithm(), seeds=2, **OBJECTS, out=swept.path, progress=False)
    assert len(again.rows) == 2
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert len(list(swept.path.rglob("metrics.jsonl"))) == len(before) + 2


def test_optuna_searches_over_objects(tmp_path: Path) -> None:
    result = keel.sweep(
        {"local.lr": {"low": 0.01, "high": 0.3, "log": True}, "algorithm.scale": [0.5, 1.0]},
        spec=SHARED,
        algorithm=own_algorithm(),
        search="optuna",
        points=2,
        optuna_sampler="random",
        pruner="median",
        **OBJECTS,
        out=tmp_path / "out",
        progress=False,
    )
    assert len(result.rows) == 2
    assert result.best is not None
    assert result.best.path.is_file()


class Net(nn.Module):
    """A model whose width is searched."""

    def __init__(self, width: int = 4):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, width), nn.Linear(width, 10))

    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.layers(x)


def test_settings_of_a_model_of_the_script_are_searched_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "Net", Net, raising=False)
    spec = {"rounds": 1, "model": {"name": "__main__:Net"}}
    result = keel.sweep({"model.width": [2, 3]}, spec=spec, out=tmp_path / "out", progress=False)
    assert {row["fields"]["model.width"] for row in result.rows} == {2, 3}
    assert {row["status"] for row in result.rows} == {"finished"}


def test_a_sweep_in_which_every_point_diverges_has_no_best(tmp_path: Path) -> None:
    objects = {**OBJECTS, "loss": lambda *pair: 1e20 * own_loss()(*pair)}
    result = keel.sweep({"local.lr": [1e30]}, spec=SHARED, **objects, out=tmp_path / "out", progress=False)
    assert result.best is None
    assert result.rows[0]["status"] == "diverged"
    assert "diverged" in result._repr_html_()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"over": {}}, "search.fields is empty"),
        ({"over": {"local.lr": [0.1], "rounds": [2]}}, "rounds is both searched and set"),
        ({"over": {"local.lr": {"low": 0.1, "high": 0.5}}}, "local.lr is a range"),
        ({"over": {"data.alpha": [0.5]}}, "over: data.alpha conflicts with data="),
        ({"over": {"algorithm.scale": ["wide"]}}, "algorithm.scale must be"),
        ({"over": {"algorithm.scael": [1.0]}}, "did you mean 'scale'?"),
        ({"search": "random"}, "points must be set"),
        ({"search": "greedy"}, "search.method must be"),
        ({"spec": {"algorithm": {"name": "ghbm"}}}, "algorithm.name = 'ghbm' conflicts with algorithm="),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_and_nothing_is_written(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    given = {"over": {"local.lr": [0.1]}, "spec": SHARED, "algorithm": own_algorithm(), **OBJECTS}
    with one_line_error(message):
        keel.sweep(**{**given, "out": tmp_path / "out", "progress": False, **arguments})
    assert not list(tmp_path.iterdir())
