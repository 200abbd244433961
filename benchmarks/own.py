"""Measures one contender on one workload: Keel, a plain PyTorch loop, or the local steps alone.

    python benchmarks/own.py keel digits         # prints one JSON object: {"seconds": ..., "start": ..., ...}

keel       FedAvg in Keel
published  Keel with the model as published (published.py)
fedhbm     Keel with FedHBM instead of FedAvg
scaffold   Keel with SCAFFOLD instead of FedAvg
compiled   Keel with engine.compile = true
limit      the local steps alone: one process per core with one thread each, tuned allocator, channels_last, the model
           as published
bare       the same with Keel's version of the model
naive      a loop over the clients as one would write it by hand

The time of `keel` relative to `bare` is the overhead of its engine; the time of `bare` relative to `limit` is what
Keel's version of the model saves.

Printed are `seconds` (the median over rounds), `start` (from the start of the process, imports included, to the first
round, plus the time by which the first round exceeds the fastest), `peak` (the peak memory of this process in MB) and
`rest` (its memory after the last round in MB).
"""

import os
import time

os.environ["OWN_BEGAN"] = str(time.time())  # before the imports that take time

import argparse
import json
import multiprocessing
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from itertools import pairwise
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from workloads import WORKLOADS, Workload

from keel.config.defaults import make_spec
from keel.engines import cores
from keel.engines.allocator import tune
from keel.runs.build import build, make_task

Repetition = Callable[[], list[float]]
"""Runs the rounds and returns the seconds of each. A first round that includes start-up is left out."""


def keel(work: Workload, algorithm: str = "fedavg", compile: bool = False, published: bool = False) -> Repetition:
    spec = make_spec(
        {
            "algorithm": {"name": algorithm},
            "rounds": work.rounds + 2,  # stopped before the last round, which evaluates
            "local": {"steps": work.steps, "batch": work.batch, "lr": 0.01},
            "server": {"lr": 1.0},
            "participation": {"rate": work.cohort / work.clients},
            "evaluation": {"every": 10**9, "last": 1},
            "engine": {"compile": compile},
            "data": {"name": "custom"},
            "model": {"name": "custom"},
        }
    )
    module = work.published() if published else work.module()
    loop = build(spec, make_task(spec, module=module, data=work.data())).loop

    def repetition() -> list[float]:
        seconds: list[float] = []
        loop.run(loop.start(), [lambda record, state, took: seconds.append(took)], lambda: len(seconds) > work.rounds)
        return seconds[1:]  # in the first round workers start, or the program is compiled

    return repetition


def naive(work: Workload) -> Repetition:
    """A loop over the clients as one would write it by hand: a deep copy and an optimiser for each."""
    module, data = work.published(), work.data()
    if work.heavy:
        torch.set_num_threads(cores())  # slower for small models

    def repetition() -> list[float]:
        stamps = []
        for _ in range(work.rounds + 1):
            copies = []
            for client in range(work.cohort):
                local, examples = deepcopy(module), data.client(client)
                inputs = data.transform(examples.inputs)
                optimizer = torch.optim.SGD(local.parameters(), lr=0.01)
                for batch in torch.randperm(len(examples)).split(work.batch):
                    optimizer.zero_grad()
                    cross_entropy(local(inputs[batch]), examples.targets[batch]).backward()
                    optimizer.step()
                copies.append(local)
            with torch.no_grad():
                for parameter, *others in zip(module.parameters(), *(c.parameters() for c in copies), strict=True):
                    parameter.copy_(torch.stack(others).mean(0))
            stamps.append(time.perf_counter())
        return [after - before for before, after in pairwise(stamps)]

    return repetition


def limit(work: Workload) -> Repetition:
    return _steps(work, work.published)


def bare(work: Workload) -> Repetition:
    return _steps(work, work.module)


def _steps(work: Workload, make: Callable[[], nn.Module]) -> Repetition:
    """Time the local steps alone, in one process per core."""

    def repetition() -> list[float]:
        fork = multiprocessing.get_context("fork")
        queue = fork.Queue()
        clients = ceil(work.cohort * work.rounds / cores())
        workers = [fork.Process(target=_train_clients, args=(work, make, clients, queue)) for _ in range(cores())]
        for worker in workers:
            worker.start()
        seconds = max(queue.get() for _ in workers)
        for worker in workers:
            worker.join()
        return [seconds / work.rounds] * work.rounds

    return repetition


def _train_clients(work: Workload, make: Callable[[], nn.Module], clients: int, queue: Any) -> None:
    torch.set_num_threads(1)
    tune()
    module, data = make(), work.data()
    examples = data.client(0)
    inputs, targets = data.transform(examples.inputs)[: work.batch], examples.targets[: work.batch]
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


CONTENDERS: dict[str, Callable[[Workload], Repetition]] = {
    "keel": keel,
    "published": partial(keel, published=True),
    "fedhbm": partial(keel, algorithm="fedhbm"),
    "scaffold": partial(keel, algorithm="scaffold"),
    "compiled": partial(keel, compile=True),
    "limit": limit,
    "bare": bare,
    "naive": naive,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("workload", choices=WORKLOADS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seconds = CONTENDERS[arguments.contender](WORKLOADS[arguments.workload])()
    measured = {"seconds": median(seconds)}
    if arguments.contender not in ("limit", "bare"):  # these have no rounds
        measured["start"] = time.time() - float(os.environ["OWN_BEGAN"]) - sum(seconds) - min(seconds)
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak, rest = (int(lines[name].split()[0]) / 1000 for name in ("VmHWM", "VmRSS"))
    print(json.dumps({**measured, "peak": peak, "rest": rest}))


if __name__ == "__main__":
    main()
