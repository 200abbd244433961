"""The paper's linear-regression experiment, as examples/linear_regression.py runs it."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "linear_regression.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("linear_regression", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_where_optima_differ_ghbm_follows_full_participation_and_fedcm_does_not(example: ModuleType) -> None:
    data = example.observations(1.0)
    full, partial, ghbm = (example.excess_losses(method, data, 200) for method in example.METHODS)
    assert ghbm[-1] == pytest.approx(full[-1], rel=0.1)
    assert min(partial[-5:]) > 10 * full[-1]  # the best of its cycle, even


def test_where_all_share_one_optimum_all_get_there(example: ModuleType) -> None:
    data = example.observations(0.0)
    for method in example.METHODS:
        losses = example.excess_losses(method, data, 150)
        assert losses[-1] < 1e-4 * losses[0]


def test_the_figure_is_drawn(example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example.main(5)
    assert (tmp_path / "linear_regression.svg").read_text().startswith("<svg")
