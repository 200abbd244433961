"""Reports on runs by any metric: its direction, its format, other metrics, keys of observers and per-client results."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keel import make_spec
from keel.core.records import PrimaryMetric
from keel.report.comparison import Comparison, compare
from keel.report.explanations import explanation
from keel.report.page import write_charts, write_report
from keel.report.sections import sections
from keel.report.tables import client_metrics, csv_text, final_text, markdown, other_metrics, results
from keel.runs.finding import find_runs
from keel.runs.folder import RunFolder
from keel.units import number
from tests.conftest import Called, one_line_error
from tests.report.test_comparison import algorithm, environment, write_run

HOSTILE = "</script><img src=x>-and-{{2}}/up"


def write_metric_run(
    path: Path,
    values: np.ndarray,
    metric: str = "rmse",
    maximize: bool = False,
    added: Callable[[int], dict[str, Any]] = lambda t: {},
    **table: object,
) -> RunFolder:
    """Write a run folder with these values of its primary metric, one per round, and with what `added` returns."""
    spec = make_spec({"rounds": len(values), "evaluation": {"every": 1, "last": 10}, **table})
    primary = {"metric": metric, "maximize": maximize}
    folder = RunFolder.create(path, spec, environment(spec, **primary))
    for t, value in enumerate(values.tolist(), start=1):
        traffic = {"bytes_down": 10, "bytes_up": 10}
        record = {"round": t, "cohort": [0], **traffic, "test_loss": value**2, metric: value, **added(t)}
        folder.append(record, 0.1)
    final = float(values[-10:].mean())
    folder.finish({"status": "finished", **primary, "value": final, "last_value": final, "accuracy": None})
    return folder


def falling(half: float, rounds: int = 60) -> np.ndarray:
    """Return errors that fall from 40 towards 10, half of the way in `half` rounds."""
    return 10 + 30 * 0.5 ** (np.arange(1, rounds + 1) / half)


def of_clients(t: int) -> dict[str, Any]:
    statistics = {"mean": 40.0 - t / 2, "std": 3.0, "worst_decile": 60.0 - t / 2, "best_decile": 20.0}
    return {"clients": {**statistics, "examples": 1234, "count": 20}}


def test_differences_of_a_metric_that_is_no_fraction_are_in_its_unit(tmp_path: Path) -> None:
    for name, finals in {"fedavg": [4.0, 5.0], "ghbm": [3.0, 4.5]}.items():
        for seed, final in enumerate(finals):
            write_metric_run(tmp_path / f"{name}-{seed}", np.full(30, final), seed=seed, **algorithm(name))
    _, sheet = results(compare(find_runs([tmp_path])), interval=True)
    assert sheet.title == "RMSE minus that of FedAvg, paired by seed"
    assert sheet.rows == [["GHBM", "-0.75", "-3.927 to +2.427", "2"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs by a minimised metric, with numbers of an observer in every round and another metric in every second one."""
    runs = tmp_path_factory.mktemp("runs")

    def added(t: int) -> dict[str, Any]:
        even = {"r2": t / 100, "f1_score": 0.5} if t % 2 == 0 else {}
        return {"server_step": 1.0 / t, HOSTILE: t, "note": "text", "flags": [1, 2], **even, **of_clients(t)}

    for seed in (0, 1):
        write_metric_run(runs / f"a{seed}", falling(20 + seed), seed=seed, **algorithm("fedavg"))
        write_metric_run(runs / f"b{seed}", falling(10 + seed), added=added, seed=seed, **algorithm("ghbm"))
    return runs


@pytest.fixture(scope="module")
def comparison(folder: Path) -> Comparison:
    return compare(find_runs([folder]))


def test_a_minimised_metric_reaches_its_target_by_falling_to_it(comparison: Comparison) -> None:
    base, other = comparison.rows()
    assert (base["metric"], base["maximize"]) == ("rmse", False)
    assert base["rmse_mean"] == pytest.approx(np.mean([falling(20)[-10:].mean(), falling(21)[-10:].mean()]))
    assert base["target"] == base["rmse_mean"]
    mean = (falling(10) + falling(11)) / 2
    expected = next(t for t in range(10, 61) if mean[t - 10 : t].mean() <= base["target"])
    assert other["rounds_to_target"] == expected < base["rounds_to_target"]
    assert other["rounds_saved"] > 0
    assert comparison.ranks() == [2, 1]
    milestones = [level for level, _ in comparison.methods[0].milestones]
    assert milestones == sorted(milestones, reverse=True)


def test_the_best_run_of_the_baseline_has_the_lowest_value_of_a_minimised_metric(tmp_path: Path) -> None:
    for name, half, rate in ("slow", 30, 0.1), ("fast", 10, 0.2):
        write_metric_run(tmp_path / name, falling(half), local={"lr": rate}, **algorithm("fedavg"))
    comparison = compare(find_runs([tmp_path]))
    assert comparison.targets == [falling(10)[-10:].mean()] * 2


