"""Run a comparison: methods by seeds, and by the values of any other fields."""

from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from keel.config.defaults import check_names, make_spec
from keel.config.overrides import flatten, merge, put
from keel.config.schema import Spec
from keel.engines import cores
from keel.errors import KeelError, unknown_name
from keel.runs.folder import RunFolder
from keel.runs.parallel import Job, run_all
from keel.runs.progress import show_progress
from keel.runs.search_space import Point, name_of, parse_over


def jobs_of(
    table: dict[str, Any], methods: list[str], seeds: int, over: list[str], out: Path, same: Iterable[str] = ()
) -> list[Job]:
    """Return a job for each method, each combination of values and each seed.

    Args:
        table: The spec that all runs share. What it says of a named algorithm applies to that method only.
        methods: Names of algorithms; by default the one in `table`.
        seeds: Number of seeds, starting from the seed in `table`.
        over: Fields with values, as in "data.alpha=0,10000".
        out: Folder of the run folders.
        same: Fields in which every method takes the value of the first method, not its own default.
    """
    axes = _axes(over)
    check_names(table)
    methods = methods or ([table["algorithm"]["name"]] if "name" in table.get("algorithm", {}) else [])
    if not methods:
        raise KeelError("--methods is required; name algorithms with commas between, as in fedavg,ghbm,fedhbm")
    first = table.get("seed", 0)
    if not isinstance(first, int):
        raise KeelError(f"seed must be an integer, the first of the seeds (got {first!r})")
    points = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    tables = [[_method_table(table, name, point) for point in points] for name in methods]
    for field in same:
        for of_methods in zip(*tables, strict=True):
            _equalise(field, of_methods)
    jobs = []
    for of_points in tables:
        for point, whole in zip(points, of_points, strict=True):
            for seed in range(first, first + seeds):
                spec = make_spec({**whole, "seed": seed})
                jobs.append(Job(spec, out / _folder_name(spec, point)))
    names = [job.path.name for job in jobs]
    if len(set(names)) < len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise KeelError(f"--methods and --over give {repeated} twice; give each method and each value once")
    return jobs


def baseline_of(name: str, jobs: list[Job]) -> str:
    """Return the algorithm that --target names, as the specs of its runs name it.

    Args:
        name: The name in the specs, as in "module:Class", or the attribute `name` of the algorithm's class.
    """
    named = {job.spec.model_dump()["algorithm"]["name"]: job.spec.algorithm.name for job in jobs}
    if name in named:
        return name
    matches = [reference for reference, of_class in named.items() if of_class == name]
    if not matches:
        raise unknown_name("--target", name, {*named, *named.values()})
    if len(matches) > 1:
        raise KeelError(f"--target {name!r} is ambiguous; name one of {', '.join(matches)}")
    return matches[0]


def _axes(over: list[str]) -> dict[str, list[Any]]:
    """Return the values of each field of --over."""
    axes: dict[str, list[Any]] = {}
    for field, values in parse_over(over).items():
        if not isinstance(values, list):
            raise KeelError(f"--over requires a list of values for {field}, not a range: {field}=value,value,...")
        if field in ("seed", "algorithm.name"):
            option = "--seeds" if field == "seed" else "--methods"
            raise KeelError(f"--over does not accept {field}; use {option}")
        axes[field] = values
    return axes


def _method_table(table: dict[str, Any], name: str, point: Point) -> dict[str, Any]:
    """Return the spec of one method at one combination of values, not yet resolved."""
    algorithm = table.get("algorithm", {})
    settings = algorithm if algorithm.get("name", name) == name else {}
    result = merge({**table, "algorithm": {**settings, "name": name}})
    for field, value in point.items():
        put(result, field, value)
    return result


def _equalise(field: str, tables: Sequence[dict[str, Any]]) -> None:
    """Give the field the value that it has in the first spec, in all of them."""
    if field in ("seed", "algorithm.name"):
        raise KeelError(f"--same does not accept {field}; use --same with another field of the spec, as in local.lr")
    reference = flatten(make_spec(tables[0]).model_dump())
    if field not in reference:
        raise unknown_name("--same", field, reference)
    for table in tables:
        put(table, field, reference[field])
        if flatten(make_spec(table).model_dump()).get(field) != reference[field]:
            name, first = table["algorithm"]["name"], tables[0]["algorithm"]["name"]
            raise KeelError(f"--same {field}: {first}'s value is not valid for {name}; give one with --set {field}=")


def run_jobs(jobs: list[Job], quiet: bool) -> list[RunFolder]:
    """Run the jobs that have not finished, and return the folders of all."""
    titles = [job.spec.algorithm.title for job in jobs]
    groups = [job.path.name.rpartition("-seed")[0] for job in jobs]
    labels = titles if len(set(titles)) == len(set(groups)) else groups
    names = [f"seed {job.spec.seed}" for job in jobs]
    rounds, paths = [job.spec.rounds for job in jobs], [job.path for job in jobs]
    with show_progress(labels, rounds, quiet, names, paths) as watch:
        run_all(jobs, cores(), watch)
    return [RunFolder.open(job.path) for job in jobs]


def _folder_name(spec: Spec, point: Point) -> str:
    """Return the name of a run folder: the label of the spec with the values of the point."""
    label, _, seed = spec.label.rpartition("-")
    return "-".join([label, *([name_of(point)] if point else []), seed])
