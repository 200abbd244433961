"""Reports on run folders that are damaged or made by somebody else."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import keel as library
from keel.errors import KeelError
from keel.report.comparison import Comparison, compare
from keel.report.page import page_html
from keel.report.sections import Section, sections
from keel.report.tables import results, text_of
from keel.runs.finding import find_runs
from tests.conftest import Called, as_earlier_version
from tests.report.test_comparison import algorithm, write_run
from tests.report.test_page import STATISTICS, rising, write_full_run

Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two runs of different methods."""
    folder = tmp_path_factory.mktemp("intact")
    write_full_run(folder / "good", rising(5, 30), **algorithm("fedavg"))
    write_full_run(folder / "bad", rising(9, 30), **algorithm("ghbm", tau=5))
    for run in folder.iterdir():
        as_earlier_version(run)
    return folder


@pytest.fixture
def runs(intact: Path, tmp_path: Path) -> Path:
    return shutil.copytree(intact, tmp_path / "runs")


def reported(runs: Path) -> Comparison:
    return compare(find_runs([runs]), skip_damaged=True)


def in_line(number: int, **values: Any) -> Change:
    """Return a change of values of one record."""

    def change(run: Path) -> None:
        lines = (run / "metrics.jsonl").read_text().splitlines()
        lines[number - 1] = json.dumps({**json.loads(lines[number - 1]), **values})
        (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")

    return change


def in_file(name: str, **values: Any) -> Change:
    return lambda run: (run / name).write_text(json.dumps({**json.loads((run / name).read_text()), **values}))


def spec_with(line: str) -> Change:
    return lambda run: (run / "spec.toml").write_text(f"{line}\n{(run / 'spec.toml').read_text()}")


def lines(order: Callable[[list[str]], list[str]]) -> Change:
    def change(run: Path) -> None:
        text = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run / "metrics.jsonl").write_text("".join(order(text)))

    return change


def instead(name: str, make: Change) -> Change:
    def change(run: Path) -> None:
        (run / name).unlink()
        make(run / name)

    return change


DAMAGES: dict[str, tuple[Change, str]] = {
    "wrong type": (in_line(3, bytes_up="7"), "line 3: bytes_up: input should be a valid integer (got '7')"),
    "huge integer": (in_line(3, bytes_up=10**400), "line 3: bytes_up: input should be less than 9223372036854775808"),
    "infinite bytes": (in_line(3, bytes_up=2**62, bytes_down=2**62), "its rounds sent more than"),
    "not a number": (in_line(3, accuracy=float("nan")), "line 3: accuracy: input should be a finite number (got nan)"),
    "huge number": (in_line(3, accuracy=1e300), "line 3: accuracy: input should be less than or equal to 1"),
    "missing key": (lines(lambda text: ['{"round": 1}\n', *text[1:]]), "line 1: cohort is missing"),
    "two rounds twice": (lines(lambda text: [*text[:5], *text[3:]]), "line 6 is about round 4"),
    "missing round": (lines(lambda text: text[:5] + text[6:]), "line 6 is about round 7"),
    "other order": (lines(lambda text: text[::-1]), "line 1 is about round 30"),
    "two records in a line": (
        lines(lambda text: [f"{text[0][:-1]},{text[1]}", *text[1:]]),
        "line 1 has not one record",
    ),
    "more rounds than planned": (lines(lambda text: [*text, text[0].replace("1", "31", 1)]), "it has 31 rounds, but"),
    "another summary": (in_file("summary.json", seed=5), "it has seed 5, but spec.toml has 0"),
    "lost rounds": (in_file("summary.json", rounds=31), "it has 30 lines, but the run 31 rounds"),
    "unknown status": (in_file("summary.json", status="fine"), "status: input should be 'finished', 'stopped'"),
    "lone surrogate": (in_file("environment.json", title="\ud800"), "'environment.json' is damaged (not valid JSON"),
    "picture": (in_file("data.json", picture={**STATISTICS["picture"], "counts": [[1]]}), "not a table of clients by"),
    "no picture": (in_file("data.json", picture=7), "picture: input should be an object (got 7)"),
    "empty file": (lambda run: (run / "environment.json").write_text(""), "not valid JSON: EOF"),
    "folder": (instead("metrics.jsonl", Path.mkdir), "'metrics.jsonl' is damaged (it is not a regular file"),
    "pipe": (instead("spec.toml", os.mkfifo), "'spec.toml' is damaged (it is not a regular file"),
    "loop": (instead("summary.json", lambda file: file.symlink_to(file)), "Too many levels of symbolic links"),
    "lost spec": (lambda run: (run / "spec.toml").unlink(), "'spec.toml' is damaged (it is missing"),
    "lost timings": (lambda run: (run / "timings.jsonl").unlink(), "'timings.jsonl' is damaged (it is missing"),
    "infinite field": (spec_with("x = inf"), "x must be a finite number, a text, a list or a table (got inf)"),
    "nested field": (spec_with(f"x = {'[' * 5000}"), "is not valid TOML (maximum recursion depth exceeded"),
    "long integer": (spec_with(f"x = {'1' * 5000}"), "Exceeds the limit"),
    "network": (spec_with("network = {up_mbps = -1}"), "network.up_mbps must be greater than 0"),
}


