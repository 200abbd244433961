"""Every algorithm against a reference implementation of its update rule (naive.py).

A small network on uneven clients, with partial participation, unequal numbers of steps, weight decay, a server learning
rate below one and, in the serial engine, a local learning rate that decreases.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from keel.algorithms import REGISTRY
from keel.core.client import LocalTraining
from keel.core.loop import Loop
from keel.core.randomness import keyed_rng
from tests.algorithms import naive
from tests.conftest import uneven_loop

CASES: list[tuple[dict[str, Any], Callable[[naive.Problem], naive.Layers]]] = [
    ({"name": "fedavg"}, naive.fedavg),
    ({"name": "fedavgm", "beta": 0.7}, lambda p: naive.fedavgm(p, 0.7)),
    ({"name": "ghbm", "beta": 0.8, "tau": 3}, lambda p: naive.ghbm(p, 0.8, 3)),
    ({"name": "ghbm"}, lambda p: naive.ghbm(p, 0.9, 2)),
    ({"name": "ghbm_lookahead"}, lambda p: naive.ghbm_lookahead(p, 0.9, 2, 0.5, 0.0)),
    (
        {"name": "ghbm_lookahead", "beta": 0.7, "tau": 3, "lookahead": 1.0, "mu": 0.2},
        lambda p: naive.ghbm_lookahead(p, 0.7, 3, 1.0, 0.2),
    ),
    ({"name": "localghbm"}, lambda p: naive.localghbm(p, 0.9, "actual")),
    ({"name": "localghbm", "tau_i": "expected"}, lambda p: naive.localghbm(p, 0.9, "expected")),
    ({"name": "fedhbm"}, lambda p: naive.fedhbm(p, 1.0, "actual", "own")),
    ({"name": "fedhbm", "tau_i": "expected", "beta": 0.9}, lambda p: naive.fedhbm(p, 0.9, "expected", "own")),
    ({"name": "fedprox", "mu": 0.3}, lambda p: naive.fedprox(p, 0.3)),
    ({"name": "scaffold"}, lambda p: naive.scaffold(p)),
    ({"name": "scaffold", "option": 1}, lambda p: naive.scaffold(p, option=1)),
    ({"name": "scaffold_m", "beta": 0.4}, lambda p: naive.scaffold(p, beta=0.4)),
    ({"name": "feddyn", "alpha": 0.05}, lambda p: naive.feddyn(p, 0.05)),
    ({"name": "adabest", "mu": 0.1, "beta": 0.6}, lambda p: naive.adabest(p, 0.1, 0.6)),
    ({"name": "mime"}, lambda p: naive.mime(p)),
    ({"name": "mimemom", "beta": 0.6}, lambda p: naive.mime(p, 0.6)),
    ({"name": "mimemom", "beta": 0.6, "form": "sum"}, lambda p: naive.mime(p, 0.6, 1.0)),
    ({"name": "mimelitemom", "beta": 0.6}, lambda p: naive.mimelitemom(p, 0.6)),
    ({"name": "mimelitemom", "beta": 0.6, "form": "sum"}, lambda p: naive.mimelitemom(p, 0.6, 1.0)),
    ({"name": "fedacg", "lambda_": 0.7, "beta": 0.1}, lambda p: naive.fedacg(p, 0.7, 0.1, p.server_lr)),
    ({"name": "fedacg", "lambda_": 0.7, "beta": 0.1, "lookahead": "full"}, lambda p: naive.fedacg(p, 0.7, 0.1, 1.0)),
    ({"name": "fedcm", "alpha": 0.4}, lambda p: naive.fedcm(p, 0.4)),
    ({"name": "fedadc", "beta": 0.6}, lambda p: naive.fedadc(p, 0.6, False)),
    ({"name": "fedadc", "beta": 0.6, "nesterov": True}, lambda p: naive.fedadc(p, 0.6, True)),
    ({"name": "ghbm_theory", "beta": 0.3}, lambda p: naive.ghbm_theory(p, 0.3, 2)),
    ({"name": "ghbm_theory", "beta": 0.3, "tau": 3}, lambda p: naive.ghbm_theory(p, 0.3, 3)),
    ({"name": "fedadam", "epsilon": 0.1}, lambda p: naive.fedopt(p, "adam", 0.9, 0.99, 0.1)),
    ({"name": "fedyogi", "epsilon": 0.1}, lambda p: naive.fedopt(p, "yogi", 0.9, 0.99, 0.1)),
    ({"name": "fedadagrad", "epsilon": 0.1}, lambda p: naive.fedopt(p, "adagrad", 0.0, 0.99, 0.1)),
    ({"name": "centralized"}, lambda p: naive.centralized(p, 0.9)),
    ({"name": "fedhbm", "anchor": "shared_init"}, lambda p: naive.fedhbm(p, 1.0, "actual", "shared_init")),
]

SETTINGS: dict[str, dict[str, Any]] = {
    # The steps of adaptive servers are about as long as their learning rate, and momentum multiplies those of SGD.
    # Smaller rates keep training from becoming chaotic, where rounding errors would grow.
    **{name: {"server": {"lr": 0.15}} for name in ("fedadam", "fedyogi", "fedadagrad")},
    "centralized": {"local": {"lr": 0.02}},
}
ROUNDS = 10


def local_training(loop: Loop) -> LocalTraining:
    """The local training of a client, whichever engine runs it."""
    engine: Any = loop.engine
    return getattr(engine, "engine", engine).local


def problem_of(loop: Loop) -> naive.Problem:
    """The cohorts, minibatches and settings of a loop, for the reference implementation."""
    settings, data, local = loop.settings, loop.task.data, local_training(loop)
    lr, total_rounds = settings.local_lr, settings.rounds
    rounds = []
    for t in range(1, total_rounds + 1):
        numbers = loop.sampler.cohort(t).tolist()
        total = sum(len(data.client(number)) for number in numbers)
        cohort = []
        for client in numbers:
            examples = data.client(client)
            batches = local.config.minibatches(len(examples), keyed_rng(local.seed, "minibatches", t, client))
            pairs = [(examples.inputs[b], examples.targets[b]) for b in batches]
            local_lr = lr.initial * (1 - (t - 1) / total_rounds) if lr.schedule == "linear" else lr.initial
            cohort.append(naive.Client(client, len(examples) / total, pairs, local_lr))
        rounds.append(cohort)
    theta0 = [p.detach().clone() for p in loop.task.module.parameters()]
    clients = data.partition.clients
    return naive.Problem(
        theta0,
        rounds,
        settings.server_lr.initial,
        local.optimizer.weight_decay,  # type: ignore[attr-defined]
        clients,
        loop.sampler.period,
        {c: (data.client(c).inputs, data.client(c).targets) for c in range(clients)},
    )


@pytest.mark.parametrize("engine", ["serial", "cohort"])
@pytest.mark.parametrize(
    ("algorithm", "reference"), CASES, ids=lambda case: str(case) if isinstance(case, dict) else ""
)
def test_the_algorithm_equals_its_reference(algorithm: dict[str, Any], reference: Any, engine: str) -> None:
    settings = SETTINGS.get(algorithm["name"], {"server": {"lr": 0.9}})
    local = {**settings.get("local", {}), "schedule": "linear" if engine == "serial" else "constant"}
    table = {"algorithm": algorithm, "rounds": ROUNDS, "engine": {"name": engine, "workers": 1}}
    loop = uneven_loop({**table, **settings, "local": local})
    state = loop.start()
    assert loop.run(state) == "finished"
    expected = torch.cat([layer.reshape(-1) for layer in reference(problem_of(loop))])
    assert (expected - loop.initial).norm() > 0.3  # far from the initial model, so that the comparison means something
    torch.testing.assert_close(state.server["theta"], expected, rtol=1e-4, atol=1e-5)


def test_every_algorithm_has_a_reference() -> None:
    from tests.algorithms import (  # which import this module
        test_oracles_adaptive,
        test_oracles_averaging,
        test_oracles_personal,
    )

    cases = [*CASES, *test_oracles_averaging.CASES, *test_oracles_adaptive.CASES, *test_oracles_personal.CASES]
    assert {case["name"] for case, *_ in cases} == set(REGISTRY)


@pytest.mark.parametrize(
    ("algorithm", "server_name", "client_name"),
    [
        ({"name": "scaffold"}, "c", "c"),
        ({"name": "scaffold_m"}, "c", "c"),
        ({"name": "feddyn", "alpha": 0.1}, "h", "g"),
    ],
    ids=str,
)
@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_the_servers_control_variate_is_the_mean_over_the_clients(
    algorithm: dict[str, Any], server_name: str, client_name: str, weighting: str
) -> None:
    loop = uneven_loop({"algorithm": algorithm, "rounds": ROUNDS, "server": {"weighting": weighting}})
    state = loop.start()
    loop.run(state)
    sizes = loop.task.data.partition.sizes
    shares = sizes / sizes.sum() if weighting == "examples" else [1 / 6] * 6
    mean = sum(shares[client] * client_state[client_name] for client, client_state in state.clients.items())
    assert mean.norm() > 1e-3
    torch.testing.assert_close(state.server[server_name], mean, rtol=1e-3, atol=1e-5)
