"""The report page in a browser, if there is one, and its charts as files."""

import shlex
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keel import make_spec
from keel.config.network import Network
from keel.config.overrides import override
from keel.report.comparison import Comparison, compare
from keel.report.page import write_charts, write_report
from keel.report.sections import sections
from keel.report.tables import change, differences, privacy_losses
from keel.runs.finding import find_runs
from keel.runs.folder import RunFolder
from keel.runs.sealed import seal
from keel.units import duration, percent, size
from tests.conftest import as_earlier_version
from tests.report.test_comparison import algorithm, environment, write_run

HOSTILE = "</script><img src=x onerror=document.title='taken'>${1}{{2}}"
STATISTICS = {
    "name": "made up",
    "clients": 4,
    "train_examples": 12,
    "test_examples": 3,
    "classes": 2,
    "client_examples": {"least": 3, "median": 3.0, "mean": 3.0, "most": 3},
    "label_entropy": 0.0,
    "label_entropy_whole": 1.0,
    "label_distance": 0.5,
    "picture": {
        "clients": [0, 1, 2, 3],
        "classes": ["cat", "dog"],
        "counts": [[3, 0], [3, 0], [0, 3], [0, 3]],
        "examples": [3, 3, 3, 3],
    },
}


def write_full_run(path: Path, accuracy: np.ndarray, title: str | None = None, **table: object) -> RunFolder:
    """Write a run folder with everything that a run records, and these accuracies."""
    spec = make_spec({"rounds": len(accuracy), "evaluation": {"every": 1, "drift": True}, **table})
    folder = RunFolder.create(path, spec, environment(spec, **({"title": title} if title else {})), STATISTICS)
    records = [
        {
            "round": t,
            "cohort": [t % 4],
            "bytes_down": 1000,
            "bytes_up": 500,
            "drift": 2.0 - value,
            "momentum_angle": 90 * (1 - value),
            "test_loss": 1.0 - value,
            "accuracy": value,
        }
        for t, value in enumerate(accuracy.tolist(), start=1)
    ]
    folder.metrics.write_bytes(b"".join(map(seal, records)))
    folder.timings.write_bytes(b"".join(seal({"round": record["round"], "seconds": 0.1}) for record in records))
    folder.finish({"status": "finished", "accuracy": float(accuracy[-20:].mean())})
    return folder


def rising(half: float, rounds: int = 120, noise: float = 0.02, seed: int = 0) -> np.ndarray:
    """Return accuracies that approach 1, half of the way in `half` rounds."""
    curve = 1 - 0.5 ** (np.arange(1, rounds + 1) / half)
    return np.clip(curve + np.random.default_rng(seed).normal(0, noise, rounds), 0, 1)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        write_full_run(folder / f"a{seed}", rising(40, seed=seed), seed=seed, **algorithm("fedavg"))
        write_full_run(folder / f"b{seed}", rising(20, seed=9 + seed), HOSTILE, seed=seed, **algorithm("ghbm", tau=5))
        write_full_run(folder / f"c{seed}", rising(30, seed=5 + seed), seed=seed, **algorithm("fedhbm"))
    return compare(find_runs([folder]))


@pytest.fixture(scope="module")
def report(comparison: Comparison, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_report(comparison, path)
    return path


@pytest.fixture
def opened(browser: Any, report: Path) -> Iterator[Callable[..., Any]]:
    """Return a function that opens the report; errors of the page and requests to the network fail the test."""
    complaints: list[str] = []
    pages = []

    def open_page(width: int = 1280, scheme: str = "light") -> Any:
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text))
        page.on(
            "request",
            lambda request: request.url.startswith(("file:", "data:", "blob:")) or complaints.append(request.url),
        )
        page.goto(report.as_uri())
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert complaints == []


def drawn(page: Any) -> dict[str, int]:
    """Return the number of colours on the screen for each chart, by its name."""
    colours = {}
    for chart in page.query_selector_all(".chart"):
        chart.scroll_into_view_if_needed()
        page.wait_for_function("chart => chart.dataset.drawn && chart.querySelector('canvas')", arg=chart)
        colours[chart.get_attribute("data-drawn")] = chart.evaluate(
            """chart => {
              const canvas = chart.querySelector("canvas");
              const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d");
              copy.drawImage(canvas, 0, 0);
              const pixels = copy.getImageData(0, 0, canvas.width, canvas.height).data;
              return new Set(new Uint32Array(pixels.buffer)).size;
            }"""
        )
    return colours


