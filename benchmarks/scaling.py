"""Measures the engine `ray` against `pool`, and the cost of a round for its driver.

    python benchmarks/scaling.py engines 3   # time per round of LeNet with pool and ray, 1 and 2 workers, 3 repetitions
    python benchmarks/scaling.py driver      # the driver's cost of a client, by the size of the model
    python benchmarks/scaling.py sampling    # the time to sample, order and weight a cohort, up to ten million clients

Prints one JSON object per line. Each measurement runs in a new process.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn
from workloads import WORKLOADS, Workload

from keel.config.defaults import make_spec
from keel.core.examples import Examples, FederatedData, Partition
from keel.core.loop import Loop
from keel.engines import Workload as EngineWorkload
from keel.engines.pool import Pool
from keel.engines.serial import Serial
from keel.runs.build import build, make_task

ROUNDS = 2
WIDTHS = {"5 k parameters": 500, "50 k": 5_000, "800 k": 80_000}


def make_loop(engine: dict[str, Any], module: nn.Module, data: FederatedData, cohort: int, **local: Any) -> Loop:
    spec = make_spec(
        {
            "algorithm": {"name": "fedavg"},
            "rounds": 10**6,
            "local": {"lr": 0.01, **local},
            "participation": {"rate": cohort / data.partition.clients},
            "evaluation": {"every": 10**9, "last": 1},
            "engine": engine,
            "data": {"name": "custom"},
            "model": {"name": "custom"},
        }
    )
    return build(spec, make_task(spec, module=module, data=data)).loop


def cost_of(loop: Loop, rounds: int) -> dict[str, float]:
    """The wall-clock time of a round, and the CPU time of all processes and of the driver, in seconds.

    The first round is left out, because workers start in it. Other load on the machine does not change CPU time.
    """
    wall_clock, all_cpu, driver_cpu = [], [], []

    def hook(record: Any, state: Any, seconds: float) -> None:
        wall_clock.append(seconds)
        all_cpu.append(cpu_seconds())
        driver_cpu.append(time.process_time())

    loop.run(loop.start(), [hook], lambda: len(wall_clock) > rounds)
    cpu = {"processor": (all_cpu[-1] - all_cpu[0]) / rounds, "driver": (driver_cpu[-1] - driver_cpu[0]) / rounds}
    return {"seconds": median(wall_clock[1:]), **cpu}


def cpu_seconds() -> float:
    """The CPU time of this process and its descendants."""
    family, spent = {os.getpid()}, dict[int, float]()
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):  # it has ended
                continue
            parents[int(entry.name)] = int(fields[1])
            spent[int(entry.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(spent[process] for process in family)


def lenet(name: str, workers: int) -> dict[str, Any]:
    work: Workload = WORKLOADS["lenet"]
    loop = make_loop(
        {"name": name, "workers": workers}, work.module(), work.data(), work.cohort, steps=work.steps, batch=work.batch
    )
    if name == "pool" and workers == 1:  # Keel would use `serial`, whose allocator is not tuned
        loop.engine = Pool(Serial(EngineWorkload(loop.task, loop.engine.local)), 1)  # type: ignore[attr-defined]
    return {"engine": name, "workers": workers, **cost_of(loop, ROUNDS)}


def idle_data(clients: int, inputs: int = 10) -> FederatedData:
    """One example per client, so that training takes next to no time."""
    examples = Examples(torch.rand(100, inputs), torch.arange(100) % 2)
    return FederatedData(
        "idle", examples, examples, Partition(np.arange(clients) % 100, np.arange(clients + 1)), classes=2
    )


def driver(width: int) -> dict[str, Any]:
    """The cost of a round and of a client, from rounds of 80 and of 400 clients that hardly train."""
    costs = []
    for cohort in (80, 400):
        module = nn.Sequential(nn.Linear(10, width, bias=False), nn.AvgPool1d(width // 2))
        loop = make_loop({"name": "ray", "workers": 1}, module, idle_data(400), cohort, steps=1, batch=1)
        costs.append(cost_of(loop, 5))
    few, many = costs
    client = {kind: (many[kind] - few[kind]) / 320 for kind in few}
    return {
        "parameters": loop.parameters,
        "client": client,
        "round": {kind: few[kind] - 80 * client[kind] for kind in few},
    }


def sampling(clients: int) -> dict[str, Any]:
    loop = make_loop({"name": "serial"}, nn.Linear(10, 2), idle_data(clients), clients // 100, steps=1, batch=1)
    seconds = []
    for t in range(1, 6):
        began = time.perf_counter()
        cohort = loop.participation.cohort(t)
        loop.participation.context(t, cohort)
        loop.participation.weights(cohort)
        seconds.append(time.perf_counter() - began)
    return {"clients": clients, "cohort": len(cohort), "seconds": median(seconds)}


def in_new_process(*arguments: Any) -> None:
    command = [sys.executable, __file__, "one", *map(str, arguments)]
    print(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout, end="", flush=True)


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    match sys.argv[1:]:
        case ["one", "lenet", name, workers]:
            print(json.dumps(lenet(name, int(workers))))
        case ["one", "driver", width]:
            print(json.dumps(driver(int(width))))
        case ["one", "sampling", clients]:
            print(json.dumps(sampling(int(clients))))
        case ["engines", repetitions]:
            for _ in range(int(repetitions)):
                for workers in (1, 2):
                    for name in ("pool", "ray"):
                        in_new_process("lenet", name, workers)
        case ["driver"]:
            for width in WIDTHS.values():
                in_new_process("driver", width)
        case ["sampling"]:
            for clients in (10**5, 10**6, 10**7):
                in_new_process("sampling", clients)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
