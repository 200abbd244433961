"""The scripts in tools/ that no page of the documents runs."""

from importlib import import_module
from pathlib import Path

import pytest


def test_the_search_of_a_grid_scores_a_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "tools")
    point = {"rounds": 4, "evaluation.last": 4, "local.lr": 0.5, "engine.workers": 1}
    overall, last = import_module("search_digits").accuracy(("fedavg", point, 0))
    assert 0 < overall != last > 0
    assert import_module("search_digits").accuracy(("fedavg", {**point, "local.lr": 1e30}, 0)) == (0.0, 0.0)
