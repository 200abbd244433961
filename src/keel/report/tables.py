"""Tables of a comparison for the terminal, Markdown, LaTeX and CSV."""

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from keel.core.records import PrimaryMetric, primary_metric
from keel.report.comparison import Comparison
from keel.report.explanations import difference_notes
from keel.report.method import Method
from keel.report.recorded import CLIENT_STATISTICS, EPSILON
from keel.units import duration, size


def final_text(row: dict[str, Any], spread_by: str = "std") -> str:
    """Return the final value of the primary metric with its spread over seeds, or the status of a method without one.

    Args:
        row: A row of a comparison, or of the paper's tables, which are about accuracy.
        spread_by: "std", or "interval" for the confidence interval.
    """
    primary = primary_metric(row)
    mean = row[f"{primary.name}_mean"]
    return str(row["status"]) if mean is None else primary.text(mean, row[f"{primary.name}_{spread_by}"])


def _rounds(row: dict[str, Any]) -> str:
    if row["target"] is None:
        return "-"
    return "never" if row["rounds_to_target"] is None else str(row["rounds_to_target"])


def change(saved: float | None) -> str:
    """Return a saving as an arrow and a percentage: ↓ for a reduction, ↑ for an increase."""
    if saved is None:
        return "-"
    amount = f"{100 * abs(saved):.0f} %"
    return amount if amount == "0 %" else f"{'↓' if saved > 0 else '↑'} {amount}"


TARGET_COLUMNS = ["rounds", "Δ rounds", "bytes", "Δ bytes"]
COST_COLUMNS = ["method", "share of rounds", "bytes", "Δ bytes", "time", "Δ time"]
CLIENT_COLUMNS = ["method", "mean", "standard deviation", "worst decile", "best decile", "clients", "examples"]

PRIVACY_COLUMNS = ["method", "mechanism", "sampler", "noise multiplier", "epsilon", "delta"]


Places = dict[tuple[int, int], int]
"""The rank of some cells (row, column), from 1."""


@dataclass(frozen=True)
class Sheet:
    """A table of text for one setting."""

    title: str
    """The setting; empty if there is only one."""
    columns: list[str]
    rows: list[list[str]]
    places: Places
    """Cells of rank 1 are printed in bold, those of rank 2 underlined."""


def results(comparison: Comparison, interval: bool = False) -> list[Sheet]:
    """Return a sheet for each setting: the primary metric, and rounds and bytes until the target.

    Args:
        comparison: The runs to compare.
        interval: Show confidence intervals instead of standard deviations, and the differences from the baseline.
    """
    rows = [
        [
            final_text(row, "interval" if interval else "std"),
            _rounds(row),
            change(row["rounds_saved"]),
            size(row["bytes_to_target"]),
            change(row["bytes_saved"]),
        ]
        for row in comparison.rows()
    ]
    sheets = _sheets(comparison, lambda primary: ["method", primary.label, *TARGET_COLUMNS], rows, comparison.ranks())
    return [*sheets, *(differences(comparison) if interval else [])]


def differences(comparison: Comparison) -> list[Sheet]:
    """Return a sheet for each setting that has them: the differences from the baseline, paired over common seeds."""
    rows, sheets = comparison.rows(), []
    for setting in comparison.settings:
        of_setting = [rows[index] for index in setting.indices]
        methods = [comparison.methods[index] for index in setting.indices]
        reference = comparison.baseline_of(methods[0])
        names = [label for label, method in zip(setting.labels, methods, strict=True) if method is reference]
        if names and (sheet := difference_sheet(of_setting, setting.labels, names[0])):
            several = len(comparison.settings) > 1
            sheets.append(replace(sheet, title=sheet.title + f", {setting.title}" * several))
    return sheets