def test_tables_and_sentences_name_the_metric(comparison: Comparison) -> None:
    (sheet,) = results(comparison)
    assert sheet.columns[:3] == ["method", "RMSE", "rounds"]
    row = comparison.rows()[1]
    assert sheet.rows[1][1] == final_text(row) == f"{row['rmse_mean']:.2f} ± {row['rmse_std']:.2f}"
    assert markdown(sheet).count(f"**{sheet.rows[1][1]}**") == 1
    text = explanation(comparison)
    assert text.startswith("RMSE: average over the last rounds")
    assert f"until RMSE, averaged over 10 rounds, first reaches {number(comparison.targets[0])}" in text


def test_a_run_without_a_value_says_which_metric_it_lacks(tmp_path: Path) -> None:
    spec = make_spec({})
    RunFolder.create(tmp_path / "a", spec, environment(spec, metric="test_loss", maximize=False))
    with one_line_error("has no test loss yet"):
        compare(find_runs([tmp_path]))


def test_numbers_that_keel_does_not_know_are_columns(comparison: Comparison) -> None:
    base, other = comparison.rows()
    assert not [name for name in base if name.startswith(("server_step", "clients"))]
    assert other["server_step_mean"] == pytest.approx(np.mean([1 / t for t in range(51, 61)]))
    assert other["server_step_std"] == pytest.approx(0)
    assert other["r2_mean"] == pytest.approx(0.56)  # rounds 52, 54, ..., 60
    assert not {"note_mean", "flags_mean", "test_loss_mean", "lr_mean"} & other.keys()
    written = list(csv.DictReader(csv_text(comparison).splitlines()))
    assert [row["r2_mean"] for row in written] == ["", str(other["r2_mean"])]
    (sheet,) = other_metrics(comparison)
    assert sheet.columns == ["method", "server step", HOSTILE, "R²", "F1 score"]
    assert sheet.rows[0] == ["FedAvg", "-", "-", "-", "-"]
    assert sheet.rows[1][3:] == ["0.5600 ± 0.0000", "50.0 ± 0.0 %"]


def test_accuracy_is_an_other_metric_where_it_is_not_the_primary_one(tmp_path: Path) -> None:
    write_metric_run(tmp_path / "a", np.full(20, 0.5), "f1_score", True, lambda t: {"accuracy": 0.25})
    comparison = compare(find_runs([tmp_path]))
    assert other_metrics(comparison)[0].rows == [["GHBM", "25.0 %"]]
    assert comparison.rows()[0]["accuracy_mean"] == 0.25
    assert results(comparison)[0].rows[0][1] == "50.0 %"


def test_statistics_over_clients_are_a_table_and_columns(comparison: Comparison) -> None:
    row = comparison.rows()[1]
    assert row["clients_mean"] == pytest.approx(40 - 55.5 / 2)
    assert (row["clients_std"], row["clients_best_decile"]) == (3.0, 20.0)
    assert row["clients_worst_decile"] == pytest.approx(60 - 55.5 / 2)
    (sheet,) = client_metrics(comparison)
    assert sheet.columns == [
        "method",
        "mean",
        "standard deviation",
        "worst decile",
        "best decile",
        "clients",
        "examples",
    ]
    assert sheet.rows[0] == ["FedAvg", *["-"] * 6]
    assert sheet.rows[1][1:] == ["12.25", "3.000", "32.25", "20.00", "20", "1,234"]


def test_other_numbers_and_clients_have_charts(comparison: Comparison, tmp_path: Path) -> None:
    (part,) = sections(comparison)
    step = [row for row in part.rows("other-server_step") if row["method"] == "GHBM"]
    assert len(step) == len(part.rows("other-server_step")) == 60
    assert [(row["x"], row["mean"]) for row in step[:2]] == [(1, 1.0), (2, 0.5)]
    assert [row["x"] for row in part.rows("other-r2")] == list(range(2, 61, 2))
    clients = part.rows("over-clients")
    assert clients[0] == {"method": "GHBM", "x": 1, "mean": 39.5, "low": 59.5, "high": 20.0}
    write_charts(comparison, tmp_path, ["svg"])
    names = {path.stem for path in tmp_path.iterdir()}
    curves = {f"rmse-{word}-{over}" for word in ("over", "and") for over in ("rounds", "bytes", "time")}
    losses = {f"loss-over-{over}" for over in ("rounds", "bytes", "time")}
    known = {*curves, *losses, "over-clients", "other-r2", "other-f1_score", "other-server_step", "participation"}
    assert names == known | {"other-__script__img_src_x_-and-__2___up"}


def test_test_loss_as_the_primary_metric_is_shown_once(tmp_path: Path) -> None:
    write_metric_run(tmp_path / "a", falling(10), "test_loss")
    comparison = compare(find_runs([tmp_path]))
    charts = sections(comparison)[0].charts()
    assert {name for name in charts if "loss-over" in name} == {
        f"test_loss-over-{over}" for over in ("rounds", "bytes", "time")
    }
    assert '"title": "test loss"' in charts["test_loss-over-rounds"].to_json(validate=False)


