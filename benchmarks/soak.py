"""Soaks a run: memory, time per round and file handles over many rounds, and the footprint of many clients.

    python benchmarks/soak.py rounds fedhbm serial 100000   # one run of 100,000 rounds, and the time to read it
    python benchmarks/soak.py clients 1000000               # a state for each of a million clients: announced, measured
    python benchmarks/soak.py reports 1000 100              # a report of 1,000 runs of 100 rounds

`rounds` prints memory, wall-clock and processor time per round and file handles for each tenth of the run, and the last
tenth relative to the first. `clients` prints the disk and the memory that the resource estimate announces, and those
that the run took. `reports` prints the time that `keel.report` takes for runs of ten methods, whose records are made
up. The run folder is a temporary one.
"""

import os
import resource
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

import keel
from keel.algorithms import REGISTRY
from keel.core.examples import Examples, FederatedData, Partition
from keel.core.observers import Observer
from keel.core.records import Record
from keel.core.training_state import TrainingState
from keel.runs.folder import RunFolder
from keel.runs.resources import Footprint
from keel.runs.sealed import seal

PARTS = 10
CLIENTS, COHORT, EXAMPLES, INPUTS, CLASSES = 20, 2, 4, 4, 3


def resident() -> int:
    """The bytes of RAM that this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def times() -> tuple[float, float]:
    """The wall-clock time, and the processor time of this process and those that it has waited for, in seconds."""
    used = os.times()
    return time.perf_counter(), used.user + used.system + used.children_user + used.children_system


def disk(folder: Path) -> int:
    """The bytes that the files of a folder have allocated."""
    return sum(file.lstat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())


def examples(clients: int, each: int, inputs: int, classes: int) -> FederatedData:
    """Random examples; each client has the same number of them."""
    rng = np.random.default_rng(0)
    features = torch.from_numpy(rng.standard_normal((clients * each, inputs), dtype=np.float32))
    labels = torch.from_numpy(rng.integers(0, classes, clients * each))
    train = Examples(features, labels)
    partition = Partition(np.arange(clients * each), np.arange(clients + 1) * each)
    return FederatedData("soak", train, Examples(features[:64], labels[:64]), partition, classes)


class Gauge(Observer):
    """Prints memory, file handles and the time per round of each part of a run."""

    def __init__(self, rounds: int):
        self.every = max(1, rounds // PARTS)
        print(f"{'rounds':>9} {'MB':>10} {'ms':>10} {'CPU ms':>10} {'handles':>10}")
        self.lines: list[tuple[float, float, float, int]] = []
        self.began = (0.0, 0.0)

    def round_started(self, round: int) -> None:
        if not any(self.began):
            self.began = times()

    def round_recorded(self, record: Record, state: TrainingState, seconds: float) -> None:
        if state.round % self.every:
            return
        now = times()
        wall_clock, processor = ((end - begin) / self.every * 1e3 for begin, end in zip(self.began, now, strict=True))
        line = resident() / 1e6, wall_clock, processor, len(list(Path("/proc/self/fd").iterdir()))
        print(f"{state.round:>9,} {line[0]:>10.1f} {wall_clock:>10.3f} {processor:>10.3f} {line[3]:>10}", flush=True)
        self.lines.append(line)
        self.began = now

    def print_ratios(self) -> None:
        """The last part relative to the first."""
        ratios = (last / first for first, last in zip(self.lines[0], self.lines[-1], strict=True))
        print(f"{'last/first':>9}" + " ".join(f"{ratio:>10.3f}" for ratio in ratios))


def soak_rounds(algorithm: str, engine: str, rounds: int, folder: Path) -> None:
    """Run many rounds of a tiny task, then open the run."""
    spec = {
        "algorithm": {"name": algorithm},
        "rounds": rounds,
        "local": {"steps": 1, "batch": EXAMPLES, "lr": 0.001},
        "participation": {"rate": COHORT / CLIENTS},
        "evaluation": {"every": 100, "last": 1},
        "engine": {"name": engine},
    }
    gauge = Gauge(rounds)
    model = torch.nn.Linear(INPUTS, CLASSES)
    data = examples(CLIENTS, EXAMPLES, INPUTS, CLASSES)
    began = time.perf_counter()
    keel.run(spec, model=model, data=data, out=folder, workers=1, hooks=[gauge])
    gauge.print_ratios()
    print(f"whole run {time.perf_counter() - began:.1f} s, {disk(folder) / 1e6:.1f} MB on disk")
    for title, open_run in (
        ("keel.load(run).records", lambda: keel.load(folder).records),
        ("RunFolder.seconds", lambda: RunFolder(folder).seconds()),
        ("keel.resume of the ended run", lambda: keel.resume(folder, model=model, data=data).records),
    ):
        wall_clock, processor = times()
        lines = len(open_run())
        wall_clock, processor = times()[0] - wall_clock, times()[1] - processor
        print(f"{title}: {lines:,} lines in {wall_clock:.2f} s ({processor:.2f} s of processor time)")


@contextmanager
def largest_disk(folder: Path) -> Iterator[list[int]]:
    """Measure, ten times a second, the bytes that a folder takes; the list has the largest."""
    largest, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.1):
            largest[0] = max(largest[0], disk(folder))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield largest
    finally:
        done.set()
        thread.join()


def soak_clients(clients: int, folder: Path) -> None:
    """Train every client, and a tenth of them twice, with a stateful algorithm."""
    cohort = max(1, clients // 100)
    spec = {
        "algorithm": {"name": "fedhbm"},
        "rounds": 11 * clients // cohort // 10,
        "local": {"steps": 1, "batch": 1, "lr": 0.001},
        "participation": {"rate": cohort / clients, "sampler": "cyclic"},
        "evaluation": {"every": 100, "last": 1},
        "engine": {"name": "cohort"},
    }
    before: list[int] = []

    def announce(footprint: Footprint) -> None:
        print(f"announced: {footprint}", flush=True)
        before.append(resident())

    model, data = torch.nn.Linear(32, 10), examples(clients, 1, 32, 10)
    began = time.perf_counter()
    with largest_disk(folder) as largest:
        keel.run(spec, model=model, data=data, out=folder, workers=1, announce=announce, hooks=[Gauge(spec["rounds"])])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"measured: {largest[0] / 1e6:.0f} MB on disk and {(peak - before[0]) / 1e6:.0f} MB of peak memory, besides")
    print(f"the {before[0] / 1e6:.0f} MB of the program and the data; {time.perf_counter() - began:.0f} s")


def soak_reports(runs: int, rounds: int, folder: Path) -> None:
    """Make up runs with the records of one real round, and report on them."""
    table = {"rounds": 1, "evaluation": {"every": 1, "last": 1}, "engine": {"name": "serial"}}
    real = RunFolder(folder / "real")
    record = keel.run(table, out=real.path).records[0]
    methods = sorted(REGISTRY)[: min(10, runs)]
    for number in range(runs):
        algorithm, seed = methods[number % len(methods)], number // len(methods)
        spec = keel.make_spec({**table, "rounds": rounds, "seed": seed, "algorithm": {"name": algorithm}})
        environment = {**real.environment, "title": spec.algorithm.title}
        made = RunFolder.create(folder / "runs" / str(number), spec, environment)
        rising = ({**record, "round": t, "accuracy": 1 - 0.5 ** (t / 20)} for t in range(1, rounds + 1))
        made.metrics.write_bytes(b"".join(map(seal, rising)))
        made.timings.write_bytes(b"".join(seal({"round": t, "seconds": 0.1}) for t in range(1, rounds + 1)))
        made.finish({**(real.summary or {}), "rounds": rounds})
    wall_clock, processor = times()
    page = folder / "report.html"
    keel.report(folder / "runs", page)
    wall_clock, processor = times()[0] - wall_clock, times()[1] - processor
    print(f"report of {runs:,} runs of {rounds:,} rounds: {wall_clock:.1f} s ({processor:.1f} s of processor time)")
    print(f"{page.stat().st_size / 1e6:.1f} MB")


def main() -> None:
    kind, *arguments = sys.argv[1:]
    with TemporaryDirectory(prefix="keel-soak-") as folder:
        if kind == "rounds":
            algorithm, engine, rounds = arguments
            soak_rounds(algorithm, engine, int(rounds), Path(folder) / "run")
        elif kind == "reports":
            runs, rounds = map(int, arguments)
            soak_reports(runs, rounds, Path(folder))
        else:
            soak_clients(int(arguments[0]), Path(folder) / "run")


if __name__ == "__main__":
    main()