def difference_sheet(rows: list[dict[str, Any]], labels: list[str], baseline: str) -> Sheet | None:
    """Return the paired differences of these rows from the baseline; None without two seeds in common."""
    primary = primary_metric(rows[0])
    cells = []
    for row, label in zip(rows, labels, strict=True):
        if difference := row.get(f"{primary.name}_difference"):
            mean, low, high = (_signed(difference[name], primary) for name in ("mean", "low", "high"))
            cells.append([label, mean, f"{low} to {high}", str(difference["seeds"])])
    unit = ", in percentage points" if primary.is_fraction else ""
    title = f"{primary.heading} minus that of {baseline}, paired by seed{unit}"
    return Sheet(title, ["method", "mean", "95 % interval", "seeds"], cells, {}) if cells else None


def _signed(value: float, primary: PrimaryMetric) -> str:
    """Return a difference of two values of the metric; in percentage points for a fraction."""
    return f"{100 * value:+.1f}" if primary.is_fraction else f"{value:+.4g}"


def costs(comparison: Comparison) -> list[Sheet]:
    """Return a sheet for each setting: the cost of reaching the target, compared with the baseline."""
    rows = []
    for row in comparison.rows():
        if (cost := row.get("cost")) is None:
            rows.append(["-"] * 5)
            continue
        figures = [f"{cost['share']:.2f}", size(cost["bytes"]), change(cost["bytes_saved"])]
        rows.append([*figures, duration(cost["seconds"]), change(cost["seconds_saved"])])
    return _sheets(comparison, lambda _: COST_COLUMNS, rows, [None] * len(rows))


def other_metrics(comparison: Comparison) -> list[Sheet]:
    """Return a sheet for each setting that has them: other metrics and numbers that observers added."""
    return _titled(comparison, other_sheet, lambda primary: "Other metrics")


def other_sheet(methods: list[Method], labels: list[str]) -> Sheet | None:
    """Return the final values of the other metrics of these methods; None if there are none."""
    names = {name: series.label for method in methods for name, series in method.other.items()}
    rows = [
        [label, *(method.other[name].text if name in method.other else "-" for name in names)]
        for label, method in zip(labels, methods, strict=True)
    ]
    return Sheet("", ["method", *names.values()], rows, {}) if names else None


def client_metrics(comparison: Comparison) -> list[Sheet]:
    """Return a sheet for each setting that has them: statistics of the primary metric over clients."""
    return _titled(comparison, client_sheet, lambda primary: f"{primary.heading} over clients")


def client_sheet(methods: list[Method], labels: list[str]) -> Sheet | None:
    """Return the statistics over clients of these methods; None if none was recorded."""
    rows = [[label, *_client_cells(method)] for label, method in zip(labels, methods, strict=True)]
    return Sheet("", CLIENT_COLUMNS, rows, {}) if any(method.clients for method in methods) else None


def privacy_losses(comparison: Comparison) -> list[Sheet]:
    """Return a sheet for each setting that has them: the privacy losses."""
    return _titled(comparison, privacy_sheet, lambda primary: "Privacy")


def privacy_sheet(methods: list[Method], labels: list[str]) -> Sheet | None:
    """Return epsilon after the last round, the largest of a method's seeds; None if none was recorded."""
    rows = [[label, *_privacy_cells(method)] for label, method in zip(labels, methods, strict=True)]
    return Sheet("", PRIVACY_COLUMNS, rows, {}) if any(row[-2] != "-" for row in rows) else None


def _privacy_cells(method: Method) -> list[str]:
    columns = [run.history.columns[EPSILON] for run in method.runs if EPSILON in run.history.columns]
    spent = f"{max(np.nanmax(column) for column in columns):.3g}" if columns else "-"
    if (privacy := method.table.get("privacy")) is None:
        return ["-", "-", "-", spent, "-"]
    summaries = [run.summary for run in method.runs if run.summary is not None]
    noise = next((each["noise_multiplier"] for each in summaries if "noise_multiplier" in each), privacy.get("noise"))
    multiplier = "-" if noise is None else f"{noise:.4g}"
    return [privacy["mechanism"], method.table["participation"]["sampler"], multiplier, spent, f"{privacy['delta']:g}"]


