"""Search a grid of results/ and write the score of every point to the JSON file of the same name.

python tools/search_digits.py GRID.toml [--extend] [METHOD ...]

With --extend, points that the JSON file has are not run again: for a grid with more values, and only if the code of the
method has not changed since.
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
Row = dict[str, Any]
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


def fields_of(row: Row) -> Row:
    """Return the fields of the spec in a row, which are the point."""
    return {field: value for field, value in row.items() if "." in field}


def search(name: str, grid: dict[str, Any], known: list[Row], workers: ProcessPoolExecutor) -> list[Row]:
    """Return a row for each point of a method's grid, averaged over the seeds; the best one is marked.

    Args:
        known: Rows of earlier searches, whose points are not run again.
    """
    axes = grid["local"] | grid["grid"][name]
    points = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    rows = [row for row in known if row["algorithm"] == name and fields_of(row) in points]
    new = [point for point in points if point not in map(fields_of, rows)]
    jobs: list[Job] = [(name, grid["setting"] | point, seed) for point in new for seed in grid["seeds"]]
    scores = list(workers.map(accuracy, jobs))
    seeds = len(grid["seeds"])
    for i, point in enumerate(new):
        overall, last = map(fmean, zip(*scores[i * seeds : (i + 1) * seeds], strict=True))
        rows.append({"algorithm": name, **point, "overall": round(overall, 4), "last": round(last, 4)})
    rows.sort(key=lambda row: points.index(fields_of(row)))
    best = max(rows, key=lambda row: row["overall"])
    print(name, *(f"{k}={v}" for k, v in fields_of(best).items()), f"{best['overall']:.4f}", file=sys.stderr)
    return [{**row, "best": row is best} for row in rows]


def main(path: Path, names: list[str], extend: bool) -> None:
    grid, results = tomllib.loads(path.read_text()), path.with_suffix(".json")
    names = names or list(grid["grid"])
    stored = json.loads(results.read_text()) if results.exists() else []
    rows = [row for row in stored if row["algorithm"] not in names and row["algorithm"] in grid["grid"]]
    with ProcessPoolExecutor() as workers:
        for name in names:
            rows += search(name, grid, stored if extend else [], workers)
            results.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if argument != "--extend"]
    main(Path(arguments[0]), arguments[1:], "--extend" in sys.argv)
