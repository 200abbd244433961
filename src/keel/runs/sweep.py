"""Runs a search: every point a few ordinary run folders below the sweep's, and the best point as a spec.

sweep.json       the search, the spec it is around, its points with their scores, which one was chosen
best.toml        the chosen point, a whole spec
sweep.db         Optuna's study, where it searched
POINT/seedN/     the runs
"""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from keel.engines import cores
from keel.runs.batch import Job, run_all
from keel.runs.folder import write_whole
from keel.runs.run import existing
from keel.runs.search import Plan, Point, name_of
from keel.runs.trials import run_trials
from keel.task import check_tasks
from keel.terminal import watching


@dataclass(frozen=True)
class Sweep:
    """A sweep that has ended: its points, the best first, and the file of the chosen one (none if all diverged)."""

    path: Path
    rows: list[dict[str, Any]]
    best: Path | None


def run_sweep(plan: Plan, out: Path | None = None, quiet: bool = False) -> Sweep:
    """Searches, or goes on with a search that was stopped. What is there already is not run again."""
    path = default_folder(plan) if out is None else out
    if plan.search.method == "optuna":
        points = run_trials(plan, path, quiet)
    else:
        points = plan.points()
        _run_points(plan, points, path, quiet)
    rows = sorted((_row(plan, point, path) for point in points), key=_rank)
    chosen = rows[0] if rows[0]["status"] == "finished" else None
    for row in rows:
        row["best"] = row is chosen
    best = None
    if chosen is not None:
        best = path / "best.toml"
        write_whole(best, [plan.chosen(chosen["fields"]).to_toml().encode()])
    told = {**plan.described(), "base": plan.base.experiment, "points": rows}
    write_whole(path / "sweep.json", [(json.dumps(told, indent=2) + "\n").encode()])
    return Sweep(path, rows, best)


def default_folder(plan: Plan) -> Path:
    """The same for the same search, so that the same command goes on with it."""
    return Path("runs") / f"sweep-{plan.base.label.rpartition('-seed')[0]}"


def _run_points(plan: Plan, points: list[Point], path: Path, quiet: bool) -> None:
    every = [Job(*run) for point in points for run in plan.runs(point, path)]
    there = [existing(job.spec, job.path) for job in every]
    left = [job for job, folder in zip(every, there, strict=True) if folder is None or not folder.ended]
    if not left:
        return
    check_tasks(job.spec for job in left)
    label = f"{len(left)} of {len(every)} runs"
    names = [" ".join(job.path.parts[-2:]) for job in left]
    with watching([label] * len(left), [job.spec.rounds for job in left], quiet, names) as watch:
        run_all(left, cores(), watch)


def _row(plan: Plan, point: Point, path: Path) -> dict[str, Any]:
    """How a point did: the accuracy of each seed, their mean, and whether all of them got there."""
    summaries = []
    for run in plan.runs(point, path):
        folder = existing(*run)
        summaries.append((folder.summary if folder is not None else None) or {"status": "missing", "accuracy": None})
    statuses = {summary["status"] for summary in summaries}
    finished, scores = statuses == {"finished"}, [summary["accuracy"] for summary in summaries]
    return {
        "fields": point,
        "status": "finished" if finished else "diverged" if "diverged" in statuses else "pruned",
        "score": fmean(scores) if finished else None,
        "deviation": stdev(scores) if finished and len(scores) > 1 else None,
        "scores": dict(zip(map(str, plan.seeds), scores, strict=True)),
        "path": name_of(point),
    }


def _rank(row: dict[str, Any]) -> tuple[bool, float]:
    """The best first; those without a score last."""
    return row["score"] is None, -(row["score"] or 0.0)
