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
    settings = r"\b(?:alpha|tau|C) = (?:1/C|\d[\d.]*)|1/C|CIFAR-100?"
    for name, text in {**texts["remarks"], "head": texts["head"], "claims": texts["claims"]}.items():
        rest = re.sub(settings, "", re.sub(r"\{[^}]+\}", "", text))
        assert re.findall(r"\d\S*", rest) == [], name


def test_a_lead_within_the_standard_deviation_is_marked(tool: ModuleType) -> None:
    def row(name: str, mean: float) -> dict[str, object]:
        spread = {"accuracy_mean": mean, "accuracy_std": 0.01, "status": "finished", "values": {}}
        return {"method": name, "algorithm": name, "label": name, **spread}

    def line(lead: float) -> str:
        rows = [row("fedhbm", 0.9 + lead), row("fedacg", 0.9), row("fedcm", 0.8)]
        [text] = tool.lead({"digits": {"parts": [{"title": "t", "spec": {"data.alpha": 0}, "rows": rows}]}})
        return text

    assert "the best of 2 other momentum methods, fedacg 90.0 ± 1.0 %; difference +0.5 points" in line(0.005)
    assert line(0.005).endswith("(within the standard deviation).")
    assert line(0.02).endswith("+2.0 points.")


def test_stored_results_match_the_recipes() -> None:
    paths = sorted((ROOT / "results" / "paper").glob("*.json"))
    for path in paths:
        result, recipe = json.loads(path.read_text()), find_recipe(path.stem)
        assert (result["title"], result["finds"]) == (recipe.title, recipe.finds)
        assert path.with_suffix(".svg").exists() == (recipe.kind == "figure")
        for stored, part in zip(result.get("parts", []), recipe.desktop, strict=False):
            assert (stored["title"], stored["tuned"]) == (part.title, part.how_tuned())
            for row in stored["rows"]:
                plan = part.plan(row["method"]) if "chosen" in row else None
                assert plan is None or row["chosen"] in plan.points(), "the search used another grid"


def test_stored_results_stay_when_their_runs_are_gone(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "RESULTS", tmp_path)
    stored = (ROOT / "results" / "paper" / "tau.json").read_text()
    (tmp_path / "tau.json").write_text(stored)
    tool.keep(tmp_path / "no runs", ["tau"])
    assert (tmp_path / "tau.json").read_text() == stored
    (tmp_path / "tau.json").write_text(stored.replace('"local.batch": 64', '"local.batch": 32'))
    with pytest.raises(SystemExit, match=r"alpha = 0: the stored result of FedAvg has a different local\.batch"):
        tool.keep(tmp_path / "no runs", ["tau"])


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
    (tmp_path / "texts.toml").write_text('head = "Head"\nclaims = "Claims"\n')
    tool.write()
    text = (tmp_path / "page.md").read_text()
    assert text.count("Not run yet at desktop scale.") == len(all_recipes()) + 3
