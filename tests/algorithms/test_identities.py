"""Algorithms that must coincide, and cases small enough to do by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor

from keel.algorithms import make_algorithm
from keel.algorithms.base import ClientContext, Path, Report
from tests.conftest import uneven_training


def final(table: dict[str, Any]) -> Tensor:
    training = uneven_training(table)
    position = training.start()
    training.run(position, [])
    return position.server["theta"]


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "fedavgm", "beta": 0.0},
        {"name": "ghbm", "beta": 0.0},
        {"name": "localghbm", "beta": 0.0},
        {"name": "fedhbm", "beta": 0.0},
        {"name": "ghbm", "tau": 1000},
    ],
    ids=str,
)
def test_without_momentum_they_are_fedavg(algorithm: dict[str, Any]) -> None:
    torch.testing.assert_close(final({"algorithm": algorithm}), final({"algorithm": {"name": "fedavg"}}))


CYCLIC = {"participation": {"rate": 0.5, "sampler": "cyclic"}}


def test_under_cyclic_participation_localghbm_is_ghbm() -> None:
    local = final({"algorithm": {"name": "localghbm"}, **CYCLIC})
    torch.testing.assert_close(local, final({"algorithm": {"name": "ghbm", "tau": 2}, **CYCLIC}))


def test_under_uniform_participation_it_is_not() -> None:
    local = final({"algorithm": {"name": "localghbm"}})
    assert not torch.allclose(local, final({"algorithm": {"name": "ghbm", "tau": 2}}), atol=1e-3)


def context(t: int = 1, lr: float = 0.5, steps: int = 4, period: float = 2.0) -> ClientContext:
    return ClientContext(round=t, clients=4, cohort=2, period=period, lr=lr, server_lr=1.0, steps=steps)


def test_ghbm_by_hand() -> None:
    ghbm = make_algorithm("ghbm", beta=0.5, tau=2)
    server = ghbm.init_server(torch.tensor([8.0]))
    for step in (1.0, 2.0):  # theta: 8, 7, 5
        assert ghbm.broadcast(server, context())["m"].item() == 0  # fewer than two rounds yet
        server = ghbm.aggregate(server, [Report({"delta": torch.tensor([step])}, 1.0, 4)], context())
    message = ghbm.broadcast(server, context())
    assert message["theta"].item() == 5
    assert message["m"].item() == 1.5  # (8 - 5) / 2
    u = ghbm.direction(message["theta"], lambda w: torch.tensor([10.0]), message, {}, context())
    assert u.item() == 10 + 0.5 * 1.5 / (0.5 * 4)
    server = ghbm.aggregate(server, [Report({"delta": torch.tensor([4.0])}, 1.0, 4)], context())
    assert ghbm.broadcast(server, context())["m"].item() == 3  # (7 - 1) / 2
    assert len(server) == 3  # theta and the last two models


def test_fedhbm_by_hand() -> None:
    fedhbm = make_algorithm("fedhbm", beta=1.0, tau_i="actual")
    theta, memory = {"theta": torch.tensor([3.0])}, fedhbm.init_client(torch.tensor([9.0]))

    def direction(w: float, t: int) -> float:
        return fedhbm.direction(torch.tensor([w]), lambda _: torch.tensor([1.0]), theta, memory, context(t)).item()

    assert direction(2.0, t=4) == 1  # no memory, no momentum
    message, memory = fedhbm.report(Path(torch.tensor([3.0]), torch.tensor([2.5])), theta, memory, context(4))
    assert message["delta"].item() == 0.5
    assert direction(2.0, t=9) == pytest.approx(1 + (2.5 - 2.0) / (5 * 0.5 * 4))
