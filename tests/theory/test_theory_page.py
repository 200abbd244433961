"""The tables of docs/theory.md are the stored results."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["regression", "theorem"])
def test_the_page_has_the_stored_results(name: str) -> None:
    result = json.loads((ROOT / "results" / "paper" / f"{name}.json").read_text())
    page = (ROOT / "docs" / "theory.md").read_text()
    for cells in [result["columns"], *result["rows"]]:
        assert f"| {' | '.join(cells)} |" in page
