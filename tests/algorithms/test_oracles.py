"""Each algorithm against its formula written a second time: over 25 rounds of a small network on uneven clients,
with partial participation, unequal steps, weight decay and a server learning rate that is not one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from keel.client import LocalWork
from keel.randomness import draws
from keel.rounds import Training
from tests.algorithms import naive
from tests.conftest import uneven_training

CASES: list[tuple[dict[str, Any], Callable[[naive.World], naive.Layers]]] = [
    ({"name": "fedavg"}, naive.fedavg),
    ({"name": "fedavgm", "beta": 0.7}, lambda w: naive.fedavgm(w, 0.7)),
    ({"name": "ghbm", "beta": 0.8, "tau": 3}, lambda w: naive.ghbm(w, 0.8, 3)),
    ({"name": "ghbm"}, lambda w: naive.ghbm(w, 0.9, 2)),
    ({"name": "localghbm"}, lambda w: naive.localghbm(w, 0.9, "expected")),
    ({"name": "localghbm", "tau_i": "actual"}, lambda w: naive.localghbm(w, 0.9, "actual")),
    ({"name": "fedhbm"}, lambda w: naive.fedhbm(w, 1.0, "expected", "own")),
    ({"name": "fedhbm", "tau_i": "actual", "beta": 0.9}, lambda w: naive.fedhbm(w, 0.9, "actual", "own")),
    ({"name": "fedhbm", "anchor": "shared_init"}, lambda w: naive.fedhbm(w, 1.0, "expected", "shared_init")),
]


def world_of(training: Training) -> naive.World:
    """What the training was given, for the naive side: who takes part when, with which minibatches."""
    spec, data = training.spec, training.task.data
    local = spec.local
    work = LocalWork(local.epochs, local.steps, local.batch, local.drop_last, 0.0, None)
    rounds = []
    for t in range(1, spec.rounds + 1):
        cohort = training.sampler.cohort(t).tolist()
        total = sum(len(data.client(c)) for c in cohort)
        turns = []
        for client in cohort:
            held = data.client(client)
            batches = work.minibatches(len(held), draws(spec.seed, "minibatches", t, client))
            pairs = [(held.inputs[b], held.targets[b]) for b in batches]
            turns.append(naive.Turn(client, len(held) / total, pairs))
        rounds.append(turns)
    theta0 = [p.detach().clone() for p in training.task.module.parameters()]
    clients = data.partition.clients
    return naive.World(theta0, rounds, local.lr, spec.server.lr, local.weight_decay, clients, training.sampler.period)


@pytest.mark.parametrize("engine", ["serial", "cohort"])
@pytest.mark.parametrize(("algorithm", "oracle"), CASES, ids=lambda case: str(case) if isinstance(case, dict) else "")
def test_the_algorithm_is_its_formula(algorithm: dict[str, Any], oracle: Any, engine: str) -> None:
    training = uneven_training({"algorithm": algorithm, "server": {"lr": 0.9}, "engine": {"name": engine}})
    position = training.start()
    assert training.run(position, []) == "finished"
    expected = torch.cat([layer.reshape(-1) for layer in oracle(world_of(training))])
    moved = (expected - training.initial).norm()
    assert moved > 0.5  # the comparison is of models that went somewhere
    torch.testing.assert_close(position.server["theta"], expected, rtol=1e-4, atol=1e-5)
