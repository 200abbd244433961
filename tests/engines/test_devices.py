"""What can be told of devices without having one: on "meta", tensors have no values but mixing devices is an error."""

import numpy as np
import pytest
import torch
from torch import nn

from keel import KeelError
from keel.algorithms import Algorithm
from keel.data.federated import Examples, FederatedData, Partition
from keel.devices import find_device
from keel.engines import Problem, choose, cohort, make_engine, serial
from keel.engines.base import RoundWork
from keel.models import build
from keel.rounds import Training
from keel.runs.spec import make_spec
from keel.task import Task, make_task, per_example_cross_entropy
from tests.conftest import small_network, uneven_data, uneven_training
from tests.contract.test_contract import every_algorithm

META = torch.device("meta")


@every_algorithm
@pytest.mark.parametrize("module", [serial, cohort])
def test_a_client_computes_on_one_device(cls: type[Algorithm], module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CPU", META)  # nothing is brought back: there is nothing to bring
    engine = {serial: serial.Serial, cohort: cohort.Cohort}[module]
    training = uneven_training({"algorithm": cls(), "engine": {"name": "serial"}})
    problem = Problem(training.task, training.engine.recipe, device=META)  # type: ignore[attr-defined]
    clients = np.arange(1 if cls.pooled else 3)
    ctx, algorithm = training._context(1, clients), training.spec.algorithm
    received = algorithm.broadcast(algorithm.init_server(training.initial), ctx)
    memories = [algorithm.init_client(training.initial) for _ in clients]
    work = RoundWork(clients, received, memories, ctx, [None for _ in clients])
    there = engine(problem)
    if algorithm.probes:
        assert {message["gradient"].device for message in there.probe(work)} == {META}
        received |= dict.fromkeys(["c"], training.initial)
    for result in there.train(work):
        assert {tensor.device for tensor in [result.loss, *result.message.values()]} == {META}


def test_a_device_that_is_not_there_is_refused() -> None:
    absent = next((name for name in ("mps", "cuda") if find_device("auto").type != name), "cuda")
    with pytest.raises(KeelError, match=rf"engine.device: '{absent}' is not there; accepted here: 'auto', .*'cpu'"):
        find_device(absent)


def test_the_pool_is_of_processor_cores() -> None:
    training = uneven_training({"engine": {"name": "serial"}})
    problem = Problem(training.task, training.engine.recipe, device=META)  # type: ignore[attr-defined]
    with pytest.raises(KeelError, match=r"engine.name: 'pool' is of processor cores"):
        make_engine("pool", problem, 2)


def test_on_an_accelerator_plain_convolution_nets_are_batched_too() -> None:
    def chosen(module: nn.Module) -> str:
        return choose("auto", Task(module, uneven_data(), per_example_cross_entropy), META)

    assert chosen(build("lenet", (3, 32, 32), 10, {})) == "cohort"
    assert chosen(build("resnet20", (3, 32, 32), 10, {})) == "cohort"
    assert chosen(small_network()) == "cohort"
    assert chosen(build("char_lstm", (80,), 90, {})) == "serial"
    hooked = small_network()
    hooked.register_forward_hook(lambda module, inputs, outputs: 2 * outputs)
    assert chosen(hooked) == "serial"


@pytest.mark.parametrize("name", ["lenet", "resnet20"])
def test_convolution_nets_that_are_batched_do_what_they_do_alone(name: str) -> None:
    torch.manual_seed(0)
    examples = Examples(torch.randn(60, 3, 32, 32), torch.arange(60) % 10)
    data = FederatedData("images", examples, examples, Partition.of([np.arange(36), np.arange(36, 60)]), 10)
    module, ended = build(name, (3, 32, 32), 10, {}), []
    for engine in ("serial", "cohort"):
        spec = make_spec(
            {
                "rounds": 1,
                "local": {"epochs": 1, "batch": 16, "lr": 0.01},  # 16, 16 and 4; 16 and 8: with spectra and without
                "participation": {"rate": 1.0},
                "engine": {"name": engine},
                "data": {"name": "custom"},
                "model": {"name": "custom"},
                "evaluation": {"every": 1, "last": 1},
            }
        )
        training = Training(spec, make_task(spec, module=module, data=data))
        position = training.start()
        training.run(position, [])
        ended.append(position.server["theta"])
    moved = (ended[0] - training.initial).norm()
    assert moved > 0
    assert (ended[0] - ended[1]).norm() < 5e-3 * moved  # rounding, and where it turns a ReLU over
