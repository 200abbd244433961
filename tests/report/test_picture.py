"""A comparison as a picture of block characters."""

from pathlib import Path

import numpy as np

from keel.report.comparison import compare
from keel.report.picture import WIDTH, curves_picture, deviation_picture
from keel.runs.finding import find_runs
from tests.report.test_comparison import algorithm
from tests.report.test_page import write_full_run


def test_curves_are_drawn_in_the_range_of_their_second_half(tmp_path: Path) -> None:
    for name, final in ("fedavg", 0.8), ("ghbm", 0.9):
        curve = np.concatenate([np.zeros(60), np.full(60, final)])
        write_full_run(tmp_path / name, curve, **algorithm(name))
    title, average, momentum = curves_picture(compare(find_runs([tmp_path])))
    assert title.endswith("to 90.0 % (full):")
    assert (average.split()[0], momentum.split()[0]) == ("FedAvg", "GHBM")
    assert (momentum[-1], len(momentum), len(average)) == ("█", len("FedAvg  ") + WIDTH, len("FedAvg  ") + WIDTH)
    assert momentum.count("█") > 15
    assert "█" not in average


def test_too_few_rounds_have_no_picture(tmp_path: Path) -> None:
    write_full_run(tmp_path / "a", np.full(10, 0.5), **algorithm("fedavg"))
    assert curves_picture(compare(find_runs([tmp_path]))) == []
    assert deviation_picture({1: [], 100: []}) == []


def test_the_bars_of_the_deviation_are_proportional() -> None:
    _, classical, generalised, none = deviation_picture({1: [(100, 2.0), (110, 4.0)], 100: [(100, 2.0), (110, 2.0)]})
    assert (classical.count("█"), generalised.count("█"), none.count("█")) == (30, 20, 10)
    assert (classical.split()[-1], generalised.split()[-1]) == ("3.00", "2.00")
    assert len({len(line) for line in (classical, generalised, none)}) == 1
