"""The result of a recipe: the numbers of its finished runs with their provenance, as result.json stores them."""

from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from keel.config.overrides import flatten
from keel.config.schema import Spec
from keel.errors import KeelError
from keel.paper.computed import COMPUTED
from keel.paper.execution import plan_runs
from keel.paper.printed import printed_value
from keel.paper.recipes import Part, Recipe, Scale
from keel.paper.run_index import RunIndex, spec_fields
from keel.paper.trials import Search
from keel.report.comparison import compare
from keel.report.method import Method
from keel.runs.folder import RunFolder

Result = dict[str, Any]
"""The content of result.json: a table or figure with its numbers."""
Row = dict[str, Any]

OLDER_MARK = "‡"
"""Marks what older code measured."""
CURVE_POINTS = 60
"""The number of points to which a curve is thinned."""
ENVIRONMENT = ("keel", "source_sha256", "python", "torch", "numpy", "processor", "cores")
"""The fields of environment.json that a result keeps."""


def make_result(recipe: Recipe, scale: Scale, index: RunIndex, seeds: int | None = None) -> Result:
    """Return the recipe with the numbers of its finished runs; the row of a method without one says so."""
    if recipe.view in COMPUTED:
        content = COMPUTED[recipe.view](recipe, scale)
    else:
        content = {"parts": [_part(recipe, part, index, seeds) for part in recipe.parts(scale)]}
    return {
        "name": recipe.name,
        "number": recipe.number,
        "title": recipe.title,
        "kind": recipe.kind,
        "view": recipe.view,
        "against": recipe.against,
        "finds": recipe.finds,
        "scale": scale,
        "command": f"keel paper run {recipe.name} --scale {scale}" + ("" if seeds is None else f" --seeds {seeds}"),
        **content,
    }


def fields_of(part: Row, row: Row) -> Row:
    """Return the settings of a row's runs by dotted name, without the seed."""
    return {**part["spec"], **row.get("settings", {})}


def cited(row: Row) -> str:
    """Return the row's label, marked if older code measured it."""
    return f"{row['label']} {OLDER_MARK}" if row.get("older") else row["label"]


def seed_values(row: Row) -> dict[int, float]:
    """Return the final accuracy of each seed; empty if a run did not finish."""
    finals = row.get("accuracy_seeds") or []
    return dict(zip(row.get("seed_numbers", range(len(finals))), finals, strict=True))


def _part(recipe: Recipe, part: Part, index: RunIndex, seeds: int | None) -> Row:
    planned = plan_runs(part, index, seeds)
    groups: dict[tuple[str, tuple[Any, ...]], list[Spec]] = {}
    for method, specs in planned.specs.items():
        for spec in specs:
            groups.setdefault((method, _values(part, spec)), []).append(spec)
    finished = {key: index.finished(specs) for key, specs in groups.items()}
    folders = [folder for group in finished.values() for folder in group]
    compared = _compare(folders)
    rows = [
        _row(recipe, part, method, values, specs, finished[method, values], compared, planned.searches.get(method))
        for (method, values), specs in groups.items()
    ]
    common, differing = _split_settings(specs[0] for specs in groups.values())
    for row, settings in zip(rows, differing, strict=True):
        row["settings"] = settings
    environments = [
        {name: value for name, value in folder.environment.items() if name in ENVIRONMENT} for folder in folders
    ]
    return {
        "title": part.title,
        "printed": part.printed,
        "rounds": next(iter(groups.values()))[0].rounds if groups else None,
        "seeds": seeds or part.seeds,
        "trials": part.trials,
        "tuned": part.how_tuned(),
        "spec": common,
        "environments": list({repr(environment): environment for environment in environments}.values()),
        "rows": rows,
    }


def _row(
    recipe: Recipe,
    part: Part,
    method: str,
    values: tuple[Any, ...],
    specs: list[Spec],
    folders: list[RunFolder],
    compared: dict[Path, tuple[Method, Row]],
    search: Search | None,
) -> Row:
    """Return the row of a method at one combination of values, from its finished runs."""
    spec, label = specs[0], _label(method, specs[0])
    row: Row = {
        "method": method,
        "label": label,
        "values": dict(zip(part.over, values, strict=True)),
        "runs": len(folders),
        "wanted": len(specs),
        "printed": printed_value("accuracy", part.printed, spec.algorithm.name),
        "printed_cost": printed_value("cost", part.printed, spec.algorithm.name),
        **({"guessed": True} if part.guesses(spec) else {}),
        **({} if search is None else _chosen(search)),
    }
    if folders:
        runs, numbers = _one_method(label, folders, compared)
        row |= {name: value for name, value in numbers.items() if name != "label"}
        row["seed_numbers"] = runs.seeds
        if recipe.kind == "figure":
            row["curve"] = _curve(runs)
        if spec.evaluation.deviation:
            row["deviation"] = _deviation(folders)
    return row


