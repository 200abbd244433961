"""The paper's linear-regression experiment, and the example that draws it."""

import subprocess
import sys
from pathlib import Path

import pytest

from keel.paper import regression

EXAMPLE = Path(__file__).parents[2] / "examples" / "linear_regression.py"


def test_where_optima_differ_ghbm_follows_full_participation_and_fedcm_does_not() -> None:
    full, partial, ghbm = regression.losses("optima that differ", 200).values()
    assert ghbm[-1] == pytest.approx(full[-1], rel=0.1)
    assert min(partial[-5:]) > 10 * full[-1]  # the best of its cycle, even


def test_where_all_share_one_optimum_all_get_there() -> None:
    for losses in regression.losses("one optimum for all (the paper's case)", 150).values():
        assert losses[-1] < 1e-4 * losses[0]


def test_the_example_draws_the_figure(tmp_path: Path) -> None:
    subprocess.run([sys.executable, EXAMPLE, "5"], cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "linear_regression.svg").read_text().startswith("<svg")
