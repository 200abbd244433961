"""Measures how long reports on many or long runs take: python benchmarks/report.py [--runs 1000] [--rounds 20000]

The folders are synthetic: those of a run of three rounds, with logs of as many rounds as asked for. Prints wall-clock
time and processor time of each step, without the start of Python.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import keel
from keel.report.comparison import compare
from keel.report.loaded_run import load_run
from keel.report.page import write_report
from keel.runs.finding import find_runs
from keel.runs.folder import RunFolder

TABLE: dict[str, Any] = {"rounds": 3, "local": {"steps": 1}, "evaluation": {"every": 1}}
LINES = 100_000
"""Rounds of the log that is only opened."""
SHORT = 100
"""Rounds of each of many runs."""


def synthetic(real: RunFolder, path: Path, rounds: int, checkpoint: bool = False, **fields: Any) -> RunFolder:
    """Write the folder of a finished run of so many rounds, with the other files of a real run."""
    spec = keel.make_spec({**TABLE, "rounds": rounds, **fields})
    environment: Any = {**real.environment, "title": spec.algorithm.title}
    folder = RunFolder.create(path, spec, environment, real.client_statistics, real.model)
    records, rng = real.records(), np.random.default_rng(spec.seed)
    accuracy = 1 - 0.9 * np.exp(-5 * np.arange(rounds) / rounds) + rng.normal(0, 0.01, rounds)
    for index, value in enumerate(accuracy.tolist()):
        folder.append({**records[index % len(records)], "round": index + 1, "accuracy": value}, 0.001)  # type: ignore[typeddict-item]
    if checkpoint:
        state = real.final_state()
        state.round = rounds
        folder.save(state)
    assert real.summary is not None
    folder.finish({**real.summary, "rounds": rounds, "seed": spec.seed, "value": float(accuracy[-20:].mean())})
    return folder


def measure(name: str, step: Callable[[], object]) -> None:
    begin, processor = time.perf_counter(), time.process_time()
    step()
    wall, used = time.perf_counter() - begin, time.process_time() - processor
    print(f"{name:<48} {wall:8.1f} s {used:8.1f} s of processor time", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000, help="runs of one page (default: 1000)")
    parser.add_argument("--seeds", type=int, default=5, help="runs of a method (default: 5)")
    parser.add_argument("--rounds", type=int, default=20_000, help="rounds of a long run (default: 20000)")
    arguments = parser.parse_args()
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        real = RunFolder(keel.run(TABLE, out=folder / "real").path)
        long = synthetic(real, folder / "long", arguments.rounds, checkpoint=True)
        longest = synthetic(real, folder / "longest", LINES)
        for number in range(arguments.runs):
            method, seed = divmod(number, arguments.seeds)
            path = folder / "many" / str(number)
            synthetic(
                real, path, SHORT, seed=seed, algorithm={"name": "fedavg"}, local={"lr": round(0.1 + 0.001 * method, 3)}
            )

        def page(runs: Path) -> None:
            write_report(compare(find_runs([runs])), folder / "report.html")
            print(f"page on {runs.name}: {(folder / 'report.html').stat().st_size / 1e6:.1f} MB")

        page(real.path)  # what is loaded once
        measure(f"open metrics.jsonl of {LINES:,} lines", lambda: load_run(longest))
        measure(f"report of one run of {arguments.rounds:,} rounds", lambda: page(long.path))
        measure(f"resume that finished run of {arguments.rounds:,} rounds", lambda: keel.resume(long.path))
        measure(f"report of {arguments.runs:,} runs of {SHORT} rounds", lambda: page(folder / "many"))


if __name__ == "__main__":
    main()