def results_table(page: Any) -> list[list[str]]:
    return page.eval_on_selector_all(".results tbody tr", "rows => rows.map(r => [...r.cells].map(c => c.textContent))")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (400, "light")])
def test_every_chart_is_drawn_within_the_width_of_the_page(opened: Callable[..., Any], width: int, scheme: str) -> None:
    page = opened(width, scheme)
    colours = drawn(page)
    assert set(colours) == {
        "accuracy-over-rounds",
        "accuracy-and-rounds",
        "drift",
        "momentum_angle",
        "label-distribution",
        "participation",
    }
    assert min(colours.values()) > 5
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_the_slider_gives_the_numbers_that_python_computes(opened: Callable[..., Any], comparison: Comparison) -> None:
    page = opened()
    slider = page.locator(".target input")
    targets = [None, 30.0, 55.5, 71.2, 80.0, float(slider.get_attribute("max"))]
    for target in targets:
        if target is not None:
            slider.fill(str(target))
        aimed = Comparison(comparison.methods, "fedavg", None if target is None else target / 100)
        expected = [
            [
                str(row["rounds_to_target"] or "never"),
                change(row["rounds_saved"]),
                size(row["bytes_to_target"]),
                change(row["bytes_saved"]),
                "-" if row["seconds_to_target"] is None else duration(row["seconds_to_target"]),
            ]
            for row in aimed.rows()
        ]
        assert [row[2:-1] for row in results_table(page)] == expected, target
        assert page.inner_text(".target output") == percent(aimed.targets[0])
    assert "never" in {cell for row in results_table(page) for cell in row}
    page.click(".target button")
    assert page.inner_text(".target output") == percent(comparison.targets[0])


def test_numbers_are_rounded_as_python_rounds_them(opened: Callable[..., Any]) -> None:
    page = opened()
    script = (Path(__file__).parents[2] / "src/keel/report/page.js").read_text()
    fixed = script[script.index("const fixed =") : script.index("const percent =")]
    values = [0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 12.25, 12.35, 0.05, 0.25, -0.25, 99.95, 1e-9, -1e-9, 0.1 + 0.2]
    cases = [(value, digits) for value in values for digits in (0, 1)]
    rounded = page.evaluate(
        f"cases => {{ {fixed} return cases.map(([value, digits]) => fixed(value, digits)) }}", cases
    )
    assert rounded == [f"{value:.{digits}f}" for value, digits in cases]


def test_durations_are_written_as_python_writes_them(opened: Callable[..., Any]) -> None:
    page = opened()
    script = (Path(__file__).parents[2] / "src/keel/report/page.js").read_text()
    fixed = script[script.index("const fixed =") : script.index("const percent =")]
    function = script[script.index("const duration =") : script.index("// Milestones are")]
    seconds = [0.04, 59.9, 60, 90, 3570, 3600, 5700, 86_370, 86_400, 129_600, 863_990, 864_000, 7_380_000]
    written = page.evaluate(f"seconds => {{ {fixed} {function} return seconds.map(duration) }}", seconds)
    assert written == [duration(value) for value in seconds]


def test_the_keyboard_moves_the_target_and_sorts_the_table(opened: Callable[..., Any]) -> None:
    page = opened()
    page.focus(".target input")
    page.keyboard.press("Home")
    assert page.inner_text(".target output") == page.get_attribute(".target input", "min") + " %"
    page.focus("thead th:nth-child(2) button")
    for order, arranged in (("ascending", sorted), ("descending", lambda cells: sorted(cells, reverse=True))):
        page.keyboard.press("Enter")
        assert page.get_attribute("thead th:nth-child(2)", "aria-sort") == order
        accuracies = [row[1] for row in results_table(page)]
        assert accuracies == arranged(accuracies)


