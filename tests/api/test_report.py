"""keel.report, frames without pandas, and the progress bars of a notebook."""

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from torch import nn

import keel
from keel.runs.progress import show_progress
from tests.conftest import one_line_error

SHORT = {"rounds": 3, "evaluation": {"every": 1, "last": 1}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> keel.Run:
    return keel.run({**SHORT, "algorithm": {"name": "ghbm"}}, title="Mine", out=tmp_path_factory.mktemp("r") / "run")


def test_report_is_callable_as_a_function_and_as_the_package(run: keel.Run, tmp_path: Path) -> None:
    import keel.report.charts  # binds keel.report to the package

    for number, write in enumerate((keel.report, keel.__getattr__("report"))):
        page = write(run, tmp_path / f"{number}.html")
        assert Path(os.fspath(page)) == page.path == tmp_path / f"{number}.html"
        assert '<th scope="row">Mine</th>' in page.path.read_text()


def test_a_report_takes_runs_folders_and_comparisons(run: keel.Run, tmp_path: Path) -> None:
    comparison = keel.compare("fedavg", spec=SHORT, seeds=1, out=tmp_path / "runs", target=0.3, progress=False)
    page = keel.report([run, comparison, tmp_path / "runs"], tmp_path / "both.html", baseline="Mine")
    assert [method.label for method in page.comparison.methods] == ["Mine", "FedAvg"]
    assert page.comparison.baseline == "Mine"
    assert str(page.path) in page._repr_html_()
    assert keel.report(comparison, tmp_path / "one.html").comparison.target == 0.3


def test_the_heading_names_own_data_and_the_class_of_an_own_model(tmp_path: Path) -> None:
    for name, heading in ("custom", "own data, Linear"), ("wards", "wards, Linear"):
        inputs = np.random.default_rng(0).normal(size=(40, 3))
        data = keel.federate(inputs, inputs[:, 0], clients=4, test=(inputs, inputs[:, 0]), name=name)
        ended = keel.run({**SHORT, "local": {"lr": 0.01}}, model=nn.Linear(3, 1), data=data, out=tmp_path / name)
        page = keel.report(ended, tmp_path / f"{name}.html")
        assert f"<h1>{heading}</h1>" in page.path.read_text()


def test_a_network_and_charts_are_options(run: keel.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []
    monkeypatch.setattr("keel.report.report_page.write_charts", lambda comparison, folder: written.append(folder))
    page = keel.report(run.path, tmp_path / "page.html", network={"latency_ms": 1000.0}, charts=tmp_path / "charts")
    assert page.comparison.methods[0].total.seconds > 3 * 2
    assert written == [tmp_path / "charts"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"runs": []}, "runs is empty"),
        ({"runs": [3]}, "runs must hold runs, folders, comparisons or sweeps (got 3)"),
        ({"runs": "nowhere"}, "'nowhere' does not exist"),
        ({"network": {"up": 3.0}}, "network field"),
        ({"baseline": "fedavg"}, "'fedavg'"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line(arguments: dict[str, Any], message: str, run: keel.Run, tmp_path: Path) -> None:
    with one_line_error(message):
        keel.report(**{"runs": run, "out": tmp_path / "page.html", **arguments})
    assert not list(tmp_path.iterdir())


def test_a_frame_without_pandas_names_the_extra(run: keel.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with one_line_error("to_frame() requires pandas: pip install 'keel-fl[frame]'"):
        run.to_frame()


def test_a_notebook_shows_a_bar_per_method(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    class Handle:
        def update(self, value: Any) -> None:
            shown.append(value._repr_html_())

    def display(value: Any, display_id: bool) -> Handle:
        shown.append(value._repr_html_())
        return Handle()

    package, module = ModuleType("IPython"), ModuleType("IPython.display")
    module.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setattr("keel.runs.progress.errors.is_jupyter", True)
    with show_progress(["<b>", "other"], [4, 4]) as watch:
        watch(0, {"round": 1, "bytes_up": 2000})
        watch(0, {"round": 3})
    assert shown[0].count('<progress value="0" max="4">') == 2
    assert "<td>3/4 rounds</td><td>2.0 kB</td>" in shown[-1]
    assert "<b>" not in shown[-1]
