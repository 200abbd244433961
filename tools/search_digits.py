"""Runs the grid of results/digits_grid.toml and keeps every point's result in results/digits_grid.json."""

import json
import sys
import tomllib
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from keel.rounds import Training
from keel.runs.spec import make_spec, override
from keel.task import make_task

ROOT = Path(__file__).parents[1]
GRID = tomllib.loads((ROOT / "results/digits_grid.toml").read_text())
RESULTS = ROOT / "results/digits_grid.json"

Job = tuple[str, dict[str, Any], int]


def accuracy(job: Job) -> float:
    """The mean validation accuracy of the last rounds; zero for a run that diverged."""
    name, point, seed = job
    table = {"algorithm": {"name": name}, "seed": seed, "evaluation": {"on": "validation"}}
    spec = make_spec(override(table, [f"{field}={json.dumps(value)}" for field, value in point.items()]))
    training, values = Training(spec, make_task(spec)), []
    status = training.run(training.start(), [lambda record, *_: values.append(record.get("accuracy"))])
    return fmean(values[-spec.evaluation.last :]) if status == "finished" else 0.0


def search(name: str, workers: ProcessPoolExecutor) -> list[dict[str, Any]]:
    axes = GRID["local"] | GRID["grid"][name]
    points = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    jobs: list[Job] = [(name, point, seed) for point in points for seed in GRID["seeds"]]
    found = list(workers.map(accuracy, jobs))
    seeds = len(GRID["seeds"])
    means = [fmean(found[i * seeds : (i + 1) * seeds]) for i in range(len(points))]
    best = means.index(max(means))
    print(name, *(f"{k}={v}" for k, v in points[best].items()), f"{means[best]:.4f}", file=sys.stderr)
    return [
        {"algorithm": name, **point, "accuracy": round(mean, 4), "best": i == best}
        for i, (point, mean) in enumerate(zip(points, means, strict=True))
    ]


def main() -> None:
    names = sys.argv[1:] or list(GRID["grid"])
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    rows = [row for row in known if row["algorithm"] not in names and row["algorithm"] in GRID["grid"]]
    with ProcessPoolExecutor() as workers:
        for name in names:
            rows += search(name, workers)
            RESULTS.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
