"""Each algorithm against its formula written a second time: over 25 rounds of a small network on uneven clients,
with partial participation, unequal steps, weight decay, a server learning rate that is not one and, in the serial
engine, a local one that falls."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from keel.algorithms import REGISTRY
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
    ({"name": "fedprox", "mu": 0.3}, lambda w: naive.fedprox(w, 0.3)),
    ({"name": "scaffold"}, lambda w: naive.scaffold(w)),
    ({"name": "scaffold", "option": 1}, lambda w: naive.scaffold(w, option=1)),
    ({"name": "scaffold_m", "beta": 0.4}, lambda w: naive.scaffold(w, beta=0.4)),
    ({"name": "feddyn", "alpha": 0.05}, lambda w: naive.feddyn(w, 0.05)),
    ({"name": "adabest", "mu": 0.1, "beta": 0.6}, lambda w: naive.adabest(w, 0.1, 0.6)),
    ({"name": "mime"}, lambda w: naive.mime(w)),
    ({"name": "mimemom", "beta": 0.6}, lambda w: naive.mime(w, 0.6)),
    ({"name": "mimelitemom", "beta": 0.6}, lambda w: naive.mimelitemom(w, 0.6)),
    ({"name": "fedacg", "lambda_": 0.7, "beta": 0.1}, lambda w: naive.fedacg(w, 0.7, 0.1)),
    ({"name": "fedcm", "alpha": 0.4}, lambda w: naive.fedcm(w, 0.4)),
    ({"name": "fedadc", "beta": 0.6}, lambda w: naive.fedadc(w, 0.6, False)),
    ({"name": "fedadc", "beta": 0.6, "nesterov": True}, lambda w: naive.fedadc(w, 0.6, True)),
    ({"name": "ghbm_theory", "beta": 0.3}, lambda w: naive.ghbm_theory(w, 0.3, 2)),
    ({"name": "ghbm_theory", "beta": 0.3, "tau": 3}, lambda w: naive.ghbm_theory(w, 0.3, 3)),
    ({"name": "fedadam", "epsilon": 0.1}, lambda w: naive.fedopt(w, "adam", 0.9, 0.99, 0.1)),
    ({"name": "fedyogi", "epsilon": 0.1}, lambda w: naive.fedopt(w, "yogi", 0.9, 0.99, 0.1)),
    ({"name": "fedadagrad", "epsilon": 0.1}, lambda w: naive.fedopt(w, "adagrad", 0.0, 0.99, 0.1)),
    ({"name": "centralized"}, lambda w: naive.centralized(w, 0.9)),
    ({"name": "fedhbm", "anchor": "shared_init"}, lambda w: naive.fedhbm(w, 1.0, "expected", "shared_init")),
]

SETTINGS: dict[str, dict[str, Any]] = {
    # Adaptive servers take steps of about their rate, and SGD with momentum larger ones than its rate: calmer here,
    # since training that is chaotic makes anything of rounding.
    **{name: {"server": {"lr": 0.1}} for name in ("fedadam", "fedyogi", "fedadagrad")},
    "centralized": {"local": {"lr": 0.02}},
}


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
            rate = local.lr * (1 - (t - 1) / spec.rounds) if local.schedule == "linear" else local.lr
            turns.append(naive.Turn(client, len(held) / total, pairs, rate))
        rounds.append(turns)
    theta0 = [p.detach().clone() for p in training.task.module.parameters()]
    clients = data.partition.clients
    return naive.World(
        theta0,
        rounds,
        spec.server.lr,
        local.weight_decay,
        clients,
        training.sampler.period,
        {c: (data.client(c).inputs, data.client(c).targets) for c in range(clients)},
    )


@pytest.mark.parametrize("engine", ["serial", "cohort"])
@pytest.mark.parametrize(("algorithm", "oracle"), CASES, ids=lambda case: str(case) if isinstance(case, dict) else "")
def test_the_algorithm_is_its_formula(algorithm: dict[str, Any], oracle: Any, engine: str) -> None:
    setting = SETTINGS.get(algorithm["name"], {"server": {"lr": 0.9}})
    local = {**setting.get("local", {}), "schedule": "linear" if engine == "serial" else "constant"}
    training = uneven_training({"algorithm": algorithm, **setting, "local": local, "engine": {"name": engine}})
    position = training.start()
    assert training.run(position, []) == "finished"
    expected = torch.cat([layer.reshape(-1) for layer in oracle(world_of(training))])
    moved = (expected - training.initial).norm()
    assert moved > 0.3  # the comparison is of models that went somewhere
    torch.testing.assert_close(position.server["theta"], expected, rtol=1e-4, atol=1e-5)


def test_every_algorithm_has_an_oracle() -> None:
    assert {case["name"] for case, _ in CASES} == set(REGISTRY)


@pytest.mark.parametrize(
    ("algorithm", "state", "memory"),
    [
        ({"name": "scaffold"}, "c", "c"),
        ({"name": "scaffold_m"}, "c", "c"),
        ({"name": "feddyn", "alpha": 0.1}, "h", "g"),
    ],
    ids=str,
)
@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_the_servers_control_is_the_mean_of_the_clients(
    algorithm: dict[str, Any], state: str, memory: str, weighting: str
) -> None:
    training = uneven_training({"algorithm": algorithm, "server": {"weighting": weighting}})
    position = training.start()
    training.run(position, [])
    sizes = training.task.data.partition.sizes
    shares = sizes / sizes.sum() if weighting == "examples" else [1 / 6] * 6
    mean = sum(shares[client] * kept[memory] for client, kept in position.memories.items())
    assert mean.norm() > 1e-3
    torch.testing.assert_close(position.server[state], mean, rtol=1e-3, atol=1e-5)
