"""The demo: four methods on the embedded digits, each at the best of the declared grid, over several seeds."""

import os
from pathlib import Path

from keel.reporting.comparison import Comparison, compare
from keel.runs.batch import Job, run_all
from keel.runs.folder import RunFolder
from keel.runs.spec import make_spec
from keel.terminal import watching

METHODS = ["fedavg", "fedavgm", "ghbm", "fedhbm"]


def run_demo(out: Path, seeds: int, rounds: int | None, quiet: bool) -> Comparison:
    table = {} if rounds is None else {"rounds": rounds}
    specs = [
        make_spec({**table, "algorithm": {"name": name}, "seed": seed}) for name in METHODS for seed in range(seeds)
    ]
    jobs = [Job(spec, out / spec.label) for spec in specs]
    labels = [spec.algorithm.title for spec in specs]
    with watching(labels, [spec.rounds for spec in specs], quiet) as watch:
        run_all(jobs, os.cpu_count() or 1, watch)
    return compare([RunFolder.open(job.path) for job in jobs], baseline="fedavg")
