"""The tool that stores desktop results and writes docs/reproduction.md."""

import json
import re
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from keel.paper.execution import run_parts
from keel.paper.recipes import all_recipes, find_recipe
from keel.paper.run_index import RunIndex
from keel.report.comparison import compare
from keel.runs.compare import jobs_of, run_jobs

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "tools")
    return import_module("reproduction")


def test_the_page_is_what_the_tool_writes(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "PAGE", tmp_path / "page.md")
    tool.write()
    assert (tmp_path / "page.md").read_text() == (ROOT / "docs" / "reproduction.md").read_text()


def test_the_tables_of_the_documents_come_from_the_results(tool: ModuleType) -> None:
    for path, text in import_module("experiment_digits").pages().items():
        assert path.read_text() == text


def test_texts_contain_no_typed_measurements() -> None:
    texts = tomllib.loads((ROOT / "tools" / "reproduction.toml").read_text())
    settings = r"\b(?:alpha|tau|C) = (?:1/C|\d[\d.]*)|1/C|CIFAR-100?|\b\d+ clients"
    for name, text in {**texts["remarks"], "head": texts["head"]}.items():
        rest = re.sub(settings, "", re.sub(r"\{[^}]+\}", "", text))
        assert re.findall(r"\d\S*", rest) == [], name


def test_stored_results_match_the_recipes() -> None:
    paths = sorted((ROOT / "results" / "paper").glob("*.json"))
    for path in paths:
        result, recipe = json.loads(path.read_text()), find_recipe(path.stem)
        assert (result["title"], result["finds"]) == (recipe.title, recipe.finds)
        assert path.with_suffix(".svg").exists() == (recipe.kind == "figure")
        for stored, part in zip(result.get("parts", []), recipe.desktop, strict=False):
            if "trials" not in stored:
                continue  # stored before searches had trials; to be run again
            assert (stored["title"], stored["tuned"]) == (part.title, part.how_tuned())
            for row in stored["rows"]:
                lattice = part.lattice(row["method"])
                assert "chosen" not in row or (lattice is not None and set(row["chosen"]) == set(lattice.axes))


@pytest.fixture
def smoke_runs(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of runs of a recipe at smoke scale, which the tool takes for those at desktop scale."""
    recipe = find_recipe("alpha")
    small = recipe.model_copy(update={"desktop": recipe.smoke})
    monkeypatch.setattr(tool, "find_recipe", lambda name: small)
    monkeypatch.setattr(tool, "RESULTS", tmp_path / "results")
    run_parts(recipe.smoke, tmp_path / "runs", quiet=True)
    return tmp_path / "runs"


def test_stored_results_stay_when_their_runs_are_gone(tool: ModuleType, smoke_runs: Path) -> None:
    tool.keep(smoke_runs, ["alpha"])
    stored = (tool.RESULTS / "alpha.json").read_text()
    assert all("probe" in row for row in json.loads(stored)["parts"][0]["rows"])
    tool.keep(smoke_runs / "no runs", ["alpha"])
    assert (tool.RESULTS / "alpha.json").read_text() == stored


def test_stored_rows_with_other_settings_are_dropped(
    tool: ModuleType, smoke_runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tool.keep(smoke_runs, ["alpha"])
    path = tool.RESULTS / "alpha.json"
    path.write_text(path.read_text().replace('"algorithm.tau_i": "actual"', '"algorithm.tau_i": "expected"'))
    tool.keep(smoke_runs / "no runs", ["alpha"])
    rows = json.loads(path.read_text())["parts"][0]["rows"]
    assert {row["method"]: row["runs"] for row in rows} == {"fedavg": 1, "fedhbm": 0}
    assert "dropped the stored FedHBM, which has a different algorithm.tau_i" in capsys.readouterr().out


def test_runs_keep_the_probe_with_which_they_were_stored(tool: ModuleType, smoke_runs: Path) -> None:
    tool.keep(smoke_runs, ["alpha"])
    path = tool.RESULTS / "alpha.json"
    result = json.loads(path.read_text())
    first, *_ = rows = result["parts"][0]["rows"]
    first["probe"], rows[1]["accuracy_seeds"] = [1.0, 2.0, 3.0], [0.5]  # the second has other runs today
    path.write_text(json.dumps(result))
    tool.keep(smoke_runs, ["alpha"])
    probes = [row["probe"] for row in json.loads(path.read_text())["parts"][0]["rows"]]
    assert probes[0] == [1.0, 2.0, 3.0]
    assert probes[1] == rows[1]["probe"]


def test_the_page_marks_and_counts_rows_of_older_code(
    tool: ModuleType, smoke_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(tool, "TEXTS", tmp_path / "texts.toml")
    (tmp_path / "texts.toml").write_text('head = "Head"\n')
    tool.keep(smoke_runs, ["alpha"])
    tool.write()
    assert "‡" not in (tmp_path / "page.md").read_text()
    path = tool.RESULTS / "alpha.json"
    result = json.loads(path.read_text())
    result["parts"][0]["rows"][0]["probe"][0] *= 1.01
    path.write_text(json.dumps(result))
    tool.write()
    page = (tmp_path / "page.md").read_text()
    assert "**1 of 4 rows are of an older version of the code**" in page
    assert len(re.findall(r"\d % ‡", page)) == 1


def test_the_cost_relative_to_a_stored_baseline_is_that_of_a_comparison(tool: ModuleType, tmp_path: Path) -> None:
    table = {"rounds": 8, "evaluation": {"every": 1, "last": 3}}
    folders = run_jobs(jobs_of(table, ["fedavg", "fedhbm"], 2, [], tmp_path), quiet=True)
    baseline, expected = compare(folders).rows()
    assert expected["rounds_to_target"] is not None
    expected["cost"] |= {"seconds": None, "seconds_saved": None}
    fields = tool._cost_fields(
        [folder for folder in folders if folder.table["algorithm"]["name"] == "fedhbm"], baseline
    )
    assert fields == {name: expected[name] for name in fields}
    assert {"cost", "bytes_saved", "rounds_to_target_seeds"} <= set(fields)


def test_the_cost_of_a_row_covers_only_its_finished_runs(tool: ModuleType, tmp_path: Path) -> None:
    part = find_recipe("alpha").smoke[0]
    run_parts([part.model_copy(update={"methods": ["fedhbm"]})], tmp_path, quiet=True)
    index, spec = RunIndex(tmp_path), part.specs("fedhbm")[1]
    row = {"method": "fedhbm", "values": {"data.alpha": spec.data.alpha}}
    [folder] = tool._finished(part, row, index)
    assert folder.spec == spec
    (folder.path / "summary.json").unlink()
    assert tool._finished(part, row, index) == []


def test_the_page_names_recipes_that_have_not_been_run(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(tool, "RESULTS", tmp_path)
    monkeypatch.setattr(tool, "TEXTS", tmp_path / "texts.toml")
    (tmp_path / "texts.toml").write_text('head = "Head"\n')
    tool.write()
    text = (tmp_path / "page.md").read_text()
    assert text.count("Not run yet at desktop scale.") == len(all_recipes())
    table = text.partition("## The paper's claims")[2].partition("\n\n")[2].partition("\n\n")[0]
    assert table.count("**not run**") == len(table.splitlines()) - 2 == 10
