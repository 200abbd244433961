"""Search a grid of results/ and write the score of every point to the JSON file of the same name.

python tools/search_digits.py GRID.toml [METHOD ...]
"""

import json
import sys
import tomllib
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from keel.algorithms import make_algorithm
from keel.config.defaults import make_spec
from keel.config.overrides import override
from keel.runs.build import build, make_task

Job = tuple[str, dict[str, Any], int]
CLIENTS = 100
"""The clients of the digits, all of which are evaluated."""


def accuracy(job: Job) -> tuple[float, float]:
    """Return the validation accuracy averaged over all rounds and over the last 100; zeros if the run diverged.

    The accuracy of a method with personal models is that of these models, averaged over the clients.
    """
    name, point, seed = job
    personal = make_algorithm(name).personalised
    evaluation = {"on": "validation", "every": 2} | ({"clients": CLIENTS} if personal else {})
    table = {"algorithm": {"name": name}, "seed": seed, "evaluation": evaluation}
    spec = make_spec(override(table, [f"{field}={json.dumps(value)}" for field, value in point.items()]))
    loop, curve = build(spec, make_task(spec)).loop, {}

    def score(record: Any) -> float | None:
        return record.get("clients", {}).get("mean") if personal else record.get("accuracy")

    status = loop.run(loop.start(), [lambda r, *_: curve.update({r["round"]: score(r)})])
    if status != "finished":
        return 0.0, 0.0
    return fmean(curve[t] for t in curve if t % 2 == 0), fmean(curve[t] for t in curve if t > spec.rounds - 100)


def search(name: str, grid: dict[str, Any], workers: ProcessPoolExecutor) -> list[dict[str, Any]]:
    """Return a row for each point of a method's grid, averaged over the seeds; the best one is marked."""
    axes = grid["local"] | grid["grid"][name]
    points = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    jobs: list[Job] = [(name, grid["setting"] | point, seed) for point in points for seed in grid["seeds"]]
    scores = list(workers.map(accuracy, jobs))
    seeds = len(grid["seeds"])
    groups = [scores[i : i + seeds] for i in range(0, len(scores), seeds)]
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
    stored = json.loads(results.read_text()) if results.exists() else []
    rows = [row for row in stored if row["algorithm"] not in names and row["algorithm"] in grid["grid"]]
    with ProcessPoolExecutor() as workers:
        for name in names:
            rows += search(name, grid, workers)
            results.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
