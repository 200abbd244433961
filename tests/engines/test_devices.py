"""Devices, without an accelerator: tensors on "meta" have no values, but mixing devices raises an error."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import keel
from keel import KeelError
from keel.algorithms import REGISTRY, Algorithm
from keel.config.defaults import make_spec
from keel.core.devices import find_device
from keel.core.engine import RoundWork
from keel.core.examples import Examples, FederatedData, Partition
from keel.core.losses import per_example_cross_entropy
from keel.core.task import Task
from keel.engines import FORKS, Workload, choose, cohort, make_engine, serial
from keel.engines.pool import Pool, on_devices
from keel.models import build
from keel.runs.build import make_task
from tests.conftest import make_loop, uneven_loop

META = torch.device("meta")


@pytest.mark.parametrize("cls", REGISTRY.values(), ids=REGISTRY)
@pytest.mark.parametrize("module", [serial, cohort])
def test_a_client_computes_on_one_device(cls: type[Algorithm], module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CPU", META)  # results stay there: a meta tensor has no values to copy
    engine = {serial: serial.Serial, cohort: cohort.Cohort}[module]
    # plain SGD: whether a client's optimiser state is new is read from a number, which a meta tensor lacks
    plain = {"optimizer": "sgd", "momentum": 0.0}
    training = uneven_loop({"algorithm": cls(), "engine": {"name": "serial"}, "local": plain})
    workload = Workload(training.task, training.engine.local, device=META)  # type: ignore[attr-defined]
    clients = np.arange(1 if cls.pooled else 3)
    ctx, algorithm = training.participation.context(1, clients), training.algorithm
    received = algorithm.broadcast(algorithm.init_server(training.initial), ctx)
    states = [training.local.init_client(training.initial) for _ in clients]
    work = RoundWork(clients, received, states, ctx, [None for _ in clients])
    built = engine(workload)
    if algorithm.probes:
        assert {message["gradient"].device for message in built.probe(work)} == {META}
        received |= dict.fromkeys(["c"], training.initial)
    for result in built.train(work):
        assert {tensor.device for tensor in [result.loss, *result.message.values()]} == {META}


def test_a_device_that_is_not_available_is_refused() -> None:
    absent = next((name for name in ("mps", "cuda") if find_device("auto").type != name), "cuda")
    with pytest.raises(KeelError, match=rf"engine.device '{absent}' is not available .*; use 'auto' or .*'cpu'"):
        find_device(absent)


def test_pool_is_refused_on_an_accelerator() -> None:
    training = uneven_loop({"engine": {"name": "serial"}})
    workload = Workload(training.task, training.engine.local, device=META)  # type: ignore[attr-defined]
    with pytest.raises(
        KeelError, match=r"engine.name = 'pool' requires engine.device = 'cpu' or several GPUs \(got 'meta'\)"
    ):
        make_engine("pool", workload, 2)


@pytest.mark.skipif(not FORKS, reason="one worker per GPU needs Linux, where processes fork")
@pytest.mark.parametrize(("name", "alone"), [("pool", "serial"), ("cohort", "cohort"), ("auto", "cohort")])
def test_several_devices_share_the_clients_of_a_round(
    name: str, alone: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(engine: str) -> keel.Run:
        table = {"rounds": 2, "algorithm": {"name": "scaffold"}, "engine": {"name": engine, "workers": 8}}
        return keel.run({**table, "participation": {"rate": 0.5}}, out=tmp_path / str(len(list(tmp_path.iterdir()))))

    def watched(*arguments: Any) -> Pool:
        used.append(on_devices(*arguments))
        return used[-1]

    used: list[Pool] = []
    one = run(alone)
    monkeypatch.setattr("keel.runs.build.same_kind", lambda device: (torch.device("cpu", 0),) * 2)
    monkeypatch.setattr("keel.engines.selection.on_devices", watched)
    several = run(name)
    assert used[0].count == 2
    assert several.summary["model_sha256"] == one.summary["model_sha256"]
    assert several.accuracy == one.accuracy


@pytest.mark.skipif(not FORKS, reason="one worker per GPU needs Linux, where processes fork")
def test_an_error_on_a_device_reaches_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("keel.runs.build.same_kind", lambda device: (META,) * 2)  # which has no module to select it
    with pytest.raises(RuntimeError, match="in a worker process"):
        keel.run({"rounds": 1, "engine": {"name": "pool"}}, out=tmp_path / "run")


def test_auto_batches_plain_convolutional_networks_on_an_accelerator() -> None:
    def chosen(module: nn.Module) -> str:
        task = Task(module, images(), per_example_cross_entropy)
        return choose(Workload(task, training.engine.local, device=META)).name  # type: ignore[attr-defined]

    training = uneven_loop({"engine": {"name": "serial"}})
    assert chosen(build("lenet", (3, 32, 32), 10, {})) == "cohort"
    assert chosen(build("resnet20", (3, 32, 32), 10, {})) == "cohort"
    assert chosen(nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(3072, 10))) == "serial"


def images() -> FederatedData:
    examples = Examples(torch.randn(60, 3, 32, 32), torch.arange(60) % 10)
    return FederatedData("images", examples, examples, Partition.of([np.arange(36), np.arange(36, 60)]), 10)


@pytest.mark.parametrize("name", ["lenet", "resnet20"])
def test_batched_convolutional_networks_give_the_results_of_serial(name: str) -> None:
    torch.manual_seed(0)
    data = images()
    module, models = build(name, (3, 32, 32), 10, {}), []
    for engine in ("serial", "cohort"):
        spec = make_spec(
            {
                "rounds": 1,
                "local": {
                    "epochs": 1,
                    "batch": 16,
                    "lr": 0.01,
                },  # batches of 16, 16 and 4; 16 and 8: with Fourier convolutions and without
                "participation": {"rate": 1.0},
                "engine": {"name": engine},
                "data": {"name": "custom"},
                "model": {"name": "custom"},
                "evaluation": {"every": 1, "last": 1},
            }
        )
        training = make_loop(spec, make_task(spec, module=module, data=data))
        state = training.start()
        training.run(state, [])
        models.append(state.server["theta"])
    moved = (models[0] - training.initial).norm()
    assert moved > 0
    assert (models[0] - models[1]).norm() < 5e-3 * moved  # rounding, which can also change the sign of a ReLU's input
