"""Results of the paper's recipes at smoke scale: every table and figure is run, rendered and written."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keel.errors import KeelError
from keel.paper import computed
from keel.paper.cost import target_costs
from keel.paper.execution import run_parts
from keel.paper.files import draw
from keel.paper.panels import make_figure
from keel.paper.recipes import all_recipes, find_recipe
from keel.paper.results import Result, _deviation, make_result
from keel.paper.run_index import RunIndex
from keel.paper.views import make_view
from keel.report import drawing
from keel.runs.folder import RunFolder
from tests.conftest import Called

Keel = Callable[..., Called]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs of all recipes at smoke scale."""
    folder = tmp_path_factory.mktemp("paper")
    run_parts([part for recipe in all_recipes().values() for part in recipe.smoke], folder, quiet=True)
    return folder


@pytest.fixture(autouse=True)
def short_regression(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(computed.REGRESSION, "smoke", (2, 2))


def smoke_result(name: str, out: Path, seeds: int | None = None) -> Result:
    return make_result(find_recipe(name), "smoke", RunIndex(out), seeds)


@pytest.mark.parametrize("name", all_recipes())
def test_every_table_and_figure_runs_at_smoke_scale(name: str, out: Path, keel: Keel) -> None:
    called = keel("paper", "run", name, "--scale", "smoke", "--out", out, "-q")
    assert called.code == 0, called.err
    recipe = find_recipe(name)
    assert recipe.title in called.out
    assert "not run" not in called.out
    files = {file.name: file for file in (out / f"{name}-smoke").iterdir()}
    figures = {"figure.html", "figure.svg", "figure.png"} if recipe.kind == "figure" else set()
    assert set(files) == {"result.json", "table.txt", "table.md", "table.tex", "table.csv"} | figures
    assert len(files["table.csv"].read_text().splitlines()) > 1
    sheets = make_view(json.loads(files["result.json"].read_text())).sheets
    assert files["table.tex"].read_text().count(r"\begin{tabular}") == len(sheets)
    assert files["table.tex"].read_text().isascii()
    if figures:
        assert files["figure.svg"].read_text().startswith("<svg")
        assert files["figure.png"].read_bytes().startswith(b"\x89PNG")
        assert 'src="http' not in files["figure.html"].read_text()


def test_the_list_counts_finished_runs(out: Path, keel: Keel) -> None:
    rows = json.loads(keel("paper", "list", "--out", out, "--json").out)
    assert all(row["scales"]["smoke"]["there"] == row["scales"]["smoke"]["runs"] for row in rows)


def test_finished_runs_count_whichever_version_made_them(out: Path) -> None:
    part = find_recipe("curves").smoke[0]
    specs = part.specs("fedavg")
    folder = RunIndex(out).find(specs[0])
    assert folder is not None
    environment = (folder.path / "environment.json").read_text()
    folder.replace("environment.json", json.dumps({**json.loads(environment), "source_sha256": "another"}).encode())
    assert RunIndex(out).unfinished(specs) == []
    assert RunIndex(out).unfinished(part.specs("fedavg", seeds=2)) == part.specs("fedavg", seeds=2)[1:]
    folder.replace("environment.json", environment.encode())


def test_missing_runs_are_shown_as_not_run(tmp_path: Path, out: Path) -> None:
    view = make_view(smoke_result("controlled", tmp_path))
    assert "not run" in [cell for row in view.sheets[0].rows for cell in row]
    assert view.notes[-1] == "7 runs missing: keel paper run controlled --scale smoke"
    incomplete = smoke_result("controlled", out, seeds=2)
    assert incomplete["parts"][0]["rows"][0]["runs"] == 1
    assert "(1 of 2 seeds)" in make_view(incomplete).sheets[0].rows[0][1]


def test_a_result_has_spec_environment_command_and_chosen_hyperparameters(out: Path) -> None:
    result = smoke_result("ladder", out)
    part = result["parts"][0]
    row = part["rows"][1]
    assert result["command"] == "keel paper run ladder --scale smoke"
    assert part["spec"]["data.name"] == "digits"
    assert {"keel", "torch", "source_sha256"} <= set(part["environments"][0])
    assert set(row["chosen"]) == {"local.lr", "server.lr", "algorithm.beta"}
    runs = [RunFolder.open(path.parent) for path in (out / "runs").glob("*fedhbm*/spec.toml")]
    assert any(folder.table["local"]["lr"] == row["chosen"]["local.lr"] for folder in runs)


def test_a_search_that_ended_at_the_border_of_what_it_tried_is_noted(out: Path) -> None:
    result = smoke_result("ladder", out)
    row = result["parts"][0]["rows"][1]
    row |= {"open_fields": ["local.lr"], "chosen": {"local.lr": 0.3}}
    expected = "FedHBM (lr 0.3)."
    assert any("at the border" in note and expected in note for note in make_view(result).notes)


def test_a_field_on_the_x_axis_gives_a_column_per_value(out: Path) -> None:
    view = make_view(smoke_result("alpha", out))
    [sheet] = view.sheets
    assert sheet.columns == ["alpha", "0", "10000"]
    assert [row[0] for row in sheet.rows] == ["FedAvg", "FedHBM"]
    assert all(cell.endswith("%") for row in sheet.rows for cell in row[1:])
    assert view.figure is not None
    [panel] = view.figure["concat"]
    assert [(point["method"], point["x"]) for point in panel["data"]["values"]] == [
        (method, x) for method in ("FedAvg", "FedHBM") for x in ("0", "10000")
    ]


def test_seeds_with_different_data_are_refused(tmp_path: Path) -> None:
    part = find_recipe("curves").smoke[0]
    run_parts([part.model_copy(update={"methods": ["fedavg"]})], tmp_path, seeds=2, quiet=True)
    folder = RunIndex(tmp_path).find(part.specs("fedavg", seeds=2)[1])
    assert folder is not None
    folder.replace("environment.json", json.dumps({**folder.environment, "examples_sha256": "others"}).encode())
    with pytest.raises(KeelError, match=f"the seeds of FedAvg have different data.*{folder.path.name}"):
        smoke_result("curves", tmp_path, seeds=2)


def test_deviations_cover_the_rounds_that_every_run_has() -> None:
    def folder(rounds: int) -> Any:
        deviations = [{"1": 4.0 / t, "3": 1.0} if t >= 3 else {"1": 4.0 / t} for t in range(1, rounds + 1)]
        return SimpleNamespace(records=lambda: [{"round": t, "deviation": d} for t, d in enumerate(deviations, 1)])

    for folders in ([folder(8), folder(4)], [folder(4), folder(8)]):  # one run diverged
        deviation = _deviation(folders)
        assert deviation["1"]["rounds"] == [1, 2, 3, 4]
        assert deviation["1"]["second_half"] == pytest.approx((4 / 3 + 1) / 2)
        assert deviation["3"]["rounds"] == [3, 4]


def test_the_csv_has_the_numbers_of_a_figure(out: Path) -> None:
    deviation = make_view(smoke_result("deviation", out))
    shown = [[f"{record[f'deviation_tau_{tau}']:.2f}" for record in deviation.records] for tau in (1, 3)]
    assert [row[1:] for row in deviation.sheets[0].rows] == shown
    regression = make_view(smoke_result("regression", out))
    assert "mean nothing" in regression.notes[1]
    for row, record in zip(regression.sheets[0].rows, regression.records, strict=True):
        assert row[:3] == [f"{record['lr']:g}", record["method"], f"{record['median']:.3g}"]
        assert record["low"] <= record["median"] <= record["high"]
    theorem = make_view(smoke_result("theorem", out))
    medians = {(f"{record['G']:,}", record["method"], record["T"]): record["median"] for record in theorem.records}
    for dissimilarity, method, *values, _ in theorem.sheets[0].rows:
        assert values == [f"{medians[dissimilarity, method, T]:.3g}" for T in (5, 10)]


def test_a_method_has_the_same_style_in_all_panels() -> None:
    def panel(*labels: str) -> dict[str, Any]:
        return {"title": "", "form": "accuracy", "labels": list(labels), "rows": []}

    first, second = make_figure([panel("FedAvg", "GHBM"), panel("GHBM", "FedHBM")], "")["concat"]
    for channel in ("color", "strokeDash"):
        scales = [panel["layer"][1]["encoding"][channel]["scale"] for panel in (first, second)]
        one, other = (dict(zip(scale["domain"], map(str, scale["range"]), strict=True)) for scale in scales)
        assert one["GHBM"] == other["GHBM"]
        assert other["FedHBM"] not in one.values()


def test_the_cost_table_has_the_papers_costs_and_the_relative_cost_of_a_round(out: Path) -> None:
    sheet = make_view(smoke_result("cost", out)).sheets[0]
    columns = ["method", "relative cost", "share of rounds", "bytes", "Δ bytes", "paper: bytes", "paper: time"]
    assert sheet.columns == columns
    rows = {row[0]: row for row in sheet.rows}
    assert rows["FedHBM"][5:] == ["5.2 GB ↓ 83.0 %", "00:22 ↓ 82.0 %"]
    assert rows["SCAFFOLD"][5:] == ["40.8 GB ↑ 32.0 %", "01:23 ↓ 34.0 %"]
    assert [rows[name][1] for name in ("FedAvg", "FedHBM", "GHBM", "SCAFFOLD")] == ["1x", "1x", "1.5x", "2x"]


def test_the_saving_of_the_cost_table_is_that_of_the_comparison(out: Path) -> None:
    [part] = smoke_result("cost", out)["parts"]
    for row, cost in zip(part["rows"], target_costs(part), strict=True):
        assert cost is not None
        if row["rounds_to_target"] is not None:
            assert cost.bytes == pytest.approx(row["bytes_to_target"])
            assert cost.bytes_saved == pytest.approx(row["bytes_saved"])


def test_a_method_that_never_reaches_the_target_counts_with_all_rounds() -> None:
    def row(name: str, reached: int | None, total: float) -> dict[str, Any]:
        spent = None if reached is None else reached * total / 100
        cost = {"share": (reached or 100) / 100, "bytes": spent or total, "seconds": None}
        return {"algorithm": name, "rounds_to_target": reached, "bytes_to_target": spent, "cost": cost}

    part = {
        "rounds": 100,
        "rows": [row("fedavg", 80, 1000.0), row("fedhbm", 40, 1000.0), row("scaffold", None, 2000.0)],
    }
    fedavg, fedhbm, scaffold = target_costs(part)
    assert fedavg is not None
    assert fedhbm is not None
    assert scaffold is not None
    assert (fedavg.share, fedavg.bytes, fedavg.bytes_saved) == (0.8, 800.0, 0.0)
    assert (fedhbm.share, fedhbm.bytes, fedhbm.bytes_saved) == (0.4, 400.0, 0.5)
    assert (scaffold.reached, scaffold.bytes, scaffold.bytes_saved) == (False, 2000.0, -1.5)


def test_wall_clock_times_are_shown_and_ranked_if_runs_take_a_minute(out: Path) -> None:
    result = smoke_result("cost", out)
    assert any("times are omitted" in note for note in make_view(result).notes)
    for row in result["parts"][0]["rows"]:
        row["cost"]["seconds"] = row["seconds_to_target"] = 60.0 * row["cost"]["share"]
    view = make_view(result)
    assert view.sheets[0].columns[6:8] == ["time", "Δ time"]
    assert (0, 6) in view.sheets[0].places
    assert not any("times are omitted" in note for note in view.notes)


def test_no_text_of_a_figure_ends_the_script_of_its_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "draw", lambda charts: [b"" for _ in charts])
    monkeypatch.setattr(drawing, "browser_script", lambda: "")
    figure = {"title": {"text": "a < b"}, "data": {"values": [{"method": "</script><img src=x>"}]}}
    page = draw(figure, ["c < d"])["figure.html"].decode()
    assert page.count("</script>") == 2
    assert "<title>a &lt; b</title>" in page
    assert "<p>c &lt; d</p>" in page
    [chart] = re.findall(r'vegaEmbed\("#chart", (.*), \{"renderer": "svg"\}\)', page)
    assert json.loads(chart) == figure
