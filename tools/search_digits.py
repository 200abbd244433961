"""Runs a grid of results/ and keeps each point beside it: python tools/search_digits.py GRID.toml [METHOD ...]"""

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

Job = tuple[str, dict[str, Any], int]


def accuracy(job: Job) -> tuple[float, float]:
    """The validation accuracy averaged over all rounds and over the last ones; zeros for a run that diverged."""
    name, point, seed = job
    table = {"algorithm": {"name": name}, "seed": seed, "evaluation": {"on": "validation", "every": 2}}
    spec = make_spec(override(table, [f"{field}={json.dumps(value)}" for field, value in point.items()]))
    training, curve = Training(spec, make_task(spec)), {}
    status = training.run(training.start(), [lambda r, *_: curve.update({r["round"]: r.get("accuracy")})])
    if status != "finished":
        return 0.0, 0.0
    return fmean(curve[t] for t in curve if t % 2 == 0), fmean(curve[t] for t in curve if t > spec.rounds - 100)


def search(name: str, grid: dict[str, Any], workers: ProcessPoolExecutor) -> list[dict[str, Any]]:
    axes = grid["local"] | grid["grid"][name]
    points = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    jobs: list[Job] = [(name, grid["setting"] | point, seed) for point in points for seed in grid["seeds"]]
    found = list(workers.map(accuracy, jobs))
    seeds = len(grid["seeds"])
    groups = [found[i : i + seeds] for i in range(0, len(found), seeds)]
    overall, last = ([fmean(pair[k] for pair in group) for group in groups] for k in (0, 1))
    best = overall.index(max(overall))
    print(name, *(f"{k}={v}" for k, v in points[best].items()), f"{overall[best]:.4f}", file=sys.stderr)
    return [
        {"algorithm": name, **point, "overall": round(overall[i], 4), "last": round(last[i], 4), "best": i == best}
        for i, point in enumerate(points)
    ]


def main(path: Path, names: list[str]) -> None:
    grid, results = tomllib.loads(path.read_text()), path.with_suffix(".json")
    names = names or list(grid["grid"])
    known = json.loads(results.read_text()) if results.exists() else []
    rows = [row for row in known if row["algorithm"] not in names and row["algorithm"] in grid["grid"]]
    with ProcessPoolExecutor() as workers:
        for name in names:
            rows += search(name, grid, workers)
            results.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