def _compare(folders: list[RunFolder]) -> dict[Path, tuple[Method, Row]]:
    """Return the method and the row of the comparison to which each folder belongs."""
    if not folders:
        return {}
    comparison = compare(folders)
    pairs = zip(comparison.methods, comparison.rows(), strict=True)
    return {run.path: (method, row) for method, row in pairs for run in method.runs}


def _one_method(label: str, folders: list[RunFolder], compared: dict[Path, tuple[Method, Row]]) -> tuple[Method, Row]:
    """Return the row that these runs form; raise if their tasks differ, as after a change of the data files."""
    rows = [compared[folder.path] for folder in folders]
    if len({id(method) for method, _ in rows}) > 1:
        paths = ", ".join(str(folder.path) for folder in folders)
        raise KeelError(
            f"--out: the seeds of {label} have different data, models or losses: {paths}; "
            "move the runs of the other data away"
        )
    return rows[0]


def _values(part: Part, spec: Spec) -> tuple[Any, ...]:
    fields = flatten(spec.model_dump())
    return tuple(fields[field] for field in part.over)


def _label(method: str, spec: Spec) -> str:
    """Return the algorithm's title with the method's overrides."""
    overrides = [field.removeprefix("algorithm.").removeprefix("local.") for field in method.split()[1:]]
    return " ".join([spec.algorithm.title, *overrides])


def _chosen(search: Search) -> Row:
    """Return the hyper-parameters that a search chose, its score, and the fields whose search is still open."""
    point, scores = search.best(), search.scores()
    if point is None:
        return {"trials": len(scores)}
    chosen = {"chosen": point, "trials": len(scores), "search_score": round(search.worst(point), 5)}
    return {**chosen, "open_fields": search.lattice.open_fields(point, scores)}


def _split_settings(specs: Iterable[Spec]) -> tuple[Row, list[Row]]:
    """Return the fields that all specs share, and the remaining fields of each; without the seed."""
    fields = [spec_fields(spec) for spec in specs]
    common = {k: v for k, v in fields[0].items() if all(other.get(k) == v for other in fields)} if fields else {}
    return common, [{k: v for k, v in spec.items() if k not in common} for spec in fields]


def _curve(method: Method) -> Row:
    """Return the accuracy over rounds, thinned evenly: mean, minimum and maximum over the seeds."""
    columns = np.unique(np.searchsorted(method.rounds, np.linspace(method.rounds[0], method.rounds[-1], CURVE_POINTS)))
    return {"rounds": method.rounds[columns].tolist(), **_bands(method.values[:, columns])}


def _deviation(folders: list[RunFolder]) -> Row:
    """Return for each tau the deviation over the rounds in which every run measured it.

    A diverged run has fewer such rounds. `second_half` covers the same rounds for every tau: the second half of those
    of the smallest tau, which is measured from the first round on.
    """
    histories = [{r["round"]: r["deviation"] for r in folder.records() if "deviation" in r} for folder in folders]
    shared = [t for t in histories[0] if all(t in history for history in histories)]
    result = {}
    for tau in dict.fromkeys(tau for t in shared for tau in histories[0][t]):
        rounds = [t for t in shared if tau in histories[0][t]]
        values = np.array([[history[t][tau] for t in rounds] for history in histories], dtype=np.float64)
        late = values[:, [t in shared[len(shared) // 2 :] for t in rounds]]
        seeds = late.mean(axis=1).tolist() if late.size else []
        result[tau] = {
            "rounds": rounds,
            **_bands(values),
            "second_half": fmean(seeds) if seeds else None,
            "second_half_seeds": seeds,
        }
    return result


def _bands(values: np.ndarray) -> Row:
    bands = {"mean": values.mean(0), "low": values.min(0), "high": values.max(0)}
    return {name: [round(float(value), 4) for value in band] for name, band in bands.items()}
