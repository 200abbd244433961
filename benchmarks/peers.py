"""Measures other frameworks on the workloads of workloads.py, with FedAvg.

    pip install -r benchmarks/requirements.txt -c constraints.txt
    python benchmarks/peers.py flower digits     # prints one JSON object: {"seconds": ..., "start": ...}

    flower         Flower's simulation on Ray, one single-threaded actor per core
    flower-legacy  the same with start_simulation, which is deprecated but does not poll for messages
    pfl            pfl-research in one process, with one thread per core; with one thread for small models
    pfl-processes  pfl-research under torchrun, one single-threaded process per core

Each framework takes the same number of steps on the same shapes, which is checked. The first round is not timed,
because workers start and create their data in it. The time by which it exceeds the fastest round counts as start-up.
"""

import os
import time

os.environ.setdefault("PEERS_BEGAN", str(time.time()))  # kept when this script runs itself under torchrun
os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0")

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import cache
from itertools import pairwise
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from workloads import WORKLOADS, Workload

from keel.core.examples import FederatedData
from keel.engines import cores

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.serverapp import Grid

LR = 0.01
RESOURCES = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}


def rounds_of(work: Workload) -> int:
    """The number of rounds: the first, which is not timed, and the timed ones."""
    return 1 + min(work.rounds, int(os.environ.get("PEERS_ROUNDS", "20")))


def summary(stamps: list[float]) -> dict[str, float]:
    """The median seconds per round and the start-up, from the times at which training began and each round ended."""
    seconds = [after - before for before, after in pairwise(stamps[1:])]
    return {"seconds": median(seconds), "start": stamps[1] - min(seconds) - float(os.environ["PEERS_BEGAN"])}


def verify(work: Workload, steps: int, before: list[Tensor], after: list[Tensor]) -> None:
    """Exit with an error unless the framework has taken all steps and changed every parameter."""
    expected = rounds_of(work) * work.cohort * work.steps
    if steps != expected:
        raise SystemExit(f"{expected} steps were expected (got {steps})")
    if any(torch.equal(*pair) or not pair[1].isfinite().all() for pair in zip(before, after, strict=True)):
        raise SystemExit("a parameter has not changed, or is not finite")


def flower(name: str) -> dict[str, float]:
    from flwr.app import ArrayRecord, ConfigRecord
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    work, stamps, results = WORKLOADS[name], [], []
    initial = work.user_class().state_dict()
    server, client = ServerApp(), ClientApp()
    client.train()(flower_client)

    def stamp(server_round: int, arrays: "ArrayRecord") -> None:
        stamps.append(time.time())

    @server.main()
    def serve(grid: "Grid", context: "Context") -> None:
        strategy = FedAvg(
            fraction_train=work.cohort / work.clients,
            fraction_evaluate=0.0,
            min_train_nodes=work.cohort,
            min_available_nodes=work.clients,
            train_metrics_aggr_fn=flower_steps,
        )
        arrays, config = ArrayRecord(initial), ConfigRecord({"workload": name})
        results.append(strategy.start(grid, arrays, rounds_of(work), train_config=config, evaluate_fn=stamp))

    with ray_arguments() as ray_init:
        run_simulation(server, client, work.clients, backend_config={"init_args": ray_init, **RESOURCES})
    steps = sum(metrics["steps"] for metrics in results[0].train_metrics_clientapp.values())
    verify(work, steps, list(initial.values()), list(results[0].arrays.to_torch_state_dict().values()))
    return summary(stamps)


def flower_steps(replies: "list[RecordDict]", weighted_by: str) -> "MetricRecord":
    from flwr.app import MetricRecord

    return MetricRecord({"steps": sum(reply["metrics"]["steps"] for reply in replies)})


def flower_client(message: "Message", context: "Context") -> "Message":
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    name = message.content["config"]["workload"]
    module, _ = flower_actor(name)
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    examples, steps = flower_training(name, context)
    metrics = MetricRecord({"num-examples": examples, "steps": steps})
    return Message(RecordDict({"arrays": ArrayRecord(module.state_dict()), "metrics": metrics}), reply_to=message)


def flower_legacy(name: str) -> dict[str, float]:
    import ray
    from flwr.common import ndarrays_to_parameters
    from flwr.server import ServerConfig
    from flwr.server.strategy import FedAvg
    from flwr.simulation import start_simulation

    work, stamps, models = WORKLOADS[name], [], []

    def stamp(server_round: int, arrays: list[np.ndarray], config: dict[str, Any]) -> None:
        stamps.append(time.time())
        models[1:] = [arrays]

    models.append([value.numpy() for value in work.user_class().state_dict().values()])
    strategy = FedAvg(
        fraction_fit=work.cohort / work.clients,
        fraction_evaluate=0.0,
        min_fit_clients=work.cohort,
        min_available_clients=work.clients,
        evaluate_fn=stamp,
        on_fit_config_fn=lambda server_round: {"workload": name},
        initial_parameters=ndarrays_to_parameters(models[0]),
        fit_metrics_aggregation_fn=lambda replies: {"steps": sum(metrics["steps"] for _, metrics in replies)},
    )
    with ray_arguments() as ray_init:
        history = start_simulation(
            client_fn=flower_legacy_client,
            num_clients=work.clients,
            config=ServerConfig(num_rounds=rounds_of(work)),
            strategy=strategy,
            ray_init_args={**ray_init, "include_dashboard": False},
            **RESOURCES,
        )
        ray.shutdown()
    steps = sum(steps for _, steps in history.metrics_distributed_fit["steps"])
    verify(work, steps, *([torch.from_numpy(array) for array in arrays] for arrays in models))
    return summary(stamps)


