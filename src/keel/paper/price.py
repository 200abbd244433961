"""What a table or figure takes: how many of its runs are there, and what those that are missing would cost."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from keel.errors import KeelError
from keel.paper.recipes import SCALES, Part, items, seconds_of
from keel.paper.running import Shelf, fields_of, key, left, missing_data, wanted
from keel.reporting.tables import Sheet
from keel.runs.price import price
from keel.runs.search import Plan
from keel.runs.spec import Spec
from keel.units import duration, size

Figures = dict[str, Any]
PROTOCOL = (
    *("rounds", "data.clients", "participation.rate", "local.epochs", "local.steps", "local.batch"),
    *("local.weight_decay", "local.clip", "server.weighting", "evaluation.every", "evaluation.last"),
)
"""Fields that say how a part was run, besides its methods' own."""


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
            missing = missing_data(parts)
            scales[scale] = {**_counted(parts, shelf), "needs": list(missing), "missing": list(missing.values())}
        told = item.model_dump(include={"name", "kind", "number", "label", "title", "shows"})
        rows.append({**told, "scales": scales})
    return rows


def listing_lines(rows: list[Figures], out: Path) -> list[tuple[int, str]]:
    """For each its name, what it shows and what it costs, and what is missing for them; each line with its indent."""
    lines = []
    for row in rows:
        number = f"{row['number']}: " if row["number"] else ""
        lines += [(0, row["name"]), (4, f"{number}{row['shows']}")]
        if any(told["runs"] for told in row["scales"].values()):
            lines += [(4, f"{scale}: {_words(told)}") for scale, told in row["scales"].items()]
    missing = dict.fromkeys(line for row in rows for told in row["scales"].values() for line in told["missing"])
    told = f"Runs that are there (in {out}) of those it needs; times of their rounds on two cores, roughly, without "
    told += "starting and rendering (--dry-run measures). At least: of some models nobody has measured the time. What "
    told += "desktop gave is in docs/reproduction.md."
    return [*lines, (0, ""), (0, told), *((0, f"Missing: {line}") for line in missing)]


def priced(parts: list[Part], out: Path, seeds: int | None, tell: Callable[[str], None]) -> list[Figures]:
    """For each method of each part what its missing runs take, measured by a few clients' rounds.

    It takes a while, so that each method is told before it is measured.
    """
    shelf, known = Shelf(out), set[str]()
    rows = []
    for part in parts:
        asked = wanted(part, shelf, seeds)
        for method, specs in asked.specs.items():
            missing = left(specs, shelf)
            searched = {key(spec): spec for spec in _searched(asked.searches.get(method)) if key(spec) not in known}
            known |= searched.keys()  # two parts may share a search
            row: Figures = {"part": part.title, "method": method, "runs": len(missing), "searched": len(searched)}
            row["fields"] = fields_of(specs[0])
            tell(f"{part.title}: {method}")
            row["times"] = sum(spec.rounds for spec in [*missing, *searched.values()]) / specs[0].rounds
            try:
                row |= asdict(price(specs[0])) if row["times"] else {"seconds": 0.0}
            except KeelError as error:  # data that are not there: the others are priced all the same
                roughly = seconds_of(specs[0])
                row |= {"missing": str(error), "rounds": specs[0].rounds}
                row |= {} if roughly is None else {"seconds": roughly}
            rows.append(row)
    return rows


def priced_sheets(rows: list[Figures]) -> list[Sheet]:
    """One for each part, with what its runs have in common above it."""
    columns = ["method", "runs", "rounds", "bytes", "disk", "RAM", "time of each", "rates and its own fields"]
    sheets = []
    for title in dict.fromkeys(row["part"] for row in rows):
        body, part = [], [row for row in rows if row["part"] == title]
        for row in part:
            figures = [size(row[name]) if name in row else "-" for name in ("bytes", "disk", "ram")]
            searched = f" + {row['searched']} to search" if row["searched"] else ""
            time = duration(row["seconds"]) if "seconds" in row else "-"
            rounds = f"{row['rounds']:,}" if "rounds" in row else "-"
            body.append([row["method"], f"{row['runs']}{searched}", rounds, *figures, time, _own(row["fields"])])
        sheets.append(Sheet(f"{title}: {_common([row['fields'] for row in part])}", columns, body, {}))
    return sheets


def _own(fields: Figures) -> str:
    """A method's rates and the fields of its algorithm; what a search is still to find is the default."""
    names = ["local.lr", "server.lr", *(name for name in fields if name.startswith("algorithm."))]
    return ", ".join(f"{name.removeprefix('algorithm.')} {fields[name]}" for name in names if name != "algorithm.name")


def _common(tables: list[Figures]) -> str:
    """Of the fields that say how runs were made those in which all agree."""
    shared = [name for name in PROTOCOL if name in tables[0] and len({str(table.get(name)) for table in tables}) == 1]
    return ", ".join(f"{name} {tables[0][name]}" for name in shared)


def priced_words(rows: list[Figures]) -> str:
    runs = sum(row["runs"] + row["searched"] for row in rows)
    seconds = sum(row["times"] * row.get("seconds", 0.0) for row in rows)
    about = "at least " if any("seconds" not in row for row in rows) else "about "
    time = f"{about}{duration(seconds)} of computing on this machine" if seconds else "nobody has measured the time"
    lines = [f"{runs} runs: {time}."] if runs else ["Nothing to run."]
    return "\n".join([*lines, *dict.fromkeys(f"Missing: {row['missing']}" for row in rows if "missing" in row)])


def _counted(parts: list[Part], shelf: Shelf) -> Figures:
    """Runs, those there, those of searches, and rounds and seconds of all that are to be made.

    Seconds are of the models that somebody has measured: None where that is none, and `unmeasured` runs are not in it.
    """
    specs: list[Spec] = []
    searched: dict[str, Spec] = {}
    for part in parts:
        asked = wanted(part, shelf)
        specs += [spec for some in asked.specs.values() for spec in some]
        searched |= {key(spec): spec for plan in asked.searches.values() for spec in _searched(plan)}
    missing = left(specs, shelf)
    times = [seconds_of(spec) for spec in [*missing, *searched.values()]]
    known = [time for time in times if time is not None]
    runs = len({key(spec) for spec in specs})
    return {
        "runs": runs,
        "there": runs - len(missing),
        "searched": len(searched),
        "rounds": sum(spec.rounds for spec in [*missing, *searched.values()]),
        "seconds": sum(known) if known or not times else None,
        "unmeasured": len(times) - len(known),
    }


def _searched(plan: Plan | None) -> list[Spec]:
    """The runs of a search, if there is one to make."""
    return [] if plan is None else [spec for point in plan.points() for spec in plan.specs(point)]


def _words(told: Figures) -> str:
    if not told["runs"]:
        return "no runs"
    words = f"{told['there']} of {told['runs']} runs"
    if told["there"] == told["runs"] and not told["searched"]:
        return words
    if told["searched"]:
        words += f" and {told['searched']} to search"
    if told["seconds"] is None:
        words += ", not measured"
    else:
        words += f", {'at least' if told['unmeasured'] else 'about'} {duration(told['seconds'])}"
    return words + (f"; without {', '.join(told['needs'])}, see below" if told["needs"] else "")
