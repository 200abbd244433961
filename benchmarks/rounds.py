"""Seconds per round: Keel, a plain PyTorch loop, and the limit, measured in turns.

    make bench                                   # all workloads, a table and results/performance.json
    python benchmarks/rounds.py digits many      # some of them
    python benchmarks/rounds.py --guard          # fails where a ratio has become worse than the guard allows

The limit is what the same local steps cost with nothing around them: one process per core, one thread each, the
allocator tuned, channels_last, the model as published (ReLU before pooling). Ratios count; seconds depend on the
machine and its other work. Data are made up: the arithmetic is the same.
"""

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keel.data.federated import Examples, FederatedData, Partition
from keel.data.preparation import AsStored, Preparation, Tokens
from keel.engines import cores
from keel.engines.allocator import tune
from keel.models import build
from keel.rounds import Training
from keel.runs.spec import make_spec
from keel.task import make_task

TURNS = 3
RESULTS = Path(__file__).parents[1] / "results" / "performance.json"


@dataclass(frozen=True)
class Workload:
    """A cohort of `cohort` clients, each with `steps` minibatches of `batch`, of `clients` in all."""

    model: str
    shape: tuple[int, ...]
    classes: int
    clients: int
    cohort: int
    steps: int
    batch: int
    rounds: int
    guard: float
    """Keel's share of the limit that is not to be exceeded."""
    algorithm: str = "fedavg"

    def data(self) -> FederatedData:
        rng = np.random.default_rng(0)
        held = self.steps * self.batch
        examples = max(20_000, held) if self.clients * held > 10**7 else self.clients * held
        text = self.model.endswith("lstm")
        inputs = rng.integers(0, self.classes, (examples, *self.shape)) if text else rng.random((examples, *self.shape))
        tensor = torch.from_numpy(inputs.astype(np.uint8 if text else np.float32))
        train = Examples(tensor, torch.from_numpy(rng.integers(0, self.classes, examples)))
        indices = np.arange(self.clients * held) % examples
        partition = Partition(indices, np.arange(self.clients + 1) * held)
        prepare: Preparation = Tokens() if text else AsStored()
        return FederatedData("bench", train, train[np.arange(64)], partition, self.classes, prepare)

    def module(self) -> nn.Module:
        torch.manual_seed(0)
        return build(self.model, self.shape, self.classes, {})

    def published(self) -> nn.Module:
        """As it is in the literature."""
        if self.model != "lenet":
            return self.module()
        pooled = [nn.Conv2d(3, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 64, 5), nn.ReLU(), nn.MaxPool2d(2)]
        dense = [nn.Linear(1600, 384), nn.ReLU(), nn.Linear(384, 192), nn.ReLU(), nn.Linear(192, self.classes)]
        return nn.Sequential(*pooled, nn.Flatten(), *dense)


DIGITS: dict[str, Any] = {"model": "mlp", "shape": (64,), "classes": 10, "steps": 8, "batch": 8}
IMAGES: dict[str, Any] = {"shape": (3, 32, 32), "classes": 10, "clients": 100, "cohort": 10, "steps": 8, "batch": 64}
WORKLOADS = {
    "digits": Workload(**DIGITS, clients=100, cohort=10, rounds=40, guard=1.0),
    "many": Workload(**DIGITS, clients=1000, cohort=100, rounds=10, guard=0.7),
    "lenet": Workload("lenet", **IMAGES, rounds=1, guard=1.1),
    "lenet-fedhbm": Workload("lenet", **IMAGES, rounds=1, guard=1.2, algorithm="fedhbm"),
    "lenet-scaffold": Workload("lenet", **IMAGES, rounds=1, guard=1.2, algorithm="scaffold"),
    "resnet20": Workload("resnet20", **IMAGES, rounds=1, guard=1.15),
    "shakespeare": Workload("char_lstm", (80,), 80, 100, 10, 20, 100, rounds=1, guard=1.15),
    **{
        f"n={n:,}": Workload(**DIGITS, clients=n, cohort=10, rounds=40, guard=2.0)
        for n in (10**2, 10**3, 10**4, 10**5, 10**6)
    },
}


def keel(work: Workload) -> Callable[[], float]:
    spec = make_spec(
        {
            "algorithm": {"name": work.algorithm},
            "rounds": work.rounds + 1,
            "local": {"steps": work.steps, "batch": work.batch, "lr": 0.01},
            "server": {"lr": 1.0},
            "participation": {"rate": work.cohort / work.clients},
            "evaluation": {"every": 10**9, "last": 1},
            "data": {"name": "custom"},
            "model": {"name": "custom"},
        }
    )
    task = make_task(spec, module=work.module(), data=work.data())
    training = Training(spec, task)

    def turn() -> float:
        seconds: list[float] = []
        training.run(
            training.start(), [lambda record, position, took: seconds.append(took)], lambda: len(seconds) > work.rounds
        )
        return median(seconds[1:])  # in the first the workers start

    return turn