def _client_cells(method: Method) -> list[str]:
    """Return the final statistics over clients: means over seeds."""
    values = [method.clients[name].mean if name in method.clients else None for name in CLIENT_STATISTICS]
    counts = ["-" if value is None else f"{value:,.0f}" for value in values[4:]]
    return [*(method.primary.text(value) for value in values[:4]), *counts]


def _titled(
    comparison: Comparison,
    make: Callable[[list[Method], list[str]], Sheet | None],
    title: Callable[[PrimaryMetric], str],
) -> list[Sheet]:
    """Return the sheet of each setting that has one, with a title."""
    sheets = []
    for setting in comparison.settings:
        methods = [comparison.methods[index] for index in setting.indices]
        if sheet := make(methods, setting.labels):
            several = len(comparison.settings) > 1
            sheets.append(replace(sheet, title=title(methods[0].primary) + f", {setting.title}" * several))
    return sheets


def _sheets(
    comparison: Comparison,
    columns: Callable[[PrimaryMetric], list[str]],
    rows: list[list[str]],
    ranks: list[int | None],
) -> list[Sheet]:
    return [
        Sheet(
            setting.title if len(comparison.settings) > 1 else "",
            columns(comparison.methods[setting.indices[0]].primary),
            [[label, *rows[index]] for index, label in zip(setting.indices, setting.labels, strict=True)],
            {(row, 1): rank for row, index in enumerate(setting.indices) if (rank := ranks[index]) is not None},
        )
        for setting in comparison.settings
    ]