def test_runs_with_different_metrics_are_different_settings(tmp_path: Path) -> None:
    write_metric_run(tmp_path / "a", falling(10), **algorithm("fedavg"))
    write_metric_run(tmp_path / "b", falling(10), "mae", **algorithm("ghbm"))
    comparison = compare(find_runs([tmp_path]))
    assert [setting.title for setting in comparison.settings] == [
        "digits, mlp: metric = rmse",
        "digits, mlp: metric = mae",
    ]
    assert [sheet.columns[1] for sheet in results(comparison)] == ["RMSE", "MAE"]
    assert [row["metric"] for row in csv.DictReader(csv_text(comparison).splitlines())] == ["rmse", "mae"]
    assert explanation(comparison).startswith("RMSE and MAE: average")
    with one_line_error("--target must name an algorithm for runs with different metrics (MAE, RMSE"):
        compare(find_runs([tmp_path]), target=12.0)
    write_report(comparison, tmp_path / "report.html")


def test_old_and_new_runs_by_accuracy_are_one_method(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.5] * 20, 10, 0.5, evaluation={"every": 1, "last": 10}, **algorithm("fedavg"))
    write_metric_run(tmp_path / "b", np.full(20, 0.5), "accuracy", True, seed=1, **algorithm("fedavg"))
    assert [row["seeds"] for row in compare(find_runs([tmp_path])).rows()] == [2]


@pytest.mark.parametrize("target", ["20", "0.8", "-1"])
def test_a_target_of_a_metric_that_is_no_fraction_may_be_any_number(
    folder: Path, target: str, keel: Callable[..., Called]
) -> None:
    called = keel("report", folder, "--target", target, "--json")
    assert called.code == 0, called.err
    assert json.loads(called.out)[0]["target"] == float(target)


def test_a_target_of_a_fraction_is_between_0_and_1(tmp_path: Path, keel: Callable[..., Called]) -> None:
    write_metric_run(tmp_path / "runs" / "a", np.full(20, 0.5), "auroc", True)
    for target in ("90", "0", "nan"):
        called = keel("report", "runs", "--target", target, "-o", "page.html")
        assert (called.code, called.err.count("\n")) == (2, 1)
        assert "--target must be" in called.err
    assert not (tmp_path / "page.html").exists()


def test_metrics_are_written_as_people_write_them() -> None:
    assert [PrimaryMetric(name).label for name in ("accuracy", "test_loss", "f1_score", "r2")] == [
        "accuracy",
        "test loss",
        "F1 score",
        "R²",
    ]
    fractions = ("accuracy", "multiclass_auroc", "top_5_accuracy", "accuracy_top5", "top_5", "recall")
    assert all(PrimaryMetric(name).is_fraction for name in fractions)
    assert not any(PrimaryMetric(name).is_fraction for name in ("rmse", "perplexity", "r2", "test_loss", "stop_5"))
    assert PrimaryMetric("auroc").text(0.9712, 0.011) == "97.1 ± 1.1 %"
    values = [0.0, 0.012345, 3.14159, 123.456, 54321.0, 1.5e-7, 2.5e8, -2.0]
    assert [number(value) for value in values] == [
        "0.000",
        "0.01235",
        "3.142",
        "123.5",
        "54321",
        "1.500e-07",
        "2.500e+08",
        "-2.000",
    ]
    assert number(3.14159, 0.012) == "3.142 ± 0.012"


def test_the_page_moves_the_target_of_a_minimised_metric(browser: Any, comparison: Comparison, tmp_path: Path) -> None:
    write_report(comparison, tmp_path / "report.html")
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto((tmp_path / "report.html").as_uri())
    slider = page.locator(".target input")
    least, most = (float(slider.get_attribute(name)) for name in ("min", "max"))
    levels = [level for method in comparison.methods for level, _ in method.milestones]
    assert least <= min(levels) < max(levels) <= most
    for target in (least, 12.3, 20.0, 28.7):
        slider.fill(str(target))
        rows = Comparison(comparison.methods, "fedavg", target).rows()
        shown = page.eval_on_selector_all(".results .rounds", "cells => cells.map(cell => cell.textContent)")
        assert shown == [str(row["rounds_to_target"] or "never") for row in rows], target
        assert page.inner_text(".target output") == number(target)
    charts = {chart.get_attribute("data-kind"): chart for chart in page.query_selector_all(".chart")}
    for name in ("other-server_step", "other-r2", "over-clients", f"other-{HOSTILE}"):
        charts[name].scroll_into_view_if_needed()
        page.wait_for_function("chart => chart.dataset.drawn && chart.querySelector('canvas')", arg=charts[name])
    assert page.locator("img").count() == 0
    assert complaints == []
    page.close()


def test_the_page_writes_numbers_as_python_writes_them(browser: Any) -> None:
    script = (Path(__file__).parents[2] / "src/keel/report/page.js").read_text()
    functions = script[script.index("const fixed =") : script.index("const change =")]
    values = [0.0, 1e-4, 9.9999e-5, 0.012345, 12.125, 12.135, -2.5, 999.95, 1000.0, 999999.5, 1e6, 1.5e-7, 2.5e8, 1e100]
    page = browser.new_page()
    written = page.evaluate(f"values => {{ {functions} return values.map(number) }}", values)
    page.close()
    assert written == [number(value) for value in values]
