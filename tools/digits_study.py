"""A study on the digits: every point is tuned over the same learning rates, then measured over five seeds.

A point is tuned on validation examples, which are held out from the clients, with a seed of its own. An interrupted
study continues: rows that the JSON file has are not run again.
"""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

from keel.config.defaults import make_spec
from keel.config.overrides import put
from keel.report.significance import half_width
from keel.runs.build import build, make_task

ROUNDS, LAST, WORKERS = 200, 50, 4
TUNING_SEEDS, SEEDS = (100,), (0, 1, 2, 3, 4)
TARGET = 0.9
"""The accuracy to which rounds and bytes are counted."""
TRIALS = 16
"""Runs between two writes of the results."""

MARK = "<!-- measured -->"
"""What follows it in a page is generated."""

Row = dict[str, Any]
Points = Mapping[str, Mapping[str, Any]]
"""The fields of the spec of each point, by its name."""


def measured(job: tuple[str, Mapping[str, Any], int, float, str]) -> Row:
    """Run a point, and return its accuracy over all rounds and over the last 50, and the cost of 90 %."""
    name, fields, seed, rate, on = job
    evaluation = {"on": on, "every": 2, "last": LAST}
    table: dict[str, Any] = {"seed": seed, "rounds": ROUNDS, "local": {"lr": rate}, "evaluation": evaluation}
    table["engine"] = {"workers": 1}
    for field, value in fields.items():
        put(table, field, value)
    spec = make_spec(table)
    loop = build(spec, make_task(spec)).loop
    curve, traffic, sent = dict[int, float](), dict[int, int](), 0

    def collect(record: Any, *_: Any) -> None:
        nonlocal sent
        sent += record["bytes_down"] + record["bytes_up"]
        traffic[record["round"]] = sent
        if "accuracy" in record:
            curve[record["round"]] = record["accuracy"]

    status = loop.run(loop.start(), [collect])
    finished = status == "finished"
    reached = next((t for t, accuracy in curve.items() if accuracy >= TARGET), None)
    return {
        "point": name,
        "seed": seed,
        "lr": rate,
        "on": on,
        "overall": round(fmean(curve[t] for t in curve if t % 2 == 0), 4) if finished else 0.0,
        "final": round(fmean(curve[t] for t in curve if t > ROUNDS - LAST), 4) if finished else 0.0,
        "rounds_to_target": reached,
        "bytes_to_target": None if reached is None else traffic[reached],
        "bytes": sent,
        "parameters": loop.parameters,
    }


def run_study(path: Path, points: Points, rates: Sequence[float], batch: int) -> list[Row]:
    """Run what is missing of a study and return all rows.

    Args:
        rates: The learning rates among which each point is tuned.
        batch: How many points are tuned and measured before the next ones, so that an interrupted study has results.
    """
    rows: list[Row] = json.loads(path.read_text()) if path.exists() else []
    rows = [row for row in rows if row["point"] in points]
    with ProcessPoolExecutor(WORKERS) as workers:

        def complete(jobs: list[tuple[str, int, float, str]]) -> None:
            known = {(row["point"], row["seed"], row["lr"], row["on"]) for row in rows}
            missing = [(name, points[name], *rest) for name, *rest in jobs if (name, *rest) not in known]
            for first in range(0, len(missing), TRIALS):
                rows.extend(workers.map(measured, missing[first : first + TRIALS]))  # type: ignore[arg-type]
                path.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")

        names = list(points)
        for first in range(0, len(names), batch):
            some = names[first : first + batch]
            complete([(name, seed, rate, "validation") for name, rate, seed in product(some, rates, TUNING_SEEDS)])
            best = {name: best_rate(rows, name) for name in some}
            complete([(name, seed, best[name], "test") for name, seed in product(some, SEEDS)])
    return rows


def best_rate(rows: list[Row], name: str) -> float:
    """The learning rate with the best validation accuracy, averaged over all rounds and the tuning seeds."""
    scores: dict[float, list[float]] = {}
    for row in rows:
        if row["point"] == name and row["on"] == "validation":
            scores.setdefault(row["lr"], []).append(row["overall"])
    return max(scores, key=lambda rate: fmean(scores[rate]))


def summary(rows: list[Row], name: str) -> Row:
    """The mean of a point over the seeds, with 95 % half-widths of accuracies; medians of the cost of 90 %."""
    final = [row for row in rows if row["point"] == name and row["on"] == "test"]
    result: Row = {"point": name, "lr": final[0]["lr"], "bytes": fmean(row["bytes"] for row in final)}
    for key in ("final", "overall"):
        values = [row[key] for row in final]
        result |= {key: fmean(values), f"{key}_half_width": half_width(values)}
    for key in ("rounds_to_target", "bytes_to_target"):
        median = sorted(inf if row[key] is None else row[key] for row in final)[len(final) // 2]
        result[key] = None if median == inf else median
    return result


def is_measured(rows: list[Row], name: str) -> bool:
    """Whether a point has a run of every seed."""
    return {row["seed"] for row in rows if row["point"] == name and row["on"] == "test"} == set(SEEDS)


def accuracy_text(result: Row) -> str:
    """The final accuracy in percent with its 95 % half-width."""
    return f"{100 * result['final']:.1f} ± {100 * result['final_half_width']:.1f}"


def write_section(page: Path, text: str) -> None:
    """Replace what follows the mark of the page."""
    page.write_text(page.read_text().split(MARK)[0] + f"{MARK}\n\n{text}\n")
