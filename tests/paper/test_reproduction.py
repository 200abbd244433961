"""The page of reproduction is what its tool makes of the results."""

import importlib.util
import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from keel.paper.recipes import find, items
from keel.paper.running import Shelf, run_parts
from keel.reporting.comparison import compare
from keel.runs.batch import read_runs
from tests.conftest import Called

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reproduction", ROOT / "tools" / "reproduction.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_tool_makes(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "PAGE", tmp_path / "page.md")
    tool.write()
    assert (tmp_path / "page.md").read_text() == (ROOT / "docs" / "reproduction.md").read_text()


def test_words_have_no_measured_number_that_is_typed() -> None:
    words = tomllib.loads((ROOT / "tools" / "reproduction.toml").read_text())
    settings = r"\b(?:alpha|tau|C) = (?:1/C|\d[\d.]*)|1/C|CIFAR-100?"
    for name, text in {**words["remarks"], "head": words["head"], "claims": words["claims"]}.items():
        rest = re.sub(settings, "", re.sub(r"\{[^}]+\}", "", text))
        assert re.findall(r"\d\S*", rest) == [], name


def test_a_lead_within_the_deviation_is_not_visible(tool: ModuleType) -> None:
    def row(name: str, mean: float) -> dict[str, object]:
        spread = {"accuracy_mean": mean, "accuracy_std": 0.01, "status": "finished", "values": {}}
        return {"method": name, "algorithm": name, "label": name, **spread}

    def told(lead: float) -> str:
        rows = [row("fedhbm", 0.9 + lead), row("fedacg", 0.9), row("fedcm", 0.8)]
        [line] = tool.ahead({"digits": {"parts": [{"title": "t", "spec": {"data.alpha": 0}, "rows": rows}]}})
        return line

    assert "the best of 2 other momentum methods fedacg 90.0 ± 1.0 %: +0.5 points" in told(0.005)
    assert told(0.005).endswith("(not visible, within the deviation).")
    assert told(0.02).endswith("+2.0 points.")


def test_kept_results_have_command_spec_and_environment() -> None:
    kept = sorted((ROOT / "results" / "paper").glob("*.json"))
    assert {path.stem for path in kept} <= set(items())
    for path in kept:
        result = json.loads(path.read_text())
        assert result["command"] == f"keel paper run {path.stem} --scale desktop"
        for part, recipe in zip(result.get("parts", []), find(path.stem).desktop, strict=False):
            begun = any(row["runs"] for row in part["rows"])
            assert not begun or (part["title"], part["tuned"]) == (recipe.title, recipe.how_tuned())
            assert part["spec"]["data.name"]
            for row in part["rows"]:
                plan = recipe.plan(row["method"]) if "chosen" in row else None
                assert plan is None or row["chosen"] in plan.points(), "searched in another grid than the recipe's"
            assert part["environments"] or not any(row["runs"] for row in part["rows"])
        drawing = find(path.stem).kind == "figure"
        assert path.with_suffix(".svg").exists() == drawing


def test_what_was_kept_stays_where_its_runs_are_gone(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "KEPT", tmp_path)
    before = (ROOT / "results" / "paper" / "tau.json").read_text()
    (tmp_path / "tau.json").write_text(before)
    tool.keep(tmp_path / "no runs", ["tau"])
    assert (tmp_path / "tau.json").read_text() == before
    (tmp_path / "tau.json").write_text(before.replace('"local.batch": 64', '"local.batch": 32'))
    with pytest.raises(SystemExit, match=r"MNIST, MLP, alpha = 0: FedAvg was kept with other local\.batch"):
        tool.keep(tmp_path / "no runs", ["tau"])


def test_a_run_is_priced_by_a_baseline_that_was_kept(
    tool: ModuleType, keel: Callable[..., Called], tmp_path: Path
) -> None:
    asked = ["--methods", "fedavg,fedhbm", "--seeds", "2", "--rounds", "8", "--set", "evaluation.every=1"]
    assert keel("compare", *asked, "--set", "evaluation.last=3", "--out", "runs", "--quiet").code == 0
    folders = read_runs([tmp_path / "runs"])
    baseline, expected = compare(folders).rows()
    assert expected["rounds_to_target"] is not None
    expected["cost"] |= {"seconds": None, "seconds_saved": None}
    found = tool._priced([each for each in folders if each.table["algorithm"]["name"] == "fedhbm"], baseline)
    assert found == {name: expected[name] for name in found}
    assert {"cost", "bytes_saved", "rounds_to_target_seeds"} <= set(found)


def test_of_a_row_over_values_only_its_own_runs_that_have_ended_are_priced(tool: ModuleType, tmp_path: Path) -> None:
    part = find("alpha").smoke[0]
    run_parts([part.model_copy(update={"methods": ["fedhbm"]})], tmp_path, quiet=True)
    shelf, spec = Shelf(tmp_path), part.specs("fedhbm")[1]
    row = {"method": "fedhbm", "values": {"data.alpha": spec.data.alpha}}
    [folder] = tool._ended(part, row, shelf)
    assert folder.spec == spec
    (folder.path / "summary.json").unlink()
    assert tool._ended(part, row, shelf) == []


def test_what_has_not_been_run_is_named_on_the_page(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(tool, "KEPT", tmp_path)
    monkeypatch.setattr(tool, "WORDS", tmp_path / "words.toml")
    (tmp_path / "words.toml").write_text('head = "Head"\nclaims = "Claims"\n')
    tool.write()
    text = (tmp_path / "page.md").read_text()
    assert text.count("Not yet run at desktop scale.") == len(items()) + 3
