"""Finds the runs of a recipe by what they are, and makes those that are missing."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from keel.data.catalog import CATALOG, load
from keel.errors import KeelError
from keel.paper.recipes import Part
from keel.runs.batch import Job
from keel.runs.comparing import run_jobs
from keel.runs.folder import RunFolder
from keel.runs.search import Plan, Point
from keel.runs.spec import Spec, flatten
from keel.runs.sweep import run_sweep
from keel.task import check_tasks


class Shelf:
    """The runs below a folder, each found by its experiment, whichever recipe had it made.

    A run that has ended is a result, whatever version of Keel made it; its folder says which.
    """

    def __init__(self, path: Path):
        self.path = path
        self.known = {key(folder.spec): folder for folder in _folders(path / "runs")}

    def find(self, spec: Spec) -> RunFolder | None:
        """The run of `spec`, however far it came."""
        return self.known.get(key(spec))

    def job(self, spec: Spec) -> Job:
        """Where the run of `spec` is, or will be."""
        there = self.find(spec)
        name = f"{spec.label}-{sha256(key(spec).encode()).hexdigest()[:8]}"
        return Job(spec, there.path if there else self.path / "runs" / name)

    def sweep(self, plan: Plan) -> Path:
        """The folder of a search that has not ended."""
        digest = sha256(json.dumps([plan.table, plan.described()], sort_keys=True).encode()).hexdigest()[:8]
        return self.path / "sweeps" / f"{_name(plan)}-{digest}"

    def point(self, plan: Plan) -> Point | None:
        """The best point of a search that has ended; its first where all diverged, so that the runs do as well."""
        for file in sorted((self.path / "sweeps").glob(f"{_name(plan)}-*/sweep.json")):
            told = json.loads(file.read_text(encoding="utf-8"))
            asked = {**plan.described(), "base": json.loads(key(plan.base))}
            if all(told.get(name) == asked[name] for name in ("base", "fields", "seeds", "on")):
                return next((row["fields"] for row in told["points"] if row["best"]), told["points"][0]["fields"])
        return None


@dataclass(frozen=True)
class Wanted:
    """The runs that a part is made of, by method; those of a method whose fields are not yet found are a guess."""

    specs: dict[str, list[Spec]]
    points: dict[str, Point]
    searches: dict[str, Plan]
    """Those that have not ended."""


def wanted(part: Part, shelf: Shelf, seeds: int | None = None) -> Wanted:
    specs, points, searches = {}, {}, {}
    for method in part.methods:
        plan = part.plan(method)
        point = shelf.point(plan) if plan is not None else None
        if plan is not None and point is None:
            searches[method] = plan
        if point is not None:
            points[method] = point
        specs[method] = part.specs(method, seeds, point)
    return Wanted(specs, points, searches)


def left(specs: Iterable[Spec], shelf: Shelf) -> list[Spec]:
    """Those that have not ended, each once."""
    found: dict[str, Spec] = {}
    for spec in specs:
        folder = shelf.find(spec)
        if folder is None or not folder.ended:
            found[key(spec)] = spec
    return list(found.values())


def run_parts(parts: list[Part], out: Path, seeds: int | None = None, quiet: bool = False) -> None:
    """Searches what is to be searched, then runs what is missing; what is there is left as it is."""
    shelf = Shelf(out)
    first = [wanted(part, shelf, seeds) for part in parts]
    check_tasks(spec for each in first for specs in each.specs.values() for spec in left(specs, shelf))
    for each in first:
        for plan in each.searches.values():
            run_sweep(plan, shelf.sweep(plan), quiet)
    specs = [spec for part in parts for specs in wanted(part, shelf, seeds).specs.values() for spec in specs]
    if missing := left(specs, shelf):
        run_jobs([shelf.job(spec) for spec in missing], quiet)


def missing_data(parts: list[Part]) -> dict[str, str]:
    """Of the data sets that parts need, those whose files are not there, each with a line that says how to get them."""
    names = dict.fromkeys(part.spec.get("data", {}).get("name", "digits") for part in parts)
    lines = {}
    for name in names:
        if CATALOG[name].missing():
            try:
                load(name, {})
            except KeelError as error:
                lines[name] = str(error)
    return lines


def _name(plan: Plan) -> str:
    """A search's folder without what tells it from others of the same data, model and algorithm."""
    return plan.base.label.rpartition("-seed")[0]


def _folders(path: Path) -> Iterable[RunFolder]:
    for file in sorted(path.glob("*/spec.toml")):
        yield RunFolder(file.parent)


def key(spec: Spec) -> str:
    """What tells experiments apart."""
    return json.dumps(spec.experiment, sort_keys=True)


def fields_of(spec: Spec) -> dict[str, Any]:
    """Every field that says how a run is made, by its dotted name; without the seed."""
    return flatten(spec.model_dump(exclude_none=True, exclude={"seed", "tracking"}))
