"""Execution of recipes: searches for hyper-parameters first, then the runs that are missing."""

from dataclasses import dataclass
from pathlib import Path

from keel.config.schema import Spec
from keel.data.catalog import CATALOG, load
from keel.errors import KeelError
from keel.paper.recipes import Part
from keel.paper.run_index import RunIndex
from keel.runs.build import check_tasks
from keel.runs.compare import run_jobs
from keel.runs.search_space import Plan, Point
from keel.runs.sweep import run_sweep


@dataclass(frozen=True)
class PlannedRuns:
    """The runs that a part consists of."""

    specs: dict[str, list[Spec]]
    """By method. Before a method's search has finished, these have the default hyper-parameters."""
    points: dict[str, Point]
    """The hyper-parameters that finished searches chose, by method."""
    searches: dict[str, Plan]
    """The searches that have not finished, by method."""


def plan_runs(part: Part, index: RunIndex, seeds: int | None = None) -> PlannedRuns:
    """Return the runs of a part, with the hyper-parameters of the searches that `index` contains."""
    specs, points, searches = {}, {}, {}
    for method in part.methods:
        plan = part.plan(method)
        point = index.best_point(plan) if plan is not None else None
        if plan is not None and point is None:
            searches[method] = plan
        if point is not None:
            points[method] = point
        specs[method] = part.specs(method, seeds, point)
    return PlannedRuns(specs, points, searches)


def run_parts(parts: list[Part], out: Path, seeds: int | None = None, quiet: bool = False) -> None:
    """Run the searches and the runs of these parts that have not finished below `out`."""
    index = RunIndex(out)
    planned = [plan_runs(part, index, seeds) for part in parts]
    check_tasks(spec for plan in planned for specs in plan.specs.values() for spec in index.unfinished(specs))
    for plan in planned:
        for search in plan.searches.values():
            run_sweep(search, index.sweep_folder(search), quiet)
    specs = [spec for part in parts for specs in plan_runs(part, index, seeds).specs.values() for spec in specs]
    if missing := index.unfinished(specs):
        run_jobs([index.job(spec) for spec in missing], quiet)


def missing_data(parts: list[Part]) -> dict[str, str]:
    """Return the data sets of these parts that are not installed, each with a line on how to get it."""
    names = dict.fromkeys(part.spec.get("data", {}).get("name", "digits") for part in parts)
    lines = {}
    for name in names:
        if CATALOG[name].missing():
            try:
                load(name, {})
            except KeelError as error:
                lines[name] = str(error)
    return lines
