"""The paper's linear regression, and the example that draws it."""

import runpy
import sys
from pathlib import Path

import pytest

from keel.paper import regression

EXAMPLE = Path(__file__).parents[2] / "examples" / "linear_regression.py"


def test_with_differing_optima_ghbm_matches_full_participation_and_fedcm_does_not() -> None:
    full, partial, ghbm = regression.losses("optima that differ", 100).values()
    assert ghbm[-1] == pytest.approx(full[-1], rel=0.2)
    assert min(partial[-5:]) > 10 * full[-1]  # even at the best point of its cycle


def test_with_a_common_optimum_every_method_converges() -> None:
    for losses in regression.losses("one optimum for all (the paper's case)", 40).values():
        assert losses[-1] < 0.1 * losses[0]


def test_the_example_draws_the_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["linear_regression.py", "3"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert (tmp_path / "linear_regression.svg").read_text().startswith("<svg")
    assert "optima that differ, weight 0.1" in capsys.readouterr().out
