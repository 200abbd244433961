"""The rendering of a result: tables, notes, figure and CSV records, from the result alone."""

from dataclasses import dataclass, field
from typing import Any

from keel.paper.notes import SMOKE_NOTE, finding, make_notes
from keel.paper.panels import PANELS, make_figure
from keel.paper.recipes import printed_title
from keel.paper.results import Result, Row
from keel.paper.sheets import SHEETS
from keel.report.tables import Sheet


@dataclass(frozen=True)
class View:
    """A result ready to be printed or written."""

    sheets: list[Sheet]
    notes: list[str]
    figure: dict[str, Any] | None = None
    """As Vega-Lite."""
    records: list[Row] = field(default_factory=list)
    """The lines of table.csv."""


def make_view(result: Result, options: str = "") -> View:
    """Return the view of a result; `options` are those of the command that finds its runs."""
    if "columns" in result:
        return _computed_view(result)
    sheets = SHEETS[result["view"]]({**result, "parts": _started(result["parts"])})
    panels = PANELS[result["view"]](result) if result["view"] in PANELS else []
    figure = make_figure(panels, title_of(result)) if panels else None
    return View(sheets, make_notes(result, options), figure, _records(result))


def title_of(result: Result) -> str:
    """Return the heading of a result."""
    return f"{result['number'] or 'Keel'}: {result['title']} ({result['scale']})"


def _computed_view(result: Result) -> View:
    """Return the view of a result without runs, whose table is complete."""
    columns, rows = result["columns"], result["rows"]
    figure = make_figure(result["panels"], title_of(result)) if "panels" in result else None
    records = result.get("records") or [dict(zip(columns, row, strict=True)) for row in rows]
    smoke = [SMOKE_NOTE] if result["scale"] == "smoke" and "records" in result else []
    notes = [*finding(result), *smoke, *result.get("notes", [])]
    return View([Sheet("", columns, rows, {})], notes, figure, records)


def _started(parts: list[Row]) -> list[Row]:
    """Return the parts with at least one finished run, or all parts if there is none."""
    return [part for part in parts if any(row["runs"] for row in part["rows"])] or parts


def _records(result: Result) -> list[Row]:
    """Return a record for each row of each part: measured numbers unrounded, the paper's as printed."""
    omitted = ("curve", "deviation", "settings", "chosen", "open_fields", "values", "printed", "printed_cost")
    records = []
    for part in result["parts"]:
        for row in part["rows"]:
            mean, _, deviation = (row["printed"] or "").partition(" ± ")
            printed_bytes, printed_time = row["printed_cost"] or ("", "")
            measured = {name: value for name, value in row.items() if name not in omitted}
            late = {f"deviation_tau_{tau}": series["second_half"] for tau, series in row.get("deviation", {}).items()}
            paper = {"paper_mean": mean, "paper_std": deviation}
            paper |= {"paper_bytes": printed_bytes, "paper_time": printed_time}
            setting = {"paper_setting": printed_title(part["printed"])} if part["printed"] else {}
            records.append({"part": part["title"], **row["values"], **measured, **late, **paper, **setting})
    return records