def test_axes_scales_and_methods_can_be_selected(opened: Callable[..., Any]) -> None:
    page = opened()
    for what in ("accuracy", "loss"):
        page.select_option(".what", what)
        for over in ("rounds", "bytes", "time"):
            page.select_option(".over", over)
            page.wait_for_selector(f"[data-drawn={what}-over-{over}]")
    page.check(".log-x")
    page.check(".log-y")
    assert drawn(page)["loss-over-time"] > 5
    page.click(".methods button[value=none]")
    assert page.locator(".methods input:checked").count() == 0
    page.check(".methods input >> nth=1")
    page.wait_for_timeout(300)
    assert drawn(page)["loss-over-time"] > 5


def test_a_tooltip_shows_the_values_under_the_pointer(opened: Callable[..., Any]) -> None:
    page = opened()
    page.wait_for_selector("[data-drawn=accuracy-over-rounds]")
    chart = page.locator("[data-kind=curves] canvas")
    chart.hover()
    page.wait_for_selector("#vg-tooltip-element.visible")
    assert "test accuracy" in page.inner_text("#vg-tooltip-element")


def test_the_values_of_a_chart_are_available_as_a_table(opened: Callable[..., Any], comparison: Comparison) -> None:
    page = opened()
    page.wait_for_selector("[data-drawn=accuracy-over-rounds]")
    page.focus(".values summary >> nth=0")
    page.keyboard.press("Enter")
    page.wait_for_selector(".values[open] tbody tr")
    values = page.locator(".values >> nth=0")
    assert values.locator("tbody tr").count() == sum(len(method.rounds) for method in comparison.methods)
    first = comparison.methods[0]
    of_round = first.values[:, 0]
    shown = values.locator("tbody tr >> nth=0").locator("td").all_inner_texts()
    assert shown == [first.label, "1", *map(percent, (of_round.mean(), of_round.min(), of_round.max()))]
    page.select_option(".what", "loss")
    page.wait_for_selector(".values[open] thead:has-text('test loss')")


def test_curves_can_be_smoothed_zoomed_and_shown_for_each_seed(
    opened: Callable[..., Any], comparison: Comparison
) -> None:
    page = opened()
    assert page.input_value(".smoothing") == "20"  # the rounds of the table
    assert page.is_checked(".zoom")
    page.wait_for_selector("[data-drawn=accuracy-over-rounds]")
    page.click(".values summary >> nth=0")
    rows, first = page.locator(".values >> nth=0").locator("tbody tr"), comparison.methods[0]
    last = len(first.rounds) - 1

    def shown_mean(row: int) -> str:
        return rows.nth(row).locator("td").all_inner_texts()[2]

    mean = first.values.mean(axis=0)
    for rounds in (5, 50, 1):
        page.select_option(".smoothing", str(rounds))
        page.wait_for_function(
            "([row, text]) => document.querySelectorAll('.values tbody tr')[row].cells[2].textContent === text",
            arg=[last, percent(mean[-rounds:].mean())],
        )
    page.check(".seeds")
    page.wait_for_function(
        "count => document.querySelectorAll('.values[open] tbody tr').length === count",
        arg=sum(method.values.size for method in comparison.methods),
    )
    assert shown_mean(last) == percent(first.values[0, -1])
    for zoomed in (False, True):
        page.set_checked(".zoom", zoomed)
        page.check(".log-y")
    assert drawn(page)["accuracy-over-rounds"] > 5


def test_the_page_has_the_paired_differences_from_the_baseline(
    opened: Callable[..., Any], comparison: Comparison
) -> None:
    [sheet] = differences(comparison)
    page = opened(400)
    shown = page.eval_on_selector_all(
        f'[aria-label="{sheet.title}"] tbody tr', "rows => rows.map(r => [...r.cells].map(c => c.textContent))"
    )
    assert shown == sheet.rows
    assert len(shown) == 2


