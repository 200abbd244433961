"""Every method of a grid at its best point, over five seeds: python tools/experiment_digits.py results/NAME_grid.toml

Writes results/NAME.json and, for the digits grid itself, a curve and a table into each page of docs/algorithms. Runs
that exist are not run again.
"""

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import altair as alt

from keel.reporting.charts import COLOURS, DASHES
from keel.reporting.comparison import Comparison, Method, compare
from keel.reporting.tables import accuracy
from keel.runs.batch import Job
from keel.runs.comparing import run_jobs
from keel.runs.spec import make_spec, override
from keel.units import size

ROOT = Path(__file__).parents[1]
PAGES, IMAGES = ROOT / "docs/algorithms", ROOT / "docs/images/algorithms"
SEEDS = 5
EVERY = 6
"""Rounds between the points of a curve, so that the pictures stay small."""
MARK = "<!-- measured -->"
REFERENCE = {"rounds": 30, "local.epochs": 1, "local.lr": 0.03, "evaluation.every": 1, "evaluation.last": 10}
"""Centralized training: a round is an epoch over all the data."""


def best_points(grid: Path) -> dict[str, dict[str, Any]]:
    """Each method's fields at the best point of its grid."""
    setting = tomllib.loads(grid.read_text())["setting"]
    rows = [row for row in json.loads(grid.with_suffix(".json").read_text()) if row["best"]]
    return {row["algorithm"]: setting | {k: v for k, v in row.items() if "." in k} for row in rows}


def run_methods(points: dict[str, dict[str, Any]], folder: Path) -> Comparison:
    specs = [
        make_spec(override({"algorithm": {"name": name}, "seed": seed}, [f"{k}={json.dumps(v)}" for k, v in p.items()]))
        for name, p in points.items()
        for seed in range(SEEDS)
    ]
    return compare(run_jobs([Job(spec, folder / spec.label) for spec in specs], quiet=False), baseline="fedavg")


def picture(methods: list[Method], path: Path, every: int = EVERY) -> None:
    values = [
        {"method": m.label, "round": int(t), "accuracy": round(float(mean), 3)}
        for m in methods
        for t, mean in zip(m.rounds, m.accuracy.mean(axis=0), strict=True)
        if t % every == 0
    ]
    labels = [m.label for m in methods]
    chart = (
        alt.Chart(alt.InlineData(values=values))
        .mark_line(strokeWidth=2)
        .encode(
            x=alt.X("round:Q"),
            y=alt.Y("accuracy:Q", title="test accuracy", axis=alt.Axis(format="%")),
            color=alt.Color("method:N", title=None, scale=alt.Scale(domain=labels, range=COLOURS[: len(labels)])),
            strokeDash=alt.StrokeDash("method:N", title=None, scale=alt.Scale(domain=labels, range=DASHES)),
        )
        .properties(width=560, height=240)
        .configure_legend(orient="top", symbolSize=400, symbolStrokeWidth=2.5)
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    chart.save(path)


def table(comparison: Comparison, names: list[str] | None = None) -> str:
    """Rows in the order of `names`, or fastest first."""
    rows = {row["algorithm"]: row for row in comparison.rows()}
    fastest = sorted(rows, key=lambda n: (rows[n]["rounds_to_target"] or 10**9, -(rows[n]["accuracy_mean"] or 0)))
    lines = ["| method | accuracy | rounds to FedAvg's final accuracy | bytes until then |", "|---|---|---|---|"]
    for row in (rows[name] for name in names or fastest):
        rounds = row["rounds_to_target"] or ("never" if row["target"] else "-")
        lines.append(f"| {row['label']} | {accuracy(row)} | {rounds} | {size(row['bytes_to_target'])} |")
    return "\n".join(lines)


def write_pages(comparison: Comparison) -> None:
    methods = {method.algorithm: method for method in comparison.methods}
    for name, method in methods.items():
        if name == "centralized":
            picture([method], IMAGES / f"{name}.svg", every=1)
            words = (
                "On the digits, 30 epochs, momentum 0.9, rate 0.1, batch 8, five seeds, averaged over the last ten\n"
                "epochs; `make experiment` measures it again."
            )
            shown = [name]
        else:
            shown = [name, *(other for other in ("fedavg", "fedhbm") if other != name)]
            picture([methods[other] for other in shown], IMAGES / f"{name}.svg")
            words = (
                "On the digits, one class per client, 10 of 100 clients in a round, 300 rounds, five seeds, at the\n"
                "best of [the declared grid](../../results/digits_grid.toml); `make experiment` measures it again."
            )
        curve = f"![Accuracy over rounds](../images/algorithms/{name}.svg)"
        page = PAGES / f"{name}.md"
        head = page.read_text().split(MARK)[0]
        page.write_text(f"{head}{MARK}\n\n## Measured\n\n{words}\n\n{table(comparison, shown)}\n\n{curve}\n")


def main(grid: Path) -> None:
    name = grid.stem.removesuffix("_grid")
    whole = name == "digits"
    points = best_points(grid) | ({"centralized": REFERENCE} if whole else {})
    comparison = run_methods(points, ROOT / "runs" / name)
    text = "[\n" + ",\n".join(json.dumps(row) for row in comparison.rows()) + "\n]\n"
    (ROOT / "results" / f"{name}.json").write_text(text)
    if whole:
        write_pages(comparison)
    print(table(comparison))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