def flower_legacy_client(context: "Context") -> Any:
    from flwr.client import NumPyClient

    class Client(NumPyClient):
        def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> tuple[list[np.ndarray], int, dict]:
            module, _ = flower_actor(config["workload"])
            state = module.state_dict()
            module.load_state_dict(dict(zip(state, map(torch.from_numpy, parameters), strict=True)))
            examples, steps = flower_training(config["workload"], context)
            return [value.numpy() for value in state.values()], examples, {"steps": steps}

    return Client().to_client()


@cache
def flower_actor(name: str) -> tuple[nn.Module, FederatedData]:
    """The model and the data of an actor, created once."""
    torch.set_num_threads(1)
    return WORKLOADS[name].user_class(), WORKLOADS[name].data()


def flower_training(name: str, context: "Context") -> tuple[int, int]:
    """Train the actor's model on a client's examples; return the number of examples and of steps."""
    module, data = flower_actor(name)
    examples = data.client(int(context.node_config["partition-id"]))
    inputs, steps = data.transform(examples.inputs), 0
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    for batch in torch.randperm(len(examples)).split(WORKLOADS[name].batch):
        optimizer.zero_grad()
        cross_entropy(module(inputs[batch]), examples.targets[batch]).backward()
        optimizer.step()
        steps += 1
    return len(examples), steps


@contextmanager
def ray_arguments() -> Iterator[dict[str, Any]]:
    """The arguments of ray.init: one client per core, and a temporary folder for Ray's files."""
    with TemporaryDirectory(prefix="ray-") as folder:
        yield {"num_cpus": cores(), "_temp_dir": folder, "log_to_driver": False}


class Counted(nn.Module):
    """A model with the interface of pfl that counts its steps."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.steps = inner, 0

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self.steps += 1
        return cross_entropy(self.inner(inputs), targets)

    def metrics(self, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
        """A metric that costs next to nothing: pfl always evaluates in the first round."""
        from pfl.metrics import Weighted

        return {"examples": Weighted.from_unweighted(len(inputs))}


def pfl_process(name: str) -> dict[str, float]:
    torch.set_num_threads(1 if not WORKLOADS[name].heavy else cores())
    return pfl(name)


def pfl(name: str) -> dict[str, float]:
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    work, stamps = WORKLOADS[name], []
    np.random.seed(0)  # noqa: NPY002  pfl's processes sample users from it
    module = Counted(work.user_class())
    before = [parameter.detach().clone() for parameter in module.parameters()]
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    users = pfl_users(work)
    FederatedAveraging().run(
        NNAlgorithmParams(rounds_of(work), rounds_of(work), work.cohort, 0),
        SimulatedBackend(users, users),
        model,
        NNTrainHyperParams(work.batch, local_num_epochs=1, local_learning_rate=LR),
        callbacks=[pfl_stamps(stamps)],
        send_metrics_to_platform=False,
    )
    verify(work, pfl_steps(module), before, list(module.parameters()))
    return summary(stamps)


def pfl_users(work: Workload) -> Any:
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler

    data = work.data()

    def user(client: int) -> PyTorchTensorDataset:
        examples = data.client(client)
        return PyTorchTensorDataset((data.transform(examples.inputs), examples.targets), user_id=str(client))

    return FederatedDataset(user, get_user_sampler("minimize_reuse", range(work.clients)))


def pfl_stamps(stamps: list[float]) -> Any:
    from pfl.callback.base import TrainingProcessCallback
    from pfl.metrics import Metrics

    class Stamps(TrainingProcessCallback):
        def on_train_begin(self, *, model: Any) -> Metrics:
            stamps.append(time.time())
            return Metrics()

        def after_central_iteration(self, metrics: Metrics, model: Any, *, central_iteration: int) -> Any:
            stamps.append(time.time())
            return False, Metrics()

    return Stamps()


def pfl_steps(module: Counted) -> int:
    """The steps of all processes."""
    steps = torch.tensor(module.steps)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(steps)
        torch.distributed.destroy_process_group()
    return int(steps)


def pfl_processes(name: str) -> dict[str, float]:
    """Run this script under torchrun, whose processes call this function again and run pfl."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        torch.set_num_threads(1)
        return pfl(name)
    with TemporaryDirectory(prefix="torchrun-") as folder:
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={cores()}", f"--log-dir={folder}"]
        command = [
            sys.executable,
            "-m",
            *torchrun,
            __file__,
            "pfl-processes",
            name,
            "--rounds",
            os.environ["PEERS_ROUNDS"],
        ]
        return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


PEERS: dict[str, Callable[[str], dict[str, float]]] = {
    "flower": flower,
    "flower-legacy": flower_legacy,
    "pfl": pfl_process,
    "pfl-processes": pfl_processes,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--rounds", type=int, default=20, help="time at most so many rounds")
    arguments = parser.parse_args()
    os.environ["PEERS_ROUNDS"] = str(min(arguments.rounds, 20))  # for the processes that it starts
    with redirect_stdout(sys.stderr):
        measured = PEERS[arguments.peer](arguments.workload)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps({key: round(value, 5) for key, value in measured.items()}))


if __name__ == "__main__":
    import peers  # as a module, so that Ray's workers import its functions instead of unpickling them

    peers.main()
