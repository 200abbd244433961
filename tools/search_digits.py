"""Runs the grid of src/keel/runs/digits_grid.toml and keeps every point's result in results/digits_grid.json."""

import json
import sys
import tomllib
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from keel.rounds import Training
from keel.runs.spec import make_spec, override
from keel.task import make_task

ROOT = Path(__file__).parents[1]
GRID = tomllib.loads((ROOT / "src/keel/runs/digits_grid.toml").read_text())
RESULTS = ROOT / "results/digits_grid.json"


def accuracy(job: tuple[str, dict[str, Any], int]) -> float:
    """The mean validation accuracy of the last rounds; zero for a run that diverged."""
    name, point, seed = job
    torch.set_num_threads(1)
    table = {"algorithm": {"name": name}, "seed": seed, "evaluation": {"on": "validation"}}
    spec = make_spec(override(table, [f"{field}={value}" for field, value in point.items()]))
    training, values = Training(spec, make_task(spec)), []
    status = training.run(training.start(), [lambda record, *_: values.append(record.get("accuracy"))])
    return fmean(values[-spec.evaluation.last :]) if status == "finished" else 0.0


def main() -> None:
    rows = []
    with ProcessPoolExecutor() as workers:
        for name, axes in GRID["grid"].items():
            points = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
            jobs = [(name, point, seed) for point in points for seed in GRID["seeds"]]
            found = list(workers.map(accuracy, jobs))
            seeds = len(GRID["seeds"])
            scored = [(point, fmean(found[i * seeds : (i + 1) * seeds])) for i, point in enumerate(points)]
            best = max(scored, key=lambda pair: pair[1])
            print(name, *(f"{k}={v}" for k, v in best[0].items()), f"{best[1]:.4f}", file=sys.stderr)
            rows += [{"algorithm": name, **p, "accuracy": round(a, 4), "best": (p, a) == best} for p, a in scored]
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
