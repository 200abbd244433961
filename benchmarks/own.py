"""Seconds per round of Keel, of a plain PyTorch loop, and of the limit, one of them in a process of its own.

    python benchmarks/own.py keel digits         # prints {"seconds": ..., "start": ...} and nothing else

The limit is what the same local steps cost with nothing around them: one process per core, one thread each, the
allocator tuned, channels_last, the model as published (published.py). `bare` is the same with Keel's version of the
model, so that Keel's time over `bare` is what its engine adds, and `bare` over the limit what its version saves;
`published` is Keel with the model as published. `fedhbm` and `scaffold` are Keel with these in place of FedAvg,
`compiled` is Keel with its program compiled.

Start-up is from the beginning of the process, with its imports, and what the first round takes beyond the fastest. Each
tells the peak of its own process' memory, and what is left of it after the rounds.
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

from keel.engines import cores
from keel.engines.allocator import tune
from keel.rounds import Training
from keel.runs.spec import make_spec
from keel.task import make_task

Turn = Callable[[], list[float]]
"""Runs; the seconds of its rounds, without the first where that is not like the others."""


def keel(work: Workload, algorithm: str = "fedavg", compile: bool = False, published: bool = False) -> Turn:
    spec = make_spec(
        {
            "algorithm": {"name": algorithm},
            "rounds": work.rounds + 2,  # the last, with its evaluation, is not waited for
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
    training = Training(spec, make_task(spec, module=module, data=work.data()))

    def turn() -> list[float]:
        seconds: list[float] = []
        training.run(
            training.start(), [lambda record, position, took: seconds.append(took)], lambda: len(seconds) > work.rounds
        )
        return seconds[1:]  # in the first the workers start, or the compiler works

    return turn


def naive(work: Workload) -> Turn:
    """What one would write by hand: a deep copy, an optimiser and a loop over the clients."""
    module, data = work.published(), work.data()
    if work.heavy:
        torch.set_num_threads(cores())  # small models lose by it

    def turn() -> list[float]:
        stamps = []
        for _ in range(work.rounds + 1):
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
            stamps.append(time.perf_counter())
        return [after - before for before, after in pairwise(stamps)]

    return turn


def limit(work: Workload) -> Turn:
    return _steps(work, work.published)


def bare(work: Workload) -> Turn:
    return _steps(work, work.module)


def _steps(work: Workload, make: Callable[[], nn.Module]) -> Turn:
    """The local steps alone, one process per core."""

    def turn() -> list[float]:
        fork = multiprocessing.get_context("fork")
        queue = fork.Queue()
        share = ceil(work.cohort * work.rounds / cores())
        workers = [fork.Process(target=_share, args=(work, make, share, queue)) for _ in range(cores())]
        for worker in workers:
            worker.start()
        seconds = max(queue.get() for _ in workers)
        for worker in workers:
            worker.join()
        return [seconds / work.rounds] * work.rounds

    return turn


def _share(work: Workload, make: Callable[[], nn.Module], clients: int, queue: Any) -> None:
    torch.set_num_threads(1)
    tune()
    module, data = make(), work.data()
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


CONTENDERS: dict[str, Callable[[Workload], Turn]] = {
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
    told = {"seconds": median(seconds)}
    if arguments.contender not in ("limit", "bare"):  # which have no first round
        told["start"] = time.time() - float(os.environ["OWN_BEGAN"]) - sum(seconds) - min(seconds)
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak, rest = (int(lines[name].split()[0]) / 1000 for name in ("VmHWM", "VmRSS"))
    print(json.dumps({**told, "peak": peak, "rest": rest}))


if __name__ == "__main__":
    main()
