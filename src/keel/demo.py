"""The demo: four methods on the embedded digits, each at the best of the declared grid, over several seeds."""

from pathlib import Path

from keel.reporting.comparison import Comparison, compare
from keel.runs.comparing import jobs_of, run_jobs

METHODS = ["fedavg", "fedavgm", "ghbm", "fedhbm"]


def run_demo(out: Path, seeds: int, rounds: int | None, quiet: bool) -> Comparison:
    table = {} if rounds is None else {"rounds": rounds}
    return compare(run_jobs(jobs_of(table, METHODS, seeds, [], out), quiet), baseline="fedavg")
