"""Every method on the digits at the best of its grid, over five seeds: results/digits.json, a curve and a table in
each page of docs/algorithms. `make experiment` runs it; runs that exist are not run again.
"""

import json
import os
from pathlib import Path

import altair as alt

from keel.reporting.charts import COLOURS, DASHES
from keel.reporting.comparison import Comparison, Method, compare
from keel.reporting.tables import accuracy, size
from keel.runs.batch import Job, run_all
from keel.runs.folder import RunFolder
from keel.runs.spec import defaults, make_spec
from keel.terminal import watching

ROOT = Path(__file__).parents[1]
RUNS, PAGES, IMAGES = ROOT / "runs/digits", ROOT / "docs/algorithms", ROOT / "docs/images/algorithms"
SEEDS = 5
EVERY = 6
"""Rounds between the points of a curve, so that the pictures stay small."""
MARK = "<!-- measured -->"


REFERENCE = {"rounds": 30, "local": {"epochs": 1, "lr": 0.1}, "evaluation": {"every": 1, "last": 10}}
"""Centralized training: a round is an epoch over all the data."""


def run_methods() -> Comparison:
    tables = [{"algorithm": {"name": name}} for name in defaults()["digits"]["with"]]
    tables.append({"algorithm": {"name": "centralized"}, **REFERENCE})
    specs = [make_spec({**table, "seed": seed}) for table in tables for seed in range(SEEDS)]
    jobs = [Job(spec, RUNS / spec.label) for spec in specs]
    with watching([spec.algorithm.title for spec in specs], [spec.rounds for spec in specs]) as watch:
        run_all(jobs, os.cpu_count() or 1, watch)
    return compare([RunFolder.open(job.path) for job in jobs], baseline="fedavg")


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


def reference(comparison: Comparison) -> str:
    row = next(row for row in comparison.rows() if row["algorithm"] == "centralized")
    return f"""{MARK}

## Measured

On the digits, 30 epochs, momentum 0.9, rate 0.1, batch 8, five seeds, the average over the last ten epochs:
{accuracy(row)}. `make experiment` measures it again.

![Accuracy over epochs](../images/algorithms/centralized.svg)
"""


def measured(comparison: Comparison, methods: list[Method], name: str) -> str:
    rows = {row["algorithm"]: row for row in comparison.rows()}
    lines = ["| method | accuracy | rounds to FedAvg's final accuracy | bytes until then |", "|---|---|---|---|"]
    for method in methods:
        row = rows[method.algorithm]
        rounds = row["rounds_to_target"]
        lines.append(f"| {row['label']} | {accuracy(row)} | {rounds or 'never'} | {size(row['bytes_to_target'])} |")
    return "\n".join(
        [
            MARK,
            "",
            "## Measured",
            "",
            "On the digits, one class per client, 10 of 100 clients in a round, 300 rounds, five seeds, at the best of",
            "[the declared grid](../../results/digits_grid.toml); `make experiment` measures it again.",
            "",
            *lines,
            "",
            f"![Accuracy over rounds](../images/algorithms/{name}.svg)",
            "",
        ]
    )


def main() -> None:
    comparison = run_methods()
    rows = sorted(comparison.rows(), key=lambda row: (row["rounds_to_target"] or 10**9, -(row["accuracy_mean"] or 0)))
    text = "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"
    (ROOT / "results/digits.json").write_text(text)
    by_name = {method.algorithm: method for method in comparison.methods}
    for name, method in by_name.items():
        page = PAGES / f"{name}.md"
        if name == "centralized":
            picture([method], IMAGES / "centralized.svg", every=1)
            page.write_text(page.read_text().split(MARK)[0] + reference(comparison))
            continue
        shown = [method, *(by_name[other] for other in ("fedavg", "fedhbm") if other != name)]
        picture(shown, IMAGES / f"{name}.svg")
        page.write_text(page.read_text().split(MARK)[0] + measured(comparison, shown, name))


if __name__ == "__main__":
    main()
