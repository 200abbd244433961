"""The fingerprint of an algorithm's code: it changes with the rule and with nothing else."""

from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

from keel.algorithms.fedhbm import FedHBM
from keel.paper import probe as module
from keel.paper.probe import is_older, probe

FEDHBM = {"algorithm.name": "fedhbm", "algorithm.beta": 0.9, "algorithm.tau_i": "actual", "algorithm.anchor": "own"}


@pytest.fixture
def uncached() -> Iterator[None]:
    module._run.cache_clear()
    yield
    module._run.cache_clear()


def test_a_changed_rule_is_detected(uncached: None, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = probe(FEDHBM)
    module._run.cache_clear()
    assert not is_older(stored, FEDHBM)
    original = FedHBM.displacement

    def shorter(self: FedHBM, *arguments: Any) -> Tensor:
        return 0.9 * original(self, *arguments)

    monkeypatch.setattr(FedHBM, "displacement", shorter)
    module._run.cache_clear()
    assert is_older(stored, FEDHBM)
    fedavg = {"algorithm.name": "fedavg"}
    assert not is_older(probe(fedavg), fedavg)


def test_numbers_of_the_algorithm_share_a_probe_and_choices_do_not() -> None:
    assert probe({**FEDHBM, "algorithm.beta": 0.3, "local.lr": 0.7}) == probe(FEDHBM)
    assert probe({**FEDHBM, "algorithm.tau_i": "expected"}) != probe(FEDHBM)
    assert probe({**FEDHBM, "algorithm.beta": 0.0}) == probe({"algorithm.name": "fedavg"})
    ghbm = {"algorithm.name": "ghbm", "algorithm.beta": 0.9}
    assert probe({**ghbm, "algorithm.tau": 50}) == probe({**ghbm, "algorithm.tau": "period"})


def test_results_without_a_probe_or_with_removed_fields_are_of_older_code() -> None:
    current = probe(FEDHBM)
    assert is_older(None, FEDHBM)
    assert is_older(current, {**FEDHBM, "algorithm.removed": 1.0})
    assert is_older(current, {**FEDHBM, "algorithm.name": "removed"})


def test_rounding_differences_are_tolerated() -> None:
    stored = [number * (1 + 5e-4) for number in probe(FEDHBM)]
    assert not is_older(stored, FEDHBM)
    assert is_older([stored[0] * 1.002, *stored[1:]], FEDHBM)