def test_the_privacy_loss_is_shown_where_it_was_recorded(tmp_path: Path) -> None:
    spec = make_spec({"rounds": 9})
    folder = RunFolder.create(tmp_path / "a", spec, environment(spec))
    for t in (1, 2):
        record = {"round": t, "cohort": [0], "bytes_down": 1, "bytes_up": 1, "accuracy": 0.5, "epsilon": 1.234 * t}
        folder.append(record, 0.1)
    write_report(compare(find_runs([tmp_path])), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "<h3>Privacy</h3>" in page
    assert "<td>2.47</td>" in page
    assert "<h3>Other metrics" not in page
    (sheet,) = privacy_losses(compare(find_runs([tmp_path])))
    assert sheet.columns == ["method", "mechanism", "sampler", "noise multiplier", "epsilon", "delta"]
    assert [row[1:] for row in sheet.rows] == [["-", "-", "-", "2.47", "-"]]


def test_the_results_have_the_bytes_of_all_rounds(tmp_path: Path) -> None:
    write_full_run(tmp_path / "a", rising(20), **algorithm("fedavg"))
    comparison = compare(find_runs([tmp_path]))
    (row,) = comparison.rows()
    assert row["bytes_total"] == comparison.methods[0].total.bytes > 0
    write_report(comparison, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert ">total bytes</button>" in page
    assert f'<td class="total" data-value="{row["bytes_total"]}">{size(row["bytes_total"])}</td>' in page


@pytest.mark.parametrize(("network", "word"), [(None, "measured"), (Network(), "modelled")])
def test_wall_clock_time_is_marked_as_measured_or_modelled(tmp_path: Path, network: Network | None, word: str) -> None:
    write_full_run(tmp_path / "a", rising(20), **algorithm("fedavg"))
    (part,) = sections(compare(find_runs([tmp_path]), network=network))
    title = part.charts()["accuracy-over-time"].to_dict(validate=False)["layer"][0]["encoding"]["x"]["title"]
    assert title.startswith(f"{word} wall-clock time (")
    write_report(compare(find_runs([tmp_path]), network=network), tmp_path / "report.html")
    assert f"wall-clock time ({word})" in (tmp_path / "report.html").read_text()


def test_a_chart_can_be_saved_from_the_page(opened: Callable[..., Any], tmp_path: Path) -> None:
    page = opened()
    for form, begins in (("svg", b"<svg"), ("png", b"\x89PNG")):
        with page.expect_download() as waiting:
            page.click(f".save[value={form}] >> nth=0")
        assert waiting.value.suggested_filename == f"accuracy-over-rounds.{form}"
        waiting.value.save_as(tmp_path / "chart")
        assert (tmp_path / "chart").read_bytes().startswith(begins)


def test_a_hostile_name_stays_text(opened: Callable[..., Any]) -> None:
    page = opened()
    drawn(page)
    page.locator("[data-kind=curves] canvas").hover()
    assert page.title() == "digits, mlp - Keel"
    assert page.locator("img").count() == 0
    assert HOSTILE in [row[0] for row in results_table(page)]
    assert HOSTILE in page.locator(".methods").inner_text()


def test_a_hundred_runs_open(browser: Any, tmp_path: Path) -> None:
    for tau in range(1, 100):
        write_full_run(tmp_path / f"runs/{tau}", rising(300 - tau, 400, seed=tau), **algorithm("ghbm", tau=tau))
    write_full_run(tmp_path / "runs/0", rising(300, 400), **algorithm("fedavg"))
    path = tmp_path / "report.html"
    write_report(compare(find_runs([tmp_path / "runs"])), path)
    assert path.stat().st_size < 5_000_000
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(path.as_uri())
    page.wait_for_selector("[data-drawn=accuracy-over-rounds]")
    assert page.locator(".methods input:checked").count() == 8
    page.close()


def test_only_fields_that_differ_are_listed(comparison: Comparison) -> None:
    (part,) = sections(comparison)
    keys, values = part.differing
    assert "algorithm.tau" in keys
    assert not [key for key in keys if key.startswith(("data.", "model.", "evaluation."))]
    assert values[part.labels.index(HOSTILE)][keys.index("algorithm.tau")] == "5"


def test_the_commands_repeat_the_runs(tmp_path: Path) -> None:
    tables: list[dict[str, Any]] = [
        {"seed": 3, **algorithm("ghbm", tau=5)},
        {**algorithm("fedavg"), "local": {"steps": 4, "lr": 0.25}, "data": {"partition": "iid"}},
        {**algorithm("fedavg"), "model": {"hidden": [8, 4]}, "participation": {"sampler": "weighted"}},
    ]
    for number, table in enumerate(tables):
        write_full_run(tmp_path / str(number), rising(20), **table)
    for part in sections(compare(find_runs([tmp_path]))):
        for method, commands in zip(part.methods, part.commands, strict=True):
            for run, (seed, command, requirement) in zip(method.runs, commands, strict=True):
                words = shlex.split(" ".join(command))
                assert words[:6] == ["keel", "run", "--algorithm", method.algorithm, "--seed", str(seed)]
                given = [after for word, after in pairwise(words) if word == "--set"]
                fixed = [f"algorithm.name={method.algorithm}", f"seed={seed}"]
                assert make_spec(override({}, [*fixed, *given])).experiment == RunFolder(run.path).spec.experiment
                assert len(given) < 7  # defaults are left out
                assert requirement == ""


def test_a_run_that_no_command_can_repeat_says_what_it_requires(tmp_path: Path) -> None:
    folder = write_full_run(tmp_path / "a", rising(20), **algorithm("ghbm"))
    spec = as_earlier_version(folder.path) / "spec.toml"
    whole = spec.read_text()
    spec.write_text(whole.replace('name = "ghbm"', 'name = "antigravity:Surprise"'))
    [[(_, command, requirement)]] = sections(compare([folder]))[0].commands
    assert command[:4] == ["keel", "run", "--algorithm", "antigravity:Surprise"]
    assert requirement == "requires the module antigravity on the import path"
    assert "antigravity" not in sys.modules
    spec.write_text(whole.replace('name = "digits"', 'name = "custom"'))
    [[(_, command, requirement)]] = sections(compare([folder]))[0].commands
    assert (command, requirement) == ([], "only from Python: pass the same data to keel.run")
    spec.write_text(whole.replace('sampler = "uniform"', 'sampler = "custom"'))
    [[(_, command, requirement)]] = sections(compare([folder]))[0].commands
    assert (command, requirement) == ([], "only from Python: pass the same sampler to keel.run")


@pytest.mark.parametrize(("field", "builtin"), [("sampler", "uniform"), ("name", "auto")], ids=["sampler", "engine"])
def test_the_command_of_a_users_sampler_or_engine_names_its_module(tmp_path: Path, field: str, builtin: str) -> None:
    folder = write_full_run(tmp_path / "a", rising(20), **algorithm("ghbm"))
    spec = as_earlier_version(folder.path) / "spec.toml"
    spec.write_text(spec.read_text().replace(f'{field} = "{builtin}"', f'{field} = "antigravity:Surprise"'))
    [[(_, command, requirement)]] = sections(compare([folder]))[0].commands
    assert any(word.endswith(f"{field}=antigravity:Surprise") for word in command)
    assert requirement == "requires the module antigravity on the import path"
    assert "antigravity" not in sys.modules


def test_each_setting_is_a_section_with_its_target_and_short_labels(tmp_path: Path) -> None:
    for alpha in (0.0, 0.5):
        for name in ("fedavg", "ghbm"):
            write_full_run(
                tmp_path / f"{name}{alpha}", rising(20 + 9 * alpha), **algorithm(name), data={"alpha": alpha}
            )
    parts = sections(compare(find_runs([tmp_path])))
    assert [part.setting.fields for part in parts] == [{"data.alpha": 0.0}, {"data.alpha": 0.5}]
    assert [part.labels for part in parts] == [["FedAvg", "GHBM"]] * 2
    assert parts[0].target != parts[1].target


def test_thin_curves_keep_their_last_round(tmp_path: Path) -> None:
    write_full_run(tmp_path / "a", rising(20, 1001), **algorithm("fedavg"))
    (part,) = sections(compare(find_runs([tmp_path])))
    assert len(part.curves[0]["rounds"]) == 400
    assert part.curves[0]["rounds"][-1] == 1001


def test_rounds_are_grouped_in_the_participation_chart(tmp_path: Path) -> None:
    write_full_run(tmp_path / "a", rising(20, 240), **algorithm("fedavg"))
    (part,) = sections(compare(find_runs([tmp_path])))
    rows = part.rows("participation")
    assert {row["round_end"] - row["round"] for row in rows} == {2}
    assert sum(row["times"] for row in rows) == 240


def test_a_run_without_loss_classes_or_drift_has_a_report(tmp_path: Path) -> None:
    spec = make_spec({"rounds": 1})
    folder = RunFolder.create(tmp_path / "a", spec, environment(spec))
    folder.append({"round": 1, "cohort": [0], "bytes_down": 1, "bytes_up": 1, "accuracy": 0.5}, 0.1)
    comparison = compare(find_runs([tmp_path]))
    write_report(comparison, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "<h3>Participation" in page
    assert not any(text in page for text in ("<h3>Label distribution", "<h3>Client drift", 'value="loss"'))


def test_a_setting_without_evaluations_does_not_hide_the_others(tmp_path: Path) -> None:
    write_full_run(tmp_path / "a", rising(20), **algorithm("fedavg"))
    spec = make_spec({"rounds": 7})
    RunFolder.create(tmp_path / "b", spec, environment(spec))
    comparison = compare(find_runs([tmp_path]))
    write_report(comparison, tmp_path / "report.html")
    write_charts(comparison, tmp_path / "charts", ["svg"])
    assert (tmp_path / "charts/setting-1/accuracy-over-rounds.svg").is_file()
    assert [part.cohort_run is None for part in sections(comparison)] == [False, True]


def test_each_chart_is_written_as_svg_pdf_and_png(comparison: Comparison, tmp_path: Path) -> None:
    write_charts(comparison, tmp_path)
    names = {path.stem for path in tmp_path.iterdir()}
    curves = {f"{what}-over-{over}" for what in ("accuracy", "loss") for over in ("rounds", "bytes", "time")}
    costs = {f"accuracy-and-{over}" for over in ("rounds", "bytes", "time")}
    assert names == {*curves, *costs, "drift", "momentum_angle", "label-distribution", "participation"}
    for suffix, begins in (("svg", b"<svg"), ("pdf", b"%PDF"), ("png", b"\x89PNG")):
        assert all((tmp_path / f"{name}.{suffix}").read_bytes().startswith(begins) for name in names)


def test_a_run_that_diverged_before_its_first_evaluation_does_not_hide_the_others(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.5] * 40, 1, 0.5, **algorithm("fedavg"))
    write_run(tmp_path / "b", [0.6] * 40, 1, 0.6, **algorithm("ghbm"))
    spec = make_spec({"rounds": 40, "seed": 1, **algorithm("ghbm")})
    RunFolder.create(tmp_path / "c", spec, environment(spec)).finish({"status": "diverged", "accuracy": None})
    comparison = compare(find_runs([tmp_path]))
    assert [row["status"] for row in comparison.rows()] == ["finished", "diverged"]
    assert comparison.rows()[1]["rounds_to_target"] is None
    write_report(comparison, tmp_path / "report.html")


def test_a_report_changes_nothing_in_run_folders(tmp_path: Path) -> None:
    spec = make_spec({"rounds": 2})
    folder = RunFolder.create(tmp_path / "a", spec, environment(spec))
    folder.append({"round": 1, "cohort": [0], "bytes_down": 1, "bytes_up": 1, "accuracy": 0.5}, 0.1)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    write_report(compare(find_runs([tmp_path])), tmp_path.parent / "report.html")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_fields_that_differ_are_on_the_page_and_in_the_notebook(tmp_path: Path) -> None:
    for name, lr in ("fedavg", 0.5), ("fedprox", 0.5), ("ghbm", 0.1):
        write_full_run(tmp_path / "runs" / name, rising(20), local={"lr": lr}, server={"lr": 1.0}, **algorithm(name))
    tuned = compare(find_runs([tmp_path / "runs"]))
    write_report(tuned, tmp_path / "report.html")
    note = "local.lr differs: 0.5 (FedAvg, FedProx), 0.1 (GHBM)"
    assert note in (tmp_path / "report.html").read_text()
    assert note in tuned._repr_html_()


def test_the_page_runs_its_own_script_alone(browser: Any, report: Path) -> None:
    page = browser.new_page()
    violations: list[str] = []
    page.on("console", lambda message: violations.append(message.text))
    page.goto(report.as_uri())
    assert page.query_selector_all("[onclick], [onload], [onerror], [oninput], [onchange]") == []
    page.evaluate(
        """() => {
          document.body.insertAdjacentHTML("beforeend", "<img src='x:' onerror='document.title = 1'>");
          const script = Object.assign(document.createElement("script"), { textContent: "document.title = 2" });
          document.body.append(script);
        }"""
    )
    page.wait_for_timeout(100)
    assert page.title() not in ("1", "2")
    assert sum("Content Security Policy" in text for text in violations) >= 2
    page.close()
