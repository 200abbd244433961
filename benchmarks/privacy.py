"""The processor time of a LeNet round with privacy mechanisms, relative to one without. The goal is at most 1.15.

python benchmarks/privacy.py [REPETITIONS]     (KEEL_DATA has MNIST)

Rounds with and without a mechanism alternate, in one process; the median of the ratios of neighbours is printed.
"""

import sys
from statistics import median
from time import process_time
from typing import Any

from keel.config.defaults import make_spec
from keel.runs.build import build, make_task

PRIVACY = {"clip": 0.5, "noise": 1.0, "delta": 1e-5}
CYCLIC = {"participation": {"rate": 0.05, "sampler": "cyclic"}}
CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "central": {"privacy": PRIVACY},
    "adaptive": {"privacy": {**PRIVACY, "quantile": 0.5, "bit_noise": 2.0}},
    "local": {"privacy": {**PRIVACY, "mechanism": "local"}},
    "tree": {"privacy": {**PRIVACY, "mechanism": "tree"}, **CYCLIC},
    "median": {"server": {"mean": "median", "weighting": "uniform"}},
    "trimmed_mean": {"server": {"mean": "trimmed_mean", "weighting": "uniform"}},
    "geometric_median": {"server": {"mean": "geometric_median", "weighting": "uniform"}},
    "example": {"privacy": {**PRIVACY, "mechanism": "example"}},
}
TABLE = {
    "rounds": 1000,
    "algorithm": {"name": "fedavg"},
    "data": {"name": "mnist", "clients": 100, "partition": "iid"},
    "model": {"name": "lenet"},
    "participation": {"rate": 0.05, "sampler": "uniform"},
    "evaluation": {"every": 10**6, "last": 1},
    "engine": {"name": "serial"},
}


def main(repetitions: int) -> None:
    specs = {name: make_spec({**TABLE, **more}) for name, more in CASES.items()}
    task = make_task(specs["none"])
    loops = {name: build(spec, task).loop for name, spec in specs.items()}
    states = {name: loop.start() for name, loop in loops.items()}
    times: dict[str, list[float]] = {name: [] for name in loops}
    for repetition in range(repetitions + 1):
        for name, loop in loops.items():
            began = process_time()
            loop.run(states[name], stop=lambda: True)
            if repetition:  # the first records programs
                times[name].append(process_time() - began)
    for name in CASES:
        ratio = median(a / b for a, b in zip(times[name], times["none"], strict=True))
        print(f"{name}: {median(times[name]):.3f} s of processor time, ratio {ratio:.3f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
