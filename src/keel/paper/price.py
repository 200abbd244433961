"""What a table or figure takes: how many of its runs are there, and what those that are missing would cost."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from keel.errors import KeelError
from keel.paper.recipes import SCALES, Part, items, seconds_of
from keel.paper.running import Shelf, key, left, missing_data, wanted
from keel.reporting.tables import Sheet
from keel.runs.price import price
from keel.runs.search import Plan
from keel.runs.spec import Spec
from keel.units import duration, size

Figures = dict[str, Any]


def listing(out: Path) -> list[Figures]:
    """Every table and figure, and at each scale its runs, those that are there, rounds, time and missing data."""
    shelf = Shelf(out)
    rows = []
    for item in items().values():
        scales = {}
        for scale in SCALES:
            parts = item.parts(scale)
            if scale == "paper" and not item.number:
                continue
            scales[scale] = {**_counted(parts, shelf), "missing": missing_data(parts)}
        told = item.model_dump(include={"name", "kind", "number", "label", "title", "shows"})
        rows.append({**told, "scales": scales})
    return rows


def listing_lines(rows: list[Figures], out: Path) -> list[str]:
    """Three lines for each, and what is missing for them."""
    lines = []
    for row in rows:
        costs = "; ".join(f"{scale}: {_words(told)}" for scale, told in row["scales"].items())
        number = f"{row['number']}: " if row["number"] else ""
        lines += [f"{row['name']}", f"    {number}{row['shows']}", f"    {costs}"]
    missing = dict.fromkeys(line for row in rows for told in row["scales"].values() for line in told["missing"])
    told = f"Runs that are there (in {out}) of those it needs; times for two cores, roughly (--dry-run measures). "
    told += "At least: of some models nobody has measured the time."
    return [*lines, "", told, *(f"Missing: {line}" for line in missing)]


def priced(parts: list[Part], out: Path, seeds: int | None) -> list[Figures]:
    """For each method of each part what its missing runs take, measured by a few clients' rounds."""
    shelf = Shelf(out)
    rows = []
    for part in parts:
        asked = wanted(part, shelf, seeds)
        for method, specs in asked.specs.items():
            missing = left(specs, shelf)
            searched = len(_searched(asked.searches[method])) if method in asked.searches else 0
            row: Figures = {"part": part.title, "method": method, "runs": len(missing), "searched": searched}
            try:
                row |= asdict(price(specs[0])) if missing or searched else {"seconds": 0.0}
            except KeelError as error:  # data that are not there: the others are priced all the same
                row |= {"missing": str(error), "rounds": specs[0].rounds}
            rows.append(row)
    return rows


def priced_sheet(rows: list[Figures]) -> Sheet:
    columns = ["part", "method", "runs", "rounds", "bytes", "disk", "RAM", "time of each"]
    body = []
    for row in rows:
        figures = [size(row[name]) if name in row else "-" for name in ("bytes", "disk", "ram")]
        searched = f" + {row['searched']} to search" if row["searched"] else ""
        time = duration(row["seconds"]) if "seconds" in row else "-"
        rounds = f"{row['rounds']:,}" if "rounds" in row else "-"
        body.append([row["part"], row["method"], f"{row['runs']}{searched}", rounds, *figures, time])
    return Sheet("", columns, body, {})


def priced_words(rows: list[Figures]) -> str:
    runs = sum(row["runs"] + row["searched"] for row in rows)
    seconds = sum((row["runs"] + row["searched"]) * row.get("seconds", 0.0) for row in rows)
    about = "at least" if any("missing" in row for row in rows) else "about"
    lines = [f"{runs} runs: {about} {duration(seconds)} of computing on this machine."] if runs else ["Nothing to run."]
    return "\n".join([*lines, *dict.fromkeys(f"Missing: {row['missing']}" for row in rows if "missing" in row)])


def _counted(parts: list[Part], shelf: Shelf) -> Figures:
    """Runs, those there, those of searches, and rounds and seconds of all that are to be made.

    Seconds are of the models that somebody has measured: None where that is none, and `unmeasured` runs are not in it.
    """
    specs: list[Spec] = []
    searched: list[Spec] = []
    for part in parts:
        asked = wanted(part, shelf)
        specs += [spec for some in asked.specs.values() for spec in some]
        searched += [spec for plan in asked.searches.values() for spec in _searched(plan)]
    missing = left(specs, shelf)
    times = [seconds_of(spec) for spec in [*missing, *searched]]
    known = [time for time in times if time is not None]
    runs = len({key(spec) for spec in specs})
    return {
        "runs": runs,
        "there": runs - len(missing),
        "searched": len(searched),
        "rounds": sum(spec.rounds for spec in [*missing, *searched]),
        "seconds": sum(known) if known or not times else None,
        "unmeasured": len(times) - len(known),
    }


def _searched(plan: Plan) -> list[Spec]:
    """The runs of a search."""
    return [spec for point in plan.points() for spec in plan.specs(point)]


def _words(told: Figures) -> str:
    if not told["runs"]:
        return "no runs"
    there = f"{told['there']} of {told['runs']} runs"
    if told["there"] == told["runs"] and not told["searched"]:
        return there
    if told["searched"]:
        there += f" and {told['searched']} to search"
    if told["seconds"] is None:
        return f"{there}, not measured"
    return f"{there}, {'at least' if told['unmeasured'] else 'about'} {duration(told['seconds'])}"
