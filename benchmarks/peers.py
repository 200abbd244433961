"""Seconds per round of other frameworks on the FedAvg workloads of workloads.py.

    pip install -r benchmarks/requirements.txt -c constraints.txt
    python benchmarks/peers.py flower digits     # prints {"seconds": ..., "start": ...} and nothing else

    flower         Flower's simulation with Ray, an actor of one thread per core
    flower-legacy  the same by start_simulation, which Flower advises against but which polls for no messages
    pfl            pfl-research in one process, with a thread per core but for the MLP, which gains nothing from them
    pfl-processes  pfl-research under torchrun, a process of one thread per core

Each peer takes the same number of steps on the same shapes, which is checked. The first round is not timed: in it the
workers start and make their data. What it takes beyond the fastest counts as start.
"""

import os
import time

os.environ.setdefault("PEERS_BEGAN", str(time.time()))  # kept when this script starts itself anew
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

from keel.data.federated import FederatedData
from keel.engines import cores

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.serverapp import Grid

LR = 0.01
RESOURCES = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}


def rounds_of(work: Workload) -> int:
    """One that is not timed, and those that are: one where a round takes seconds."""
    return 1 + min(work.rounds, 20)


def summary(stamps: list[float]) -> dict[str, float]:
    """Of the times at which training began and each of its rounds ended."""
    seconds = [after - before for before, after in pairwise(stamps[1:])]
    return {"seconds": median(seconds), "start": stamps[1] - min(seconds) - float(os.environ["PEERS_BEGAN"])}


def verify(work: Workload, steps: int, before: list[Tensor], after: list[Tensor]) -> None:
    """The peer has done the work that it is timed for."""
    expected = rounds_of(work) * work.cohort * work.steps
    if steps != expected:
        raise SystemExit(f"{steps} steps were taken, not {expected}")
    if any(torch.equal(*pair) or not pair[1].isfinite().all() for pair in zip(before, after, strict=True)):
        raise SystemExit("a parameter has not changed, or is no longer finite")


def flower(name: str) -> dict[str, float]:
    from flwr.app import ArrayRecord, ConfigRecord
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    work, stamps, results = WORKLOADS[name], [], []
    initial = work.published().state_dict()
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

    models.append([value.numpy() for value in work.published().state_dict().values()])
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
    """What an actor makes once and keeps."""
    torch.set_num_threads(1)
    return WORKLOADS[name].published(), WORKLOADS[name].data()


def flower_training(name: str, context: "Context") -> tuple[int, int]:
    """Trains the actor's model on a client's examples; their number, and that of the steps."""
    module, data = flower_actor(name)
    held = data.client(int(context.node_config["partition-id"]))
    inputs, steps = data.prepare(held.inputs), 0
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    for batch in torch.randperm(len(held)).split(WORKLOADS[name].batch):
        optimizer.zero_grad()
        cross_entropy(module(inputs[batch]), held.targets[batch]).backward()
        optimizer.step()
        steps += 1
    return len(held), steps


@contextmanager
def ray_arguments() -> Iterator[dict[str, Any]]:
    """Ray with a client per core, whose files go when it ends."""
    with TemporaryDirectory(prefix="ray-") as folder:
        yield {"num_cpus": cores(), "_temp_dir": folder, "log_to_driver": False}


class Counted(nn.Module):
    """A model as pfl takes it, which counts its steps."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.steps = inner, 0

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self.steps += 1
        return cross_entropy(self.inner(inputs), targets)

    def metrics(self, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
        """As little as can be: pfl evaluates in the first round, asked or not."""
        from pfl.metrics import Weighted

        return {"examples": Weighted.from_unweighted(len(inputs))}


def pfl_process(name: str) -> dict[str, float]:
    torch.set_num_threads(1 if WORKLOADS[name].model == "mlp" else cores())
    return pfl(name)


def pfl(name: str) -> dict[str, float]:
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    work, stamps = WORKLOADS[name], []
    np.random.seed(0)  # noqa: NPY002  pfl's processes draw the same users from it
    module = Counted(work.published())
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
        held = data.client(client)
        return PyTorchTensorDataset((data.prepare(held.inputs), held.targets), user_id=str(client))

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
    """Of all the processes."""
    steps = torch.tensor(module.steps)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(steps)
        torch.distributed.destroy_process_group()
    return int(steps)


def pfl_processes(name: str) -> dict[str, float]:
    """This script under torchrun, where it comes here once more and is pfl."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        torch.set_num_threads(1)
        return pfl(name)
    with TemporaryDirectory(prefix="torchrun-") as folder:
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={cores()}", f"--log-dir={folder}"]
        command = [sys.executable, "-m", *torchrun, __file__, "pfl-processes", name]
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
    arguments = parser.parse_args()
    with redirect_stdout(sys.stderr):
        found = PEERS[arguments.peer](arguments.workload)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps({key: round(value, 5) for key, value in found.items()}))


if __name__ == "__main__":
    import peers  # by its own name, so that Ray's workers import its functions and need not be sent them

    peers.main()
