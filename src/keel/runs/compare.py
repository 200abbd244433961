"""Run a comparison: methods by seeds, and by the values of any other fields."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from keel.algorithms import Algorithm
from keel.config.defaults import check_names, make_spec
from keel.config.fields import put_field
from keel.config.overrides import flatten, merge
from keel.config.schema import CUSTOM, Spec, algorithm_table
from keel.engines import cores
from keel.errors import KeelError, unknown_name
from keel.runs.folder import RunFolder
from keel.runs.objects import RunObjects
from keel.runs.parallel import Job, run_all
from keel.runs.progress import show_progress
from keel.runs.search_space import Point, check_number_of_runs, file_name, name_of, parse_over

Method = str | Algorithm
"""The name of an algorithm, "module:Class", or an algorithm with its hyper-parameters."""


def jobs_of(
    table: dict[str, Any], methods: list[str], seeds: int, over: list[str], out: Path, same: Iterable[str] = ()
) -> list[Job]:
    """Return the jobs of a command; see `make_jobs`.

    Args:
        methods: Names of algorithms; by default the one in `table`.
        over: Fields with values, as in "data.alpha=0,10000".
    """
    axes = parse_over(over)
    check_names(table)
    methods = methods or ([table["algorithm"]["name"]] if "name" in table.get("algorithm", {}) else [])
    if not methods:
        raise KeelError("--methods is required; name algorithms with commas between, as in fedavg,ghbm,fedhbm")
    return make_jobs(table, [(None, name) for name in methods], seeds, axes, out, same, "--")


def make_jobs(
    table: dict[str, Any],
    methods: Sequence[tuple[str | None, Method]],
    seeds: int | Sequence[int],
    over: Mapping[str, Any],
    out: Path,
    same: Iterable[str] = (),
    dashes: str = "",
) -> list[Job]:
    """Return a job for each method, each combination of values and each seed.

    Args:
        table: The spec that all runs share. What it says of a named algorithm applies to that method only.
        methods: The methods, each with its label or None.
        seeds: The seeds, or their number, starting from the seed in `table`.
        over: Fields with lists of values.
        out: Folder of the run folders.
        same: Fields in which every method takes the value of the first method, not its own default.
        dashes: What comes before the name of an argument in an error: "--" for a command.
    """
    _check_axes(over, dashes)
    seeds = _seeds(seeds, table.get("seed", 0), dashes)
    check_number_of_runs(len(methods) * prod(map(len, over.values())) * len(seeds))
    points = [dict(zip(over, values, strict=True)) for values in product(*over.values())]
    tables = [[_method_table(table, method, point) for point in points] for _, method in methods]
    for field in same:
        for of_methods in zip(*tables, strict=True):
            _equalise(field, of_methods, dashes)
    jobs = []
    for (label, method), of_points in zip(methods, tables, strict=True):
        for point, whole in zip(points, of_points, strict=True):
            for seed in seeds:
                spec = make_spec({**whole, "seed": seed})
                jobs.append(Job(spec, out / _folder_name(spec, point, label or _name_of(method)), label))
    names = [job.path.name for job in jobs]
    if len(set(names)) < len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        hint = "" if dashes else "; distinguish methods of one name by labels, as in {'short': ..., 'long': ...}"
        both = f"{dashes}methods and {dashes}over"
        raise KeelError(f"{both} give {repeated} twice; give each method and each value once{hint}")
    return jobs


def _seeds(seeds: int | Sequence[int], first: Any, dashes: str) -> Sequence[int]:
    if isinstance(seeds, int) and not isinstance(seeds, bool) and seeds > 0:
        if not isinstance(first, int):
            raise KeelError(f"seed must be an integer, the first of the seeds (got {first!r})")
        check_number_of_runs(seeds)
        return range(first, first + seeds)
    if not isinstance(seeds, Sequence) or isinstance(seeds, str) or len(seeds) == 0 or len({*seeds}) < len(seeds):
        raise KeelError(f"{dashes}seeds must be a number above 0 or a list of distinct seeds (got {seeds!r})")
    return seeds


def baseline_of(name: str, jobs: list[Job], option: str = "--target") -> str:
    """Return the algorithm that --target names, as the specs of its runs name it, or the label of a method.

    Args:
        name: The name in the specs, as in "module:Class", the attribute `name` of the algorithm's class, or a label.
        option: The option or argument, which an error names.
    """
    named = {_reference(job): job.spec.algorithm.name for job in jobs}
    labels = {job.title for job in jobs if job.title is not None}
    if name in named or name in labels:
        return name
    matches = [reference for reference, of_class in named.items() if of_class == name]
    if not matches:
        raise unknown_name(option, name, {*named, *named.values(), *labels})
    if len(matches) > 1:
        raise KeelError(f"{option} {name!r} is ambiguous; name one of {', '.join(matches)}")
    return matches[0]


def _reference(job: Job) -> str:
    """The name by which a comparison finds an algorithm: that in the spec, or its title if that is "custom"."""
    name = algorithm_table(job.spec.algorithm)["name"]
    return (job.title or job.spec.algorithm.title) if name == CUSTOM else name


def _check_axes(over: Mapping[str, Any], dashes: str) -> None:
    """Raise a KeelError unless each field has a list of values and may vary."""
    for field, values in over.items():
        if not isinstance(values, Sequence) or isinstance(values, str) or not values:
            raise KeelError(
                f"{dashes}over requires a list of values for {field}, not a range: {field}=value,value,..."
                if dashes
                else f"over requires a list of values for {field}, as in {{{field!r}: [0.1, 0.3]}} (got {values!r})"
            )
        if field in ("seed", "algorithm.name"):
            option = "seeds" if field == "seed" else "methods"
            raise KeelError(f"{dashes}over does not accept {field}; use {dashes}{option}")


def _method_table(table: dict[str, Any], method: Method, point: Point) -> dict[str, Any]:
    """Return the spec of one method at one combination of values, not yet resolved."""
    if isinstance(method, Algorithm):
        result = merge({**table, "algorithm": method})
    else:
        algorithm = table.get("algorithm", {})
        settings = algorithm if algorithm.get("name", method) == method else {}
        result = merge({**table, "algorithm": {**settings, "name": method}})
    for field, value in point.items():
        put_field(result, field, value)
    return result


def _equalise(field: str, tables: Sequence[dict[str, Any]], dashes: str) -> None:
    """Give the field the value that it has in the first spec, in all of them."""
    if field in ("seed", "algorithm.name"):
        option = f"{dashes}same"
        raise KeelError(
            f"{option} does not accept {field}; use {option} with another field of the spec, as in local.lr"
        )
    first = make_spec(tables[0])
    reference = flatten(first.model_dump())
    if field not in reference:
        raise unknown_name(f"{dashes}same", field, reference)
    for table in tables:
        put_field(table, field, reference[field])
        spec = make_spec(table)
        if flatten(spec.model_dump()).get(field) != reference[field]:
            names = f"{first.algorithm.name}'s value is not valid for {spec.algorithm.name}"
            fix = f"give one with --set {field}=" if dashes else f"set {field} in spec"
            raise KeelError(f"{dashes}same {field}: {names}; {fix}")


def _name_of(method: Method) -> str | None:
    """The name in the folders of an algorithm whose class cannot be imported; None if the spec names it."""
    if isinstance(method, Algorithm) and algorithm_table(method)["name"] == CUSTOM:
        return type(method).name
    return None


def run_jobs(
    jobs: list[Job], quiet: bool, workers: int | None = None, objects: RunObjects | None = None
) -> list[RunFolder]:
    """Run the jobs that have not finished, and return the folders of all.

    Args:
        workers: The number of processes; by default one per core.
        objects: What a call in Python passes to each run; None for a command.
    """
    titles = [job.title or job.spec.algorithm.title for job in jobs]
    groups = [job.path.name.rpartition("-seed")[0] for job in jobs]
    labels = titles if len(set(titles)) == len(set(groups)) else groups
    names = [f"seed {job.spec.seed}" for job in jobs]
    rounds, paths = [job.spec.rounds for job in jobs], [job.path for job in jobs]
    with show_progress(labels, rounds, quiet, names, paths) as watch:
        run_all(jobs, workers or cores(), watch, objects)
    return [RunFolder.open(job.path) for job in jobs]


def _folder_name(spec: Spec, point: Point, method: str | None) -> str:
    """Return the name of a run folder: the label of the spec, or of the method in it, with the values of the point."""
    label, _, seed = spec.label.rpartition("-")
    if method is not None:
        names = (spec.data.name, spec.model.name)
        label = "-".join([*(name.split(":")[-1].lower() for name in names), file_name(method)])
    return "-".join([label, *([name_of(point)] if point else []), seed])
