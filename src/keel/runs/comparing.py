"""The runs of a comparison: methods by seeds, by any other fields."""

from itertools import product
from pathlib import Path
from typing import Any

from keel.engines import cores
from keel.errors import KeelError
from keel.runs.batch import Job, run_all
from keel.runs.folder import RunFolder
from keel.runs.search import Point, name_of, parse_over
from keel.runs.spec import Spec, check_names, make_spec, merge, put
from keel.terminal import watching


def jobs_of(table: dict[str, Any], methods: list[str], seeds: int, over: list[str], out: Path) -> list[Job]:
    """A run for each method, each combination of values and each seed, in a folder named after them.

    What the table says of an algorithm holds for the method of that name alone. `over` has texts such as
    "data.alpha=0,10000".
    """
    axes = parse_over(over)
    for field, values in axes.items():
        if not isinstance(values, list):
            raise KeelError(f"--over: {field} has a range; accepted: {field}=value,value,...")
    check_names(table)
    given = table.get("algorithm", {})
    methods = methods or ([given["name"]] if "name" in given else [])
    if not methods:
        raise KeelError("--methods: none; accepted: algorithms with commas between, as in fedavg,ghbm,fedhbm")
    if "seed" in axes or "algorithm.name" in axes:
        raise KeelError("--over: seeds and algorithms; accepted: --seeds and --methods")
    first = table.get("seed", 0)
    if not isinstance(first, int):
        raise KeelError(f"seed: {first!r}; accepted: a whole number, the first of the seeds")
    jobs = []
    for name in methods:
        own = given if given.get("name", name) == name else {}
        for values in product(*axes.values()):
            point = dict(zip(axes, values, strict=True))
            for seed in range(first, first + seeds):
                whole = merge({**table, "algorithm": {**own, "name": name}, "seed": seed})
                for field, value in point.items():
                    put(whole, field, value)
                jobs.append(Job(spec := make_spec(whole), out / _name(spec, point)))
    paths = [job.path for job in jobs]
    if len(set(paths)) < len(paths):
        twice = next(path.name for path in paths if paths.count(path) > 1)
        raise KeelError(f"--methods, --over: {twice} is there twice; accepted: each method and each value once")
    return jobs


def run_jobs(jobs: list[Job], quiet: bool) -> list[RunFolder]:
    """The folders of all runs, those made that are missing."""
    titles = [job.spec.algorithm.title for job in jobs]
    groups = [job.path.name.rpartition("-seed")[0] for job in jobs]
    labels = titles if len(set(titles)) == len(set(groups)) else groups
    names = [f"seed {job.spec.seed}" for job in jobs]
    with watching(labels, [job.spec.rounds for job in jobs], quiet, names) as watch:
        run_all(jobs, cores(), watch)
    return [RunFolder.open(job.path) for job in jobs]


def _name(spec: Spec, point: Point) -> str:
    """A folder's name: the spec's label, with what sets it apart."""
    label, _, seed = spec.label.rpartition("-")
    return "-".join([label, *([name_of(point)] if point else []), seed])
