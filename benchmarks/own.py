"""Measures one contender on one workload: Keel, a plain PyTorch loop, or the local steps alone.

    python benchmarks/own.py keel digits         # prints one JSON object: {"seconds": ..., "start": ..., ...}

class      FedAvg in Keel with the model as a user writes it (classes.py), through keel.run
keel       FedAvg in Keel with its own version of the model
fedhbm     Keel with FedHBM instead of FedAvg
scaffold   Keel with SCAFFOLD instead of FedAvg
compiled   `class` with engine.compile = true
serial     `class` with engine.name = "serial"
limit      the local steps alone: one process per core with one thread each, tuned allocator, channels_last, the model
           as a user writes it
naive      a loop over the clients as one would write it by hand
one        the same on one thread

Printed are `seconds` (the median over rounds), `processor` (the processor time per round of this process: compare
`serial` with `one`), `start` (from the start of the process, imports included, to the first
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
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import ceil
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from workloads import WORKLOADS, Workload

import keel
from keel.engines import cores
from keel.engines.allocator import tune

Repetition = Callable[[], list[float]]
"""Runs the rounds and returns the seconds of each. A first round that includes start-up is left out."""
PROCESSOR: list[float] = []
"""The processor time of this process after each round."""


def run_keel(work: Workload, module: nn.Module, algorithm: str = "fedavg", **engine: Any) -> Repetition:
    """Train with keel.run, as a user does."""
    spec = {
        "algorithm": {"name": algorithm},
        "rounds": work.rounds + 2,  # stopped before the last round, which evaluates
        "local": {"steps": work.steps, "batch": work.batch, "lr": 0.01},
        "server": {"lr": 1.0},
        "participation": {"rate": work.cohort / work.clients},
        "evaluation": {"every": 10**9, "last": 1},
        "engine": engine,
    }
    data = work.data()

    def repetition() -> list[float]:
        seconds: list[float] = []
        with TemporaryDirectory() as folder:
            keel.run(
                spec,
                model=module,
                data=data,
                out=Path(folder) / "run",
                hooks=[lambda record, state, took: (seconds.append(took), PROCESSOR.append(time.process_time()))],
                stop=lambda: len(seconds) > work.rounds,
            )
        return seconds[1:]  # in the first round workers start, and programs are recorded or compiled

    return repetition


def user_class(work: Workload, **engine: Any) -> Repetition:
    return run_keel(work, work.user_class(), **engine)


def built_in(work: Workload, algorithm: str = "fedavg") -> Repetition:
    return run_keel(work, work.module(), algorithm)


def naive(work: Workload, one_thread: bool = False, device: str = "cpu") -> Repetition:
    """A loop over the clients as one would write it by hand: a deep copy and an optimiser for each."""
    module, data = work.user_class().to(device), work.data()
    if work.heavy and not one_thread:
        torch.set_num_threads(cores())  # slower for small models

    def repetition() -> list[float]:
        stamps = []
        for _ in range(work.rounds + 1):
            copies = []
            for client in range(work.cohort):
                local, examples = deepcopy(module), data.client(client)
                inputs, targets = data.transform(examples.inputs).to(device), examples.targets.to(device)
                optimizer = torch.optim.SGD(local.parameters(), lr=0.01)
                for batch in torch.randperm(len(examples)).split(work.batch):
                    optimizer.zero_grad()
                    cross_entropy(local(inputs[batch]), targets[batch]).backward()
                    optimizer.step()
                copies.append(local)
            with torch.no_grad():
                for parameter, *others in zip(module.parameters(), *(c.parameters() for c in copies), strict=True):
                    parameter.copy_(torch.stack(others).mean(0))
            stamps.append(time.perf_counter())
            PROCESSOR.append(time.process_time())
        return [after - before for before, after in pairwise(stamps)]

    return repetition


def limit(work: Workload) -> Repetition:
    """Time the local steps alone, in one process per core."""

    def repetition() -> list[float]:
        fork = multiprocessing.get_context("fork")
        queue = fork.Queue()
        clients = ceil(work.cohort * work.rounds / cores())
        workers = [fork.Process(target=_train_clients, args=(work, clients, queue)) for _ in range(cores())]
        for worker in workers:
            worker.start()
        seconds = max(queue.get() for _ in workers)
        for worker in workers:
            worker.join()
        return [seconds / work.rounds] * work.rounds

    return repetition


def _train_clients(work: Workload, clients: int, queue: Any) -> None:
    torch.set_num_threads(1)
    tune()
    module, data = work.user_class(), work.data()
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


CONTENDERS: dict[str, Callable[..., Repetition]] = {
    "class": user_class,
    "keel": built_in,
    "fedhbm": partial(built_in, algorithm="fedhbm"),
    "scaffold": partial(built_in, algorithm="scaffold"),
    "compiled": partial(user_class, compile=True),
    "serial": partial(user_class, name="serial"),
    "limit": limit,
    "naive": naive,
    "one": partial(naive, one_thread=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--rounds", type=int, help="time at most so many rounds")
    parser.add_argument("--device", help="the device of `class` and `one`, such as cuda")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    work = WORKLOADS[arguments.workload]
    if arguments.rounds is not None:
        work = replace(work, rounds=min(work.rounds, arguments.rounds))
    device = {"device": arguments.device} if arguments.device else {}
    repetition = CONTENDERS[arguments.contender](work, **device)
    seconds = repetition()
    measured = {"seconds": median(seconds)}
    if arguments.contender != "limit":  # which has no rounds
        measured["processor"] = median(after - before for before, after in pairwise(PROCESSOR))
        measured["start"] = time.time() - float(os.environ["OWN_BEGAN"]) - sum(seconds) - min(seconds)
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak, rest = (int(lines[name].split()[0]) / 1000 for name in ("VmHWM", "VmRSS"))
    print(json.dumps({**measured, "peak": peak, "rest": rest}))


if __name__ == "__main__":
    main()
