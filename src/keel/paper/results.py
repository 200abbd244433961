"""What the runs of a recipe gave, as text and numbers to keep: all that a rendering needs, and where it is from.

Read from run folders. Runs nothing.
"""

from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from keel.errors import KeelError
from keel.paper.printed import printed
from keel.paper.recipes import Item, Part, Scale
from keel.paper.references import MAKERS
from keel.paper.running import Shelf, fields_of, wanted
from keel.reporting.comparison import Comparison, Method, compare
from keel.runs.folder import RunFolder
from keel.runs.search import Point
from keel.runs.spec import Spec, flatten

Result = dict[str, Any]
"""A table or figure with its numbers: what result.json holds."""
Row = dict[str, Any]

POINTS = 60
"""Points of a curve that are kept."""
SURROUNDINGS = ("keel", "source_sha256", "python", "torch", "numpy", "processor", "cores")


def make(item: Item, scale: Scale, shelf: Shelf, seeds: int | None = None) -> Result:
    """The item with its numbers: of its parts what has ended of their runs (a row without one says so), or what
    needs no run.
    """
    if item.view in MAKERS:
        made = MAKERS[item.view](item, scale)
    else:
        made = {"parts": [_part(item, part, shelf, seeds) for part in item.parts(scale)]}
    return {
        "name": item.name,
        "number": item.number,
        "title": item.title,
        "kind": item.kind,
        "view": item.view,
        "against": item.against,
        "finds": item.finds,
        "scale": scale,
        "command": f"keel paper run {item.name} --scale {scale}" + ("" if seeds is None else f" --seeds {seeds}"),
        **made,
    }


def _part(item: Item, part: Part, shelf: Shelf, seeds: int | None) -> Row:
    asked = wanted(part, shelf, seeds)
    groups: dict[tuple[str, tuple[Any, ...]], list[Spec]] = {}
    for method, specs in asked.specs.items():
        for spec in specs:
            groups.setdefault((method, _values(part, spec)), []).append(spec)
    ended = {key: _ended(specs, shelf) for key, specs in groups.items()}
    folders = [folder for some in ended.values() for folder in some]
    comparison = compare(folders) if folders else None
    numbers = _numbers(comparison)
    rows = []
    for (method, values), specs in groups.items():
        there = ended[method, values]
        label = _label(method, specs[0])
        found = _one(label, there, numbers) if there else None
        row: Row = {
            "method": method,
            "label": label,
            "values": dict(zip(part.over, values, strict=True)),
            "runs": len(there),
            "wanted": len(specs),
            "printed": printed("accuracy", part.printed, specs[0].algorithm.name),
            "printed_cost": printed("cost", part.printed, specs[0].algorithm.name),
            **({"guessed": True} if part.guesses(specs[0]) else {}),
            **(_searched(part, method, asked.points[method]) if method in asked.points else {}),
            **({} if found is None else {name: told for name, told in found[1].items() if name != "label"}),
        }
        if found is not None and item.kind == "figure":
            row["curve"] = _curve(found[0])
        if found is not None and specs[0].evaluation.deviation:
            row["deviation"] = _deviation(there)
        rows.append(row)
    common, own = _settings(specs[0] for specs in groups.values())
    for row, settings in zip(rows, own, strict=True):
        row["settings"] = settings
    environments = {repr(e): e for e in (_surroundings(folder) for folder in folders)}
    return {
        "title": part.title,
        "printed": part.printed,
        "rounds": next(iter(groups.values()))[0].rounds if groups else None,
        "seeds": seeds or part.seeds,
        "grid": part.grid,
        "tuned": part.how_tuned(),
        "spec": common,
        "environments": list(environments.values()),
        "rows": rows,
    }


def _ended(specs: list[Spec], shelf: Shelf) -> list[RunFolder]:
    found = (shelf.find(spec) for spec in specs)
    return [folder for folder in found if folder is not None and folder.ended]


def _numbers(comparison: Comparison | None) -> dict[Path, tuple[Method, Row]]:
    """The rows of a comparison by the folders of their runs."""
    if comparison is None:
        return {}
    pairs = zip(comparison.methods, comparison.rows(), strict=True)
    return {folder.path: (method, row) for method, row in pairs for folder in method.folders}


def _one(label: str, there: list[RunFolder], numbers: dict[Path, tuple[Method, Row]]) -> tuple[Method, Row]:
    """The row that these runs make together; refused where they are not of one task, as after data were changed."""
    found = [numbers[folder.path] for folder in there]
    if len({id(method) for method, _ in found}) > 1:
        folders = ", ".join(str(folder.path) for folder in there)
        accepted = "runs of the same data, model and loss (move those of the other data away)"
        raise KeelError(f"--out: the seeds of {label} are not of one task: {folders}; accepted: {accepted}")
    return found[0]


def _values(part: Part, spec: Spec) -> tuple[Any, ...]:
    flat = flatten(spec.model_dump())
    return tuple(flat[field] for field in part.over)


def _label(method: str, spec: Spec) -> str:
    """The algorithm's name as people write it, with what sets this one apart."""
    own = [field.removeprefix("algorithm.").removeprefix("local.") for field in method.split()[1:]]
    return " ".join([spec.algorithm.title, *own])


def _searched(part: Part, method: str, point: Point) -> Row:
    """The fields that a search chose, and those of them that are the first or last of what it had to choose from."""
    plan = part.plan(method)
    assert plan is not None
    ranges = {field: values for field, values in plan.axes.items() if isinstance(values, list) and len(values) > 2}
    ends = [field for field, values in ranges.items() if point[field] in (min(values), max(values))]
    return {"chosen": point, "at_the_edge": ends}


def _settings(specs: Iterable[Spec]) -> tuple[Row, list[Row]]:
    """What all specs share, and what each has otherwise; without the seed."""
    flat = [fields_of(spec) for spec in specs]
    common = {k: v for k, v in flat[0].items() if all(other.get(k) == v for other in flat)} if flat else {}
    return common, [{k: v for k, v in one.items() if k not in common} for one in flat]


def _surroundings(folder: RunFolder) -> Row:
    known = folder.environment
    return {name: known[name] for name in SURROUNDINGS}


def _curve(method: Method) -> Row:
    """Accuracy over rounds, thinned evenly: mean, lowest and highest over the seeds."""
    kept = np.unique(np.searchsorted(method.rounds, np.linspace(method.rounds[0], method.rounds[-1], POINTS)))
    values = method.accuracy[:, kept]
    return {"rounds": method.rounds[kept].tolist(), **_bands(values)}


def _deviation(folders: list[RunFolder]) -> Row:
    """For each tau over the rounds in which it was measured in every run; one that diverged has fewer of them.

    The second half is the same for all: of the rounds of the smallest tau, which is measured from the first one on.
    """
    histories = [{r["round"]: r["deviation"] for r in folder.records() if "deviation" in r} for folder in folders]
    shared = [t for t in histories[0] if all(t in history for history in histories)]
    found = {}
    for tau in dict.fromkeys(tau for t in shared for tau in histories[0][t]):
        rounds = [t for t in shared if tau in histories[0][t]]
        values = np.array([[h[t][tau] for t in rounds] for h in histories], dtype=np.float64)
        late = values[:, [t in shared[len(shared) // 2 :] for t in rounds]]
        found[tau] = {"rounds": rounds, **_bands(values), "second_half": fmean(late.ravel()) if late.size else None}
    return found


def _bands(values: np.ndarray) -> Row:
    bands = {"mean": values.mean(0), "low": values.min(0), "high": values.max(0)}
    return {name: [round(float(value), 4) for value in band] for name, band in bands.items()}