@pytest.mark.parametrize(("change", "reason"), DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_run_is_skipped_and_listed(runs: Path, change: Change, reason: str) -> None:
    change(runs / "bad")
    comparison = reported(runs)
    assert comparison.paths == [runs / "good"]
    [skipped] = comparison.skipped
    assert skipped.path == str(runs / "bad")
    assert reason in skipped.reason
    with pytest.raises(KeelError, match=re.escape(str(runs / "bad"))):  # from Python no method is lost silently
        compare(find_runs([runs]))


def test_the_command_lists_the_skipped_runs_and_reports_on_the_others(runs: Path, keel: Callable[..., Called]) -> None:
    in_line(3, round=9)(runs / "bad")
    called = keel("report", str(runs), "--json", "--out", str(runs / "report.html"))
    assert called.code == 0
    assert f'<th scope="row">{runs}/bad</th><td>&#39;metrics.jsonl&#39; is' in (runs / "report.html").read_text()
    assert [row["label"] for row in json.loads(called.out)] == ["FedAvg"]
    assert f"skipped {runs}/bad: 'metrics.jsonl' is damaged (line 3 is about round 9); keel repair" in called.err
    in_file("summary.json", status=7)(runs / "good")
    called = keel("report", str(runs))
    assert called.code == 2
    assert called.err.startswith("keel: no run can be read; 2 skipped, the first is")


def test_keel_report_lists_skipped_runs(runs: Path, tmp_path: Path) -> None:
    (runs / "bad/environment.json").unlink()
    page = library.report(runs, tmp_path / "report.html")
    assert [skipped.reason for skipped in page.comparison.skipped] == [
        f"'environment.json' is damaged (it is missing); keel repair {runs}/bad restores it if it can"
    ]
    assert "Skipped" in page._repr_html_()


def test_text_of_a_run_is_neither_html_nor_a_control_sequence(tmp_path: Path) -> None:
    title = "<b>\x1b[31m\u202f</b>"
    folder = write_run(tmp_path / "a", [0.5] * 3, 1, 0.5)
    as_earlier_version(folder.path)
    in_file("environment.json", title=title)(folder.path)
    comparison = reported(tmp_path)
    assert comparison.methods[0].label == "<b>\ufffd[31m\u202f</b>"
    assert "<b>" not in page_html(comparison, "")
    assert "\x1b" not in "".join(text_of(sheet) for sheet in results(comparison))


@pytest.mark.parametrize("metric", ["rounds", "time", "loss", "a-and-b", "x-over-rounds", "__proto__"])
def test_a_metric_may_have_any_name(tmp_path: Path, metric: str) -> None:
    folder = write_run(tmp_path / "a", [0.5] * 5, 1, 0.5)
    as_earlier_version(folder.path)
    for number in range(1, 6):
        in_line(number, **{metric: 1e-320 * number})(folder.path)
    in_file("environment.json", metric=metric, maximize=False)(folder.path)
    in_file("summary.json", metric=metric, maximize=False, value=1e-320)(folder.path)
    with patch.object(Section, "charts", lambda part, live: {}):  # Altair takes most of the time
        assert page_html(reported(tmp_path), "")
    [part] = sections(reported(tmp_path))
    for over in ("rounds", "bytes", "time"):
        assert [row["mean"] for row in part.rows(f"{metric}-over-{over}")] == [1e-320 * t for t in range(1, 6)]
        assert part.rows(f"{metric}-and-{over}") == []


def test_an_observer_may_add_anything(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [0.5] * 3, 1, 0.5)
    as_earlier_version(folder.path)
    for number, value in enumerate([10**400, "x", 2.5], start=1):
        in_line(number, mine=value, clients={"mean": value})(folder.path)
    [method] = reported(tmp_path).methods
    assert method.other["mine"].rounds.tolist() == method.clients["mean"].rounds.tolist() == [3]
    with patch.object(Section, "charts", lambda part, live: {}):
        assert page_html(reported(tmp_path), "")


def test_a_run_of_an_unknown_algorithm_is_reported(runs: Path) -> None:
    spec = runs / "bad/spec.toml"
    spec.write_text(spec.read_text().replace('"ghbm"', '"tomorrow"'))
    assert [method.algorithm for method in reported(runs).methods] == ["tomorrow", "fedavg"]


def test_folders_below_a_path_are_found_without_following_links(runs: Path) -> None:
    (runs / "again").symlink_to(runs)
    shutil.copytree(runs / "good", runs / ".hidden")
    assert [folder.path.name for folder in find_runs([runs])] == ["bad", "good"]
    with pytest.raises(KeelError, match="nothing' does not exist"):
        find_runs([runs / "nothing"])
