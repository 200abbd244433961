"""Runs a sweep: the runs of every point are ordinary run folders, and the best point is written as a spec.

sweep.json       the search, its base spec, the points with their scores, and which one is the best
best.toml        the best point as a complete spec
sweep.db         Optuna's study, if Optuna proposed the points
POINT/seedN/     the runs
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from keel.core.records import COMPLETE, PrimaryMetric, Summary, final_value, primary_metric
from keel.engines import cores
from keel.errors import KeelError
from keel.runs.build import check_tasks
from keel.runs.files import write_atomic
from keel.runs.objects import RunObjects
from keel.runs.optuna_search import run_trials
from keel.runs.parallel import Job, ended_summary, run_all
from keel.runs.progress import show_progress
from keel.runs.run import find_run
from keel.runs.search_space import Plan, Point, name_of


@dataclass(frozen=True)
class EndedSweep:
    """The result of a sweep: its points, the best first, and the spec file of the best (None if all diverged)."""

    path: Path
    rows: list[dict[str, Any]]
    best: Path | None
    primary: PrimaryMetric
    """The metric by which the points are ranked."""


def run_sweep(
    plan: Plan,
    out: Path | None = None,
    quiet: bool = False,
    workers: int | None = None,
    objects: RunObjects | None = None,
) -> EndedSweep:
    """Run a search, or continue an interrupted one. Runs that have ended are not run again.

    Args:
        workers: The number of processes; by default one per core.
        objects: What a call in Python passes to each run; None for a command.
    """
    path = default_folder(plan) if out is None else out
    if plan.search.method == "optuna":
        points = run_trials(plan, path, quiet, workers, objects)
    else:
        points = plan.points()
        _run_points(plan, points, path, quiet, workers, objects)
    summaries = [_summaries(plan, point, path) for point in points]
    primary = _common_metric(summary for of_point in summaries for summary in of_point)
    rows = [_row(plan, point, of_point) for point, of_point in zip(points, summaries, strict=True)]
    rows.sort(key=lambda row: _rank(row, primary))
    best_row = rows[0] if rows[0]["score"] is not None else None
    for row in rows:
        row["best"] = row is best_row
    best = None
    if best_row is not None:
        best = path / "best.toml"
        write_atomic(best, [plan.chosen(best_row["fields"]).to_toml().encode()])
    selected = {"metric": primary.name, "maximize": primary.maximize}
    content = {**plan.described(), "base": plan.base.experiment, **selected, "points": rows}
    write_atomic(path / "sweep.json", [(json.dumps(content, indent=2) + "\n").encode()])
    return EndedSweep(path, rows, best, primary)


def default_folder(plan: Plan) -> Path:
    """A folder that depends only on the search, so that the same command continues it."""
    return Path("runs") / f"sweep-{plan.base.label.rpartition('-seed')[0]}"


def _run_points(
    plan: Plan, points: list[Point], path: Path, quiet: bool, workers: int | None, objects: RunObjects | None
) -> None:
    every = [Job(*run) for point in points for run in plan.runs(point, path)]
    left = [job for job in every if ended_summary(job, objects) is None]
    if not left:
        return
    if objects is None or not objects.used:  # an object is checked by the runs that it is passed to
        check_tasks(job.spec for job in left)
    label = f"{len(left)} of {len(every)} runs"
    names = [" ".join(job.path.parts[-2:]) for job in left]
    rounds, paths = [job.spec.rounds for job in left], [job.path for job in left]
    with show_progress([label] * len(left), rounds, quiet, names, paths) as watch:
        run_all(left, workers or cores(), watch, objects)


def _summaries(plan: Plan, point: Point, path: Path) -> list[Summary | None]:
    """The summary of each seed's run; None for a run that has not ended."""
    folders = [find_run(*run) for run in plan.runs(point, path)]
    return [None if folder is None else folder.summary for folder in folders]


def _common_metric(summaries: Iterable[Summary | None]) -> PrimaryMetric:
    """The primary metric of all runs.

    Raises:
        KeelError: The runs have different ones, so that no point is the best.
    """
    metrics = list(dict.fromkeys(primary_metric(summary) for summary in summaries if summary is not None))
    if len(metrics) > 1:
        names = ", ".join(sorted(metric.name for metric in metrics))
        raise KeelError(f"the runs of a sweep must have the same primary metric (got {names}); search another field")
    return metrics[0] if metrics else PrimaryMetric()


def _row(plan: Plan, point: Point, summaries: list[Summary | None]) -> dict[str, Any]:
    """The result of a point: the primary metric of each seed, their mean, and whether all runs finished."""
    statuses = {"missing" if summary is None else summary["status"] for summary in summaries}
    scores = [None if summary is None else final_value(summary) for summary in summaries]
    values = [score for score in scores if score is not None]
    finished, complete = statuses <= COMPLETE, len(values) == len(scores)
    return {
        "fields": point,
        "status": "finished" if finished else "diverged" if "diverged" in statuses else "pruned",
        "score": fmean(values) if finished and complete else None,
        "deviation": stdev(values) if finished and complete and len(values) > 1 else None,
        "scores": dict(zip(map(str, plan.seeds), scores, strict=True)),
        "path": name_of(point),
    }


def _rank(row: dict[str, Any], primary: PrimaryMetric) -> tuple[bool, float]:
    """The sort key: the best score first, points without a score last."""
    score = row["score"] or 0.0
    return row["score"] is None, -score if primary.maximize else score
