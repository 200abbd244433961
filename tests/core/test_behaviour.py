"""The paper's ranking of methods in small, on the digits with one class per client.

The full experiments, every method over five seeds, are `make experiment` and `make scarce`; docs/results.md reports
their results.
"""

import json
from functools import cache
from pathlib import Path
from statistics import fmean

import pytest

from keel.config.defaults import make_spec
from keel.config.overrides import override
from keel.runs.build import make_task
from tests.conftest import make_loop

SCARCE = Path(__file__).parents[2] / "results" / "digits_scarce_grid.json"
"""The best hyper-parameters of every method where two of a hundred clients take part in a round."""


@cache
def mean_accuracy(algorithm: str, rounds: int, after: int, assignments: tuple[str, ...] = ()) -> float:
    """The mean test accuracy over the rounds later than `after`: of two methods the faster one has the higher mean."""
    table = {"algorithm": {"name": algorithm}, "rounds": rounds, "evaluation": {"every": 4, "last": 1}}
    spec = make_spec(override(table, assignments))
    loop, accuracies = make_loop(spec, make_task(spec), workers=1), dict[int, float]()
    loop.run(loop.start(), [lambda record, *_: accuracies.update({record["round"]: record.get("accuracy", -1)})])
    return fmean(value for t, value in accuracies.items() if t > after and value >= 0)


@pytest.mark.parametrize("name", ["ghbm", "localghbm", "fedhbm"])
def test_generalised_heavy_ball_momentum_is_faster_than_fedavg(name: str) -> None:
    assert mean_accuracy(name, 40, after=0) > mean_accuracy("fedavg", 40, after=0) + 0.03


def test_with_few_participants_it_is_faster_than_the_momentum_of_the_last_cohort() -> None:
    best = {row["algorithm"]: row for row in json.loads(SCARCE.read_text()) if row["best"]}

    def late(name: str) -> float:
        fields = {field: value for field, value in best[name].items() if "." in field} | {"participation.rate": 0.02}
        return mean_accuracy(name, 160, 100, tuple(f"{field}={json.dumps(value)}" for field, value in fields.items()))

    ours = min(late(name) for name in ("ghbm", "localghbm", "fedhbm"))
    assert ours > max(late(name) for name in ("fedcm", "fedadc", "mimelitemom")) + 0.02
