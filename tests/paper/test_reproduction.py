"""The page of reproduction is what its tool makes of the results."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from keel.paper.recipes import find, items

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reproduction", ROOT / "tools" / "reproduction.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_number_of_the_page_is_typed(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "PAGE", tmp_path / "page.md")
    tool.write()
    assert (tmp_path / "page.md").read_text() == (ROOT / "docs" / "reproduction.md").read_text()


def test_kept_results_have_command_spec_and_environment() -> None:
    kept = sorted((ROOT / "results" / "paper").glob("*.json"))
    assert {path.stem for path in kept} <= set(items())
    for path in kept:
        result = json.loads(path.read_text())
        assert result["command"] == f"keel paper run {path.stem} --scale desktop"
        for part in result.get("parts", []):
            assert part["spec"]["data.name"]
            assert part["environments"] or not any(row["runs"] for row in part["rows"])
        drawing = find(path.stem).kind == "figure"
        assert path.with_suffix(".svg").exists() == drawing


def test_what_has_not_been_run_is_named_on_the_page(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(tool, "KEPT", tmp_path)
    tool.write()
    text = (tmp_path / "page.md").read_text()
    assert text.count("Not yet run at desktop scale.") == len(items()) + 3
