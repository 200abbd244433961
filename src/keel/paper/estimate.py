"""The cost of a recipe before it runs: how many of its runs have finished, and what the missing ones would take."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from keel.config.schema import Spec
from keel.errors import KeelError
from keel.paper.execution import missing_data, plan_runs
from keel.paper.recipes import SCALES, Part, all_recipes, rough_seconds
from keel.paper.run_index import RunIndex, experiment_key, spec_fields
from keel.paper.trials import Search
from keel.report.tables import Sheet
from keel.runs.estimate import estimate
from keel.units import duration, size

Figures = dict[str, Any]
PROTOCOL = (
    *("rounds", "data.clients", "participation.rate", "local.epochs", "local.steps", "local.batch"),
    *("local.weight_decay", "local.clip", "server.weighting", "evaluation.every", "evaluation.last"),
)
"""The fields that describe how a part is run, apart from learning rates and the algorithms' hyper-parameters."""
COLUMNS = ["method", "runs", "rounds", "bytes", "disk", "RAM", "time per run", "hyper-parameters"]


def list_recipes(out: Path) -> list[Figures]:
    """Return every recipe, and at each scale its runs, the finished ones, rounds, wall-clock time and missing data."""
    index = RunIndex(out)
    rows = []
    for recipe in all_recipes().values():
        scales = {}
        for scale in SCALES:
            if scale == "paper" and not recipe.number:
                continue
            parts = recipe.parts(scale)
            missing = missing_data(parts)
            scales[scale] = {**count_runs(parts, index), "needs": list(missing), "missing": list(missing.values())}
        fields = recipe.model_dump(include={"name", "kind", "number", "label", "title", "shows"})
        rows.append({**fields, "scales": scales})
    return rows


def format_listing(rows: list[Figures], out: Path) -> list[tuple[int, str]]:
    """Return the lines of `keel paper list`, each with its indent."""
    lines = []
    for row in rows:
        lines += [(0, row["name"]), (4, f"{row['number'] or 'Not in the paper'}: {row['shows']}")]
        if any(counts["runs"] for counts in row["scales"].values()):
            lines += [(4, f"{scale}: {_format_counts(counts)}") for scale, counts in row["scales"].items()]
    missing = dict.fromkeys(line for row in rows for counts in row["scales"].values() for line in counts["missing"])
    legend = (
        f"Finished runs (in {out}) of all runs that a recipe needs. Times are rough estimates of training on two "
        'cores, without start-up and rendering; --dry-run measures. "At least": for some models no time has been '
        "measured. "
        "docs/reproduction.md has the results at desktop scale."
    )
    return [*lines, (0, ""), (0, legend), *((0, f"Missing: {line}") for line in missing)]


def estimate_parts(parts: list[Part], out: Path, seeds: int | None, report: Callable[[str], None]) -> list[Figures]:
    """Return for each method of each part what its missing runs take, measured by a few client rounds.

    Measuring takes a while; `report` is called with the name of a method before it is measured.
    """
    index, counted = RunIndex(out), set[Path]()
    rows = []
    for part in parts:
        planned = plan_runs(part, index, seeds)
        for method, specs in planned.specs.items():
            missing = index.unfinished(specs)
            search = _search_specs(planned.searches.get(method), counted)
            report(f"{part.title}: {method}")
            row: Figures = {"part": part.title, "method": method, "runs": len(missing), "searched": len(search)}
            row["fields"] = spec_fields(specs[0])
            row["times"] = sum(spec.rounds for spec in [*missing, *search]) / specs[0].rounds
            rows.append(row | (_estimate(specs[0]) if row["times"] else {"seconds": 0.0}))
    return rows


def _estimate(spec: Spec) -> Figures:
    """Return the estimate of one run; if its data set is missing, the rough time and the reason."""
    try:
        return asdict(estimate(spec))
    except KeelError as error:
        seconds = rough_seconds(spec)
        return {"missing": str(error), "rounds": spec.rounds, **({} if seconds is None else {"seconds": seconds})}


