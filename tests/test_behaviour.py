"""The order of the paper in small, on the digits with one class per client.

The whole experiments, every method over five seeds, are `make experiment` and `make scarce`; docs/results.md tells
what they gave.
"""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from keel.rounds import Training
from keel.runs.spec import make_spec, override
from keel.task import make_task

SCARCE = Path(__file__).parents[1] / "results" / "digits_scarce_grid.json"
SEEDS = (0, 1)


def early_accuracy(name: str, rounds: int, **fields: Any) -> float:
    """The mean accuracy over the first rounds, where who is ahead gets there first."""
    values: list[float] = []
    for seed in SEEDS:
        table = {"algorithm": {"name": name}, "seed": seed, "rounds": rounds, "evaluation": {"every": 4, "last": 4}}
        spec = make_spec(override(table, [f"{field}={json.dumps(value)}" for field, value in fields.items()]))
        training = Training(spec, make_task(spec))
        training.run(training.start(), [lambda record, *_: values.append(record.get("accuracy", -1))])
    return fmean(value for value in values if value >= 0)


@pytest.mark.parametrize("name", ["ghbm", "localghbm", "fedhbm"])
def test_momentum_for_all_clients_is_faster_than_none(name: str) -> None:
    assert early_accuracy(name, 80) > early_accuracy("fedavg", 80) + 0.03


def test_where_few_take_part_it_is_faster_than_the_momentum_of_the_last_cohort() -> None:
    best = {row["algorithm"]: row for row in json.loads(SCARCE.read_text()) if row["best"]}

    def early(name: str) -> float:
        point = {field: value for field, value in best[name].items() if "." in field}
        return early_accuracy(name, 240, **{"participation.rate": 0.02}, **point)

    ours = min(early(name) for name in ("ghbm", "localghbm", "fedhbm"))
    assert ours > max(early(name) for name in ("fedcm", "fedadc", "mimelitemom"))