def terminal_table(sheet: Sheet) -> Table:
    """Return the sheet for the terminal: the best cell in bold, the second underlined."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column(sheet.columns[0], overflow="fold")  # labels may be long
    for name in sheet.columns[1:]:
        table.add_column(name, justify="right", overflow="fold", no_wrap=len(sheet.columns) > 2)
    styles = {1: "bold", 2: "underline"}
    for number, row in enumerate(sheet.rows):
        cells = [Text(cell, styles.get(sheet.places.get((number, i), 0), "")) for i, cell in enumerate(row)]
        table.add_row(*cells)
    return table


def fitted(sheet: Sheet, width: int) -> list[Sheet]:
    """Split the sheet into pieces that fit the width, each with the first column.

    A column called "paper" holds the paper's number for the column before it and stays next to that column.
    """
    widths = [2 + max(map(len, column)) for column in zip(sheet.columns, *sheet.rows, strict=True)]
    groups: list[list[int]] = [[]]
    for number in range(1, len(widths)):
        has_paper = sheet.columns[number + 1 : number + 2] == ["paper"]
        needed = sum(widths[number : number + 1 + has_paper])
        full = widths[0] + sum(widths[i] for i in groups[-1]) + needed > width
        if groups[-1] and full and sheet.columns[number] != "paper":
            groups.append([])
        groups[-1].append(number)
    pieces: list[Sheet] = []
    for group in groups:
        kept = [0, *group]
        places = {(row, kept.index(c)): rank for (row, c), rank in sheet.places.items() if c in kept}
        rows = [[row[i] for i in kept] for row in sheet.rows]
        pieces.append(Sheet("" if pieces else sheet.title, [sheet.columns[i] for i in kept], rows, places))
    return pieces


def text_of(sheet: Sheet) -> str:
    """Return the sheet as plain text, in lines of any length and without colours."""
    width = 2 * len(sheet.columns) + sum(max(map(len, c)) for c in zip(sheet.columns, *sheet.rows, strict=True))
    screen = Console(width=width, file=StringIO(), color_system=None, highlight=False, markup=False)
    screen.print(terminal_table(sheet))
    lines = [line.rstrip() for line in screen.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    return "\n".join([sheet.title, "", *lines] if sheet.title else lines)


def markdown(sheet: Sheet) -> str:
    """Return the sheet as a Markdown table."""
    lines = [sheet.columns, ["---", *["---:"] * (len(sheet.columns) - 1)]]
    lines += _marked(sheet, {1: "**{}**", 2: "<u>{}</u>"})
    table = "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)
    return f"{sheet.title}\n\n{table}" if sheet.title else table


def latex(sheet: Sheet) -> str:
    """Return the sheet as a LaTeX tabular; requires the package booktabs."""
    plain = Sheet("", sheet.columns, [list(map(_tex, row)) for row in sheet.rows], sheet.places)
    lines = [rf"\begin{{tabular}}{{l{'r' * (len(sheet.columns) - 1)}}}", r"\toprule"]
    if sheet.title:
        lines += [rf"\multicolumn{{{len(sheet.columns)}}}{{l}}{{{_tex(sheet.title)}}} \\", r"\midrule"]
    lines += [" & ".join(map(_tex, sheet.columns)) + r" \\", r"\midrule"]
    lines += [" & ".join(row) + r" \\" for row in _marked(plain, {1: r"\textbf{{{}}}", 2: r"\underline{{{}}}"})]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])


def latex_note(text: str) -> str:
    """Return a line of text for below a LaTeX table."""
    return rf"{{\par\noindent\footnotesize {_tex(text)}\par}}"


def markdown_text(comparison: Comparison, interval: bool = False, more: Sequence[Sheet] = ()) -> str:
    """Return the tables of all settings as Markdown, with more tables and the fields in which methods differ."""
    notes = difference_notes(comparison)
    return "\n\n".join([*map(markdown, [*results(comparison, interval), *more]), *notes])


def latex_text(comparison: Comparison, interval: bool = False, more: Sequence[Sheet] = ()) -> str:
    """Return the tables of all settings as LaTeX, with more tables and the fields in which methods differ."""
    notes = map(latex_note, difference_notes(comparison))
    return "\n\n".join([*map(latex, [*results(comparison, interval), *more]), *notes])


def csv_text(comparison: Comparison) -> str:
    """Return all numbers of the comparison, unrounded, one line per method."""
    return csv_of(comparison.rows())


def csv_of(records: Iterable[dict[str, Any]]) -> str:
    """Return records as CSV. A nested table becomes columns; a list becomes text, its values separated by spaces."""
    rows = [_flat(record) for record in records]
    text = StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if name in ("fields", "differing"):  # keyed by the names of spec fields
            flat |= value
        elif isinstance(value, dict):
            flat |= {f"{name}_{key}": item for key, item in value.items()}
        elif isinstance(value, list):
            flat[name] = " ".join("-" if item is None else str(item) for item in value)
        else:
            flat[name] = value
    return flat


def _marked(sheet: Sheet, marks: dict[int, str]) -> list[list[str]]:
    """Return the rows with marks around the ranked cells."""
    return [
        [marks.get(sheet.places.get((number, i), 0), "{}").format(cell) for i, cell in enumerate(row)]
        for number, row in enumerate(sheet.rows)
    ]


TEX = {"\\": r"\textbackslash{}", "±": r"$\pm$", "×": r"$\times$", "↓": r"$\downarrow$", "↑": r"$\uparrow$"}
TEX |= {"~": r"\textasciitilde{}"}
TEX |= {"Δ": r"$\Delta$", "σ": r"$\sigma$", "ζ": r"$\zeta$", "²": "$^2$", "†": r"\dag{}", "‡": r"\ddag{}"}
TEX |= {"^": r"\textasciicircum{}"} | {sign: rf"\{sign}" for sign in "&%$#_{}"}


def _tex(text: str) -> str:
    """Escape the characters that have a meaning in LaTeX."""
    return "".join(TEX.get(sign, sign) for sign in text)