def estimate_sheets(rows: list[Figures]) -> list[Sheet]:
    """Return a table for each part, titled with the fields that its methods share."""
    sheets = []
    for title in dict.fromkeys(row["part"] for row in rows):
        part = [row for row in rows if row["part"] == title]
        shared = _format_shared([row["fields"] for row in part])
        sheets.append(Sheet(f"{title}: {shared}", COLUMNS, [_estimate_cells(row) for row in part], {}))
    return sheets


def _estimate_cells(row: Figures) -> list[str]:
    sizes = [size(row[name]) if name in row else "-" for name in ("bytes", "disk", "ram")]
    runs = f"{row['runs']}" + (f" + {row['searched']} for the search" if row["searched"] else "")
    rounds = f"{row['rounds']:,}" if "rounds" in row else "-"
    time = duration(row["seconds"]) if "seconds" in row else "-"
    return [row["method"], runs, rounds, *sizes, time, _format_hyperparameters(row["fields"])]


def _format_hyperparameters(fields: Figures) -> str:
    """Return learning rates and hyper-parameters; those of an unfinished search are the defaults."""
    names = ["local.lr", "server.lr", *(name for name in fields if name.startswith("algorithm."))]
    return ", ".join(f"{name.removeprefix('algorithm.')} {fields[name]}" for name in names if name != "algorithm.name")


def _format_shared(tables: list[Figures]) -> str:
    """Return the fields of PROTOCOL that are equal in all tables."""
    shared = [name for name in PROTOCOL if name in tables[0] and len({str(table.get(name)) for table in tables}) == 1]
    return ", ".join(f"{name} {tables[0][name]}" for name in shared)


def summarise_estimate(rows: list[Figures]) -> str:
    """Return the total number of runs, their wall-clock time, and the missing data sets."""
    runs = sum(row["runs"] + row["searched"] for row in rows)
    seconds = sum(row["times"] * row.get("seconds", 0.0) for row in rows)
    qualifier = "at least " if any("seconds" not in row for row in rows) else "about "
    time = f"{qualifier}{duration(seconds)} on this machine" if seconds else "no time has been measured"
    lines = [f"{runs} runs: {time}."] if runs else ["All runs have finished."]
    return "\n".join([*lines, *dict.fromkeys(f"Missing: {row['missing']}" for row in rows if "missing" in row)])


def count_runs(parts: list[Part], index: RunIndex) -> Figures:
    """Return the number of runs, of finished runs and of search runs, and the rounds and seconds of the missing ones.

    `seconds` covers the models with a measured time and is None if there are none; `unmeasured` counts the other runs.
    """
    specs: list[Spec] = []
    search: list[Spec] = []
    counted: set[Path] = set()
    for part in parts:
        planned = plan_runs(part, index)
        specs += [spec for method_specs in planned.specs.values() for spec in method_specs]
        search += [spec for each in planned.searches.values() for spec in _search_specs(each, counted)]
    missing = index.unfinished(specs)
    times = [rough_seconds(spec) for spec in [*missing, *search]]
    measured = [time for time in times if time is not None]
    runs = len({experiment_key(spec) for spec in specs})
    return {
        "runs": runs,
        "there": runs - len(missing),
        "searched": len(search),
        "rounds": sum(spec.rounds for spec in [*missing, *search]),
        "seconds": sum(measured) if measured or not times else None,
        "unmeasured": len(times) - len(measured),
    }


def _search_specs(search: Search | None, counted: set[Path]) -> list[Spec]:
    """Return a spec for each run that a search has left, all at its first point: the others are not known yet.

    Two parts may share a search; one that is in `counted` has none left.
    """
    if search is None or search.file in counted:
        return []
    counted.add(search.file)
    return [search.first] * search.runs_left()


def _format_counts(counts: Figures) -> str:
    if not counts["runs"]:
        return "no runs"
    text = f"{counts['there']} of {counts['runs']} runs"
    if counts["there"] == counts["runs"] and not counts["searched"]:
        return text
    if counts["searched"]:
        text += f" and {counts['searched']} for the search"
    if counts["seconds"] is None:
        text += ", time not measured"
    else:
        text += f", {'at least' if counts['unmeasured'] else 'about'} {duration(counts['seconds'])}"
    return text + (f"; data missing: {', '.join(counts['needs'])} (see below)" if counts["needs"] else "")
