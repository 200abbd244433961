"""What Ray costs beside the pool, and what a round costs its driver.

    python benchmarks/scaling.py turns 3     # seconds per round of LeNet: pool and ray, 1 and 2 workers, in turns
    python benchmarks/scaling.py driver      # what a client costs the driver, by the size of the model
    python benchmarks/scaling.py choosing    # what a round of ten million clients costs before anybody trains

Prints lines of JSON. Each measurement has a process of its own.
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

from keel.data.federated import Examples, FederatedData, Partition
from keel.engines import Problem
from keel.engines.pool import Pool
from keel.engines.serial import Serial
from keel.rounds import Training
from keel.runs.spec import make_spec
from keel.task import make_task

ROUNDS = 2
WIDTHS = {"5 k parameters": 500, "50 k": 5_000, "800 k": 80_000}


def training(engine: dict[str, Any], module: nn.Module, data: FederatedData, cohort: int, **local: Any) -> Training:
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
    return Training(spec, make_task(spec, module=module, data=data))


def costs_of(run: Training, rounds: int) -> dict[str, float]:
    """Of a round: seconds, and processor seconds of all processes and of the driver's own.

    Without the first round, in which workers start. Processor seconds count even where the machine is not ours alone.
    """
    took, busy, own = [], [], []

    def note(record: Any, position: Any, seconds: float) -> None:
        took.append(seconds)
        busy.append(processor_seconds())
        own.append(time.process_time())

    run.run(run.start(), [note], lambda: len(took) > rounds)
    each = {"processor": (busy[-1] - busy[0]) / rounds, "driver": (own[-1] - own[0]) / rounds}
    return {"seconds": median(took[1:]), **each}


def processor_seconds() -> float:
    """Of this process and all below it."""
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
    run = training(
        {"name": name, "workers": workers}, work.module(), work.data(), work.cohort, steps=work.steps, batch=work.batch
    )
    if name == "pool" and workers == 1:  # else it would be `serial`, whose allocator is not tuned
        run.engine = Pool(Serial(Problem(run.task, run.engine.recipe)), 1)  # type: ignore[attr-defined]
    return {"engine": name, "workers": workers, **costs_of(run, ROUNDS)}


def idle_data(clients: int, inputs: int = 10) -> FederatedData:
    """One example for each client: there is next to nothing to train."""
    examples = Examples(torch.rand(100, inputs), torch.arange(100) % 2)
    return FederatedData(
        "idle", examples, examples, Partition(np.arange(clients) % 100, np.arange(clients + 1)), classes=2
    )


def driver(width: int) -> dict[str, Any]:
    """From rounds of 80 and of 400 clients that train next to nothing, what a round costs and what a client adds."""
    costs = []
    for cohort in (80, 400):
        module = nn.Sequential(nn.Linear(10, width, bias=False), nn.AvgPool1d(width // 2))
        run = training({"name": "ray", "workers": 1}, module, idle_data(400), cohort, steps=1, batch=1)
        costs.append(costs_of(run, 5))
    few, many = costs
    client = {what: (many[what] - few[what]) / 320 for what in few}
    return {
        "parameters": run.parameters,
        "client": client,
        "round": {what: few[what] - 80 * client[what] for what in few},
    }


def choosing(clients: int) -> dict[str, Any]:
    run = training({"name": "serial"}, nn.Linear(10, 2), idle_data(clients), clients // 100, steps=1, batch=1)
    took = []
    for t in range(1, 6):
        began = time.perf_counter()
        cohort = run._longest_first(run.sampler.cohort(t))
        run._context(t, cohort)
        run._weights(cohort)
        took.append(time.perf_counter() - began)
    return {"clients": clients, "cohort": len(cohort), "seconds": median(took)}


def apart(*arguments: Any) -> None:
    command = [sys.executable, __file__, "one", *map(str, arguments)]
    print(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout, end="", flush=True)


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    match sys.argv[1:]:
        case ["one", "lenet", name, workers]:
            print(json.dumps(lenet(name, int(workers))))
        case ["one", "driver", width]:
            print(json.dumps(driver(int(width))))
        case ["one", "choosing", clients]:
            print(json.dumps(choosing(int(clients))))
        case ["turns", turns]:
            for _ in range(int(turns)):
                for workers in (1, 2):
                    for name in ("pool", "ray"):
                        apart("lenet", name, workers)
        case ["driver"]:
            for width in WIDTHS.values():
                apart("driver", width)
        case ["choosing"]:
            for clients in (10**5, 10**6, 10**7):
                apart("choosing", clients)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