def naive(work: Workload) -> Callable[[], float]:
    """What one would write by hand: a deep copy, an optimiser and a loop over the clients."""
    module, data = work.published(), work.data()

    def turn() -> float:
        began = time.perf_counter()
        for _ in range(work.rounds):
            copies = []
            for client in range(work.cohort):
                local, held = deepcopy(module), data.client(client)
                inputs = data.prepare(held.inputs)
                optimizer = torch.optim.SGD(local.parameters(), lr=0.01)
                for batch in torch.randperm(len(held)).split(work.batch):
                    optimizer.zero_grad()
                    cross_entropy(local(inputs[batch]), held.targets[batch]).backward()
                    optimizer.step()
                copies.append(local)
            with torch.no_grad():
                for parameter, *others in zip(module.parameters(), *(c.parameters() for c in copies), strict=True):
                    parameter.copy_(torch.stack(others).mean(0))
        return (time.perf_counter() - began) / work.rounds

    return turn


def limit(work: Workload) -> Callable[[], float]:
    """The bare steps, one process per core."""

    def turn() -> float:
        fork = multiprocessing.get_context("fork")
        queue = fork.Queue()
        share = work.cohort * work.rounds // cores()
        workers = [fork.Process(target=_bare, args=(work, share, queue)) for _ in range(cores())]
        for worker in workers:
            worker.start()
        seconds = max(queue.get() for _ in workers)
        for worker in workers:
            worker.join()
        return seconds / work.rounds

    return turn


def _bare(work: Workload, clients: int, queue: Any) -> None:
    torch.set_num_threads(1)
    tune()
    module, data = work.published(), work.data()
    held = data.client(0)
    inputs, targets = data.prepare(held.inputs)[: work.batch], held.targets[: work.batch]
    if len(work.shape) == 3:
        module = module.to(memory_format=torch.channels_last)
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    parameters = list(module.parameters())
    _step(module, parameters, inputs, targets)
    began = time.perf_counter()
    for _ in range(clients * work.steps):
        _step(module, parameters, inputs, targets)
    queue.put(time.perf_counter() - began)


def _step(module: nn.Module, parameters: list[nn.Parameter], inputs: Tensor, targets: Tensor) -> None:
    gradients = torch.autograd.grad(cross_entropy(module(inputs), targets), parameters)
    with torch.no_grad():
        torch._foreach_add_(parameters, list(gradients), alpha=-0.01)


def measure(work: Workload, contenders: dict[str, Callable[[Workload], Callable[[], float]]]) -> dict[str, float]:
    """Medians of turns that take turns, so that what else the machine does is everybody's."""
    ready, seconds = {}, {name: [] for name in contenders}
    for name, make in contenders.items():
        began = time.perf_counter()
        ready[name] = make(work)
        if name == "keel":
            start = time.perf_counter() - began
    for _ in range(TURNS):
        for name, turn in ready.items():
            seconds[name].append(turn())
    return {**{name: median(values) for name, values in seconds.items()}, "start": start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", choices=[[], *WORKLOADS], metavar="WORKLOAD")
    parser.add_argument("--guard", action="store_true", help="fail where Keel's share of the limit is above its guard")
    arguments = parser.parse_args()
    names = arguments.workloads or list(WORKLOADS)
    torch.set_num_threads(1)
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    print(f"{'seconds a round':16} {'keel':>9} {'limit':>9} {'naive':>9} {'of limit':>9} {'of naive':>9} {'start':>7}")
    worse = []
    for name in names:
        work = WORKLOADS[name]
        found = measure(work, {"keel": keel, "limit": limit, "naive": naive})
        rows[name] = {key: round(value, 5) for key, value in found.items()}
        ratios = [found["keel"] / found["limit"], found["keel"] / found["naive"]]
        seconds = "".join(f"{found[key]:10.4f}" for key in ("keel", "limit", "naive"))
        print(f"{name:16}{seconds}{ratios[0]:10.2f}{ratios[1]:10.2f}{found['start']:8.1f}", flush=True)
        if ratios[0] > work.guard:
            worse.append(f"{name}: {ratios[0]:.2f} of the limit, above {work.guard}")
    RESULTS.write_text(json.dumps(rows, indent=2) + "\n")
    if arguments.guard and worse:
        raise SystemExit("\n".join(worse))


if __name__ == "__main__":
    main()
