"""Execution of recipes: searches for hyper-parameters first, then the runs that are missing."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from keel.config.schema import Spec
from keel.data.catalog import CATALOG, load
from keel.errors import KeelError
from keel.paper.recipes import Part
from keel.paper.run_index import Results, RunIndex
from keel.paper.trials import Search, remove_older
from keel.runs.build import check_tasks
from keel.runs.compare import run_jobs
from keel.runs.parallel import Job
from keel.runs.search_space import Point

BATCH = 40
"""The number of runs after which a time limit is checked."""


@dataclass(frozen=True)
class PlannedRuns:
    """The runs that a part consists of."""

    specs: dict[str, list[Spec]]
    """By method. Before a method's search has ended, these have the default hyper-parameters."""
    points: dict[str, Point]
    """The hyper-parameters that ended searches chose, by method."""
    searches: dict[str, Search]
    """The searches, ended or not, by method."""

    @property
    def unended(self) -> list[Search]:
        """The searches that have not ended."""
        return [search for method, search in self.searches.items() if method not in self.points]


def plan_runs(part: Part, index: RunIndex, seeds: int | None = None) -> PlannedRuns:
    """Return the runs of a part, with the hyper-parameters that the searches below the folder of `index` chose."""
    specs, points, searches = {}, {}, {}
    for method in part.methods:
        if part.trials is not None:
            searches[method] = Search(part, method, index.path, index.reported.searches if index.reported else None)
            point = searches[method].best()
            if point is not None:
                points[method] = point
        specs[method] = part.specs(method, seeds, points.get(method))
    return PlannedRuns(specs, points, searches)


def run_parts(
    parts: list[Part],
    out: Path,
    seeds: int | None = None,
    quiet: bool = False,
    until: float | None = None,
    reported: Results | None = None,
) -> bool:
    """Run the searches and the runs of these parts that have not finished below `out`.

    Args:
        until: The time (`time.monotonic`) after which no further run is started.
        reported: Results that count as finished runs.

    Returns:
        Whether everything has finished.
    """
    index = RunIndex(out, reported)
    planned = [plan_runs(part, index, seeds) for part in parts]
    check_tasks(spec for plan in planned for specs in plan.specs.values() for spec in index.unfinished(specs))
    searches = {search.file: search for plan in planned for search in plan.unended}
    while searches:
        owners = {job.path: search for search in searches.values() for job in search.missing()}
        jobs = [job for search in searches.values() for job in search.missing()]
        for batch in _batches(jobs, until):
            for job in batch:
                remove_older(job)
            folders = run_jobs(batch, quiet)
            for search in searches.values():
                search.keep([folder for folder in folders if owners[folder.path] is search])
        if _is_over(until):
            return False
        searches = {file: search for file, search in searches.items() if search.missing()}
    specs = [spec for part in parts for specs in plan_runs(part, index, seeds).specs.values() for spec in specs]
    in_order = sorted(index.unfinished(specs), key=lambda spec: spec.seed)  # methods are compared seed by seed
    for batch in _batches([index.job(spec) for spec in in_order], until):
        run_jobs(batch, quiet)
    return not RunIndex(out, reported).unfinished(specs)


def _batches(jobs: list[Job], until: float | None) -> Iterator[list[Job]]:
    """Return the jobs in batches, no further one after the time `until`; without it, all jobs are one batch."""
    size = len(jobs) if until is None else BATCH
    for start in range(0, len(jobs), size or 1):
        if _is_over(until):
            return
        yield jobs[start : start + size]


def _is_over(until: float | None) -> bool:
    return until is not None and monotonic() >= until


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
