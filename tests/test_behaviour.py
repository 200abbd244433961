"""The order of the paper in small: on the digits, one class per client, the GHBM family is ahead of FedAvg.

The whole experiment, every method over five seeds, is `make experiment`; docs/results.md tells what it gave.
"""

from statistics import fmean

import pytest

from keel.rounds import Training
from keel.runs.spec import make_spec
from keel.task import make_task

ROUNDS, SEEDS = 80, (0, 1)


@pytest.fixture(scope="module")
def early_accuracy() -> dict[str, float]:
    """The mean accuracy over the first rounds, where who is ahead gets there first."""
    found = {}
    for name in ("fedavg", "ghbm", "localghbm", "fedhbm"):
        values: list[float] = []
        for seed in SEEDS:
            table = {"algorithm": {"name": name}, "seed": seed, "rounds": ROUNDS, "evaluation": {"every": 4, "last": 4}}
            spec = make_spec(table)
            training = Training(spec, make_task(spec))
            training.run(
                training.start(), [lambda r, *_, v=values: v.append(r["accuracy"]) if "accuracy" in r else None]
            )
        found[name] = fmean(values)
    return found


@pytest.mark.parametrize("name", ["ghbm", "localghbm", "fedhbm"])
def test_momentum_for_all_clients_is_faster_than_none(early_accuracy: dict[str, float], name: str) -> None:
    assert early_accuracy[name] > early_accuracy["fedavg"] + 0.03
