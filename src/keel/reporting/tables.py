"""The numbers of a comparison as people read them."""

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from io import StringIO
from math import ceil
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from keel.reporting.comparison import Comparison
from keel.units import duration, percent, size


def accuracy(row: dict[str, Any], spread_by: str = "accuracy_std") -> str:
    if row["accuracy_mean"] is None:
        return str(row["status"])
    spread = "" if row[spread_by] is None else f" ± {100 * row[spread_by]:.1f}"
    return f"{100 * row['accuracy_mean']:.1f}{spread} %"


def _rounds(row: dict[str, Any]) -> str:
    if row["target"] is None:
        return "-"
    return "never" if row["rounds_to_target"] is None else str(row["rounds_to_target"])


def change(saved: float | None) -> str:
    """An arrow and percents: down for what was saved, up for what it cost more."""
    if saved is None:
        return "-"
    amount = f"{100 * abs(saved):.0f} %"
    return amount if amount == "0 %" else f"{'↓' if saved > 0 else '↑'} {amount}"


def explanation(comparison: Comparison, interval: bool = False) -> str:
    """What the columns mean, in a sentence or two."""
    spread = "95 % confidence interval" if interval else "deviation"
    words = f"Accuracy: each seed's average over the last rounds, then mean ± {spread} over the seeds."
    known = {target for target in comparison.targets if target is not None}
    if known:
        at = percent(min(known)) if len(known) == 1 else "its target"
        if comparison.target is not None:
            words += f" Rounds and bytes: until the average over {comparison.window} rounds stands at {at}."
            if any(comparison.baseline_of(method) for method in comparison.methods):
                words += f" Δ: less (↓) or more (↑) than {comparison.baseline} spent."
            return words
        name = next(m.label for m in comparison.methods if m.algorithm == comparison.baseline)
        words += (
            f" Rounds and bytes: until the average over {comparison.window} rounds stands at {at}, "
            f"the final accuracy of {name if len(known) < 2 else comparison.baseline} in the same setting. "
            "Δ: less (↓) or more (↑) than it spent."
        )
    return words


def heterogeneity(told: dict[str, Any]) -> str:
    """A data set's clients in a sentence or two."""
    each = told["client_examples"]
    examples = f"{each['least']:,} to {each['most']:,} examples each (median {each['median']:,.0f})"
    if each["least"] == each["most"]:
        examples = f"{each['least']:,} examples each"
    return (
        f"{told['name']}{told.get('split', '')}: {told['clients']:,} clients with {examples}, "
        f"{told['train_examples']:,} in all, {told['test_examples']:,} to test, {told['classes']:,} classes. "
        f"A client's labels have an entropy of {told['label_entropy']:.2f} bits (all together "
        f"{told['label_entropy_whole']:.2f}); their distance from the whole is {told['label_distance']:.2f} "
        "(0: alike, 1: nothing in common)."
    )


def picture(told: dict[str, Any], width: int, most: int = 20) -> str:
    """Clients by classes in blocks: the darker, the larger the class's share of the client's examples."""
    classes, rows = told["picture"]["classes"], told["picture"]["counts"]
    wide = max(1, min(3, (width - 12) // len(classes)))
    columns = min(len(classes), width - 12)
    groups = np.array_split(np.arange(len(classes)), columns)
    shown = np.linspace(0, len(rows) - 1, min(most, len(rows))).astype(int)
    totals = np.maximum(1, np.array(told["picture"]["examples"]))
    shares = np.array([[np.array(rows[i])[group].sum() / totals[i] for group in groups] for i in shown])
    lines = [
        f"{told['picture']['clients'][i]:>10}  " + "".join(SHADES[ceil(4 * part / shares.max())] * wide for part in row)
        for i, row in zip(shown, shares, strict=True)
    ]
    title = f"{'client':>10}  classes {classes[0]} to {classes[-1]}; full is {percent(shares.max())} of a client"
    return "\n".join([title, *lines, f"{'':12}{len(shown)} of {told['clients']:,} clients"])


def sweep_table(rows: list[dict[str, Any]], most: int = 20) -> Table:
    """The points of a sweep, the best first and no more than so many of them."""
    keys = list(rows[0]["fields"])
    ends = [key.rpartition(".")[2] for key in keys]
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for key, end in zip(keys, ends, strict=True):
        table.add_column(end if ends.count(end) == 1 else key, justify="right", overflow="fold")
    table.add_column("accuracy", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in rows[:most]:
        values = [f"{v:.4g}" if isinstance(v, float) else str(v) for v in row["fields"].values()]
        spread = "" if row["deviation"] is None else f" ± {100 * row['deviation']:.1f}"
        score = "-" if row["score"] is None else f"{100 * row['score']:.1f}{spread} %"
        remark = "best" if row["best"] else "" if row["status"] == "finished" else row["status"]
        table.add_row(*values, score, remark)
    return table


def sweep_explanation(rows: list[dict[str, Any]], on: str, most: int = 20) -> str:
    """What the accuracy is, and how many points the table leaves out."""
    part = "a validation part of the training data" if on == "validation" else "the test set"
    seeds = len(rows[0]["scores"])
    over = f", then mean ± deviation over {seeds} seeds" if seeds > 1 else ""
    more = f" {len(rows) - most} more points are in sweep.json." if len(rows) > most else ""
    return f"Accuracy on {part}: the average over the last rounds{over}.{more}"


SHADES = " ░▒▓█"
COLUMNS = ["method", "accuracy", "rounds", "Δ rounds", "bytes", "Δ bytes"]
COST_COLUMNS = ["method", "share of rounds", "bytes", "Δ bytes", "time", "Δ time"]


Places = dict[tuple[int, int], int]
"""Of some cells (row, column) their place among others, from 1."""


@dataclass(frozen=True)
class Sheet:
    """A table as text, of one setting: columns, rows, and places of cells: the first is bold, the second underlined."""

    title: str
    """The setting, where there are several."""
    columns: list[str]
    rows: list[list[str]]
    places: Places


def results(comparison: Comparison, interval: bool = False) -> list[Sheet]:
    """Accuracy, and rounds and bytes to the target; a sheet for each setting."""
    rows = [
        [
            accuracy(row, "accuracy_interval" if interval else "accuracy_std"),
            _rounds(row),
            change(row["rounds_saved"]),
            size(row["bytes_to_target"]),
            change(row["bytes_saved"]),
        ]
        for row in comparison.rows()
    ]
    return _sheets(comparison, COLUMNS, rows, comparison.places())


def costs(comparison: Comparison) -> list[Sheet]:
    """What it costs to reach the baseline's quality, by the paper's three steps; a sheet for each setting."""
    rows = []
    for row in comparison.rows():
        if (cost := row.get("cost")) is None:
            rows.append(["-"] * 5)
            continue
        figures = [f"{cost['share']:.2f}", size(cost["bytes"]), change(cost["bytes_saved"])]
        rows.append([*figures, duration(cost["seconds"]), change(cost["seconds_saved"])])
    return _sheets(comparison, COST_COLUMNS, rows, [None] * len(rows))


def _sheets(comparison: Comparison, columns: list[str], rows: list[list[str]], places: list[int | None]) -> list[Sheet]:
    return [
        Sheet(
            setting.title if len(comparison.settings) > 1 else "",
            columns,
            [[label, *rows[place]] for place, label in zip(setting.places, setting.labels, strict=True)],
            {(row, 1): rank for row, place in enumerate(setting.places) if (rank := places[place]) is not None},
        )
        for setting in comparison.settings
    ]


def terminal_table(sheet: Sheet) -> Table:
    """The best in bold, the second underlined."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column(sheet.columns[0], overflow="fold")  # the one that may be long
    for name in sheet.columns[1:]:
        table.add_column(name, justify="right", overflow="fold", no_wrap=len(sheet.columns) > 2)
    styles = {1: "bold", 2: "underline"}
    for number, row in enumerate(sheet.rows):
        cells = [Text(cell, styles.get(sheet.places.get((number, i), 0), "")) for i, cell in enumerate(row)]
        table.add_row(*cells)
    return table


def fitted(sheet: Sheet, width: int) -> list[Sheet]:
    """The sheet in as many pieces as a screen of that width needs, each with the first column.

    A column that is called "paper" stays beside the one before it, which it is the paper's number for.
    """
    widths = [2 + max(map(len, column)) for column in zip(sheet.columns, *sheet.rows, strict=True)]
    groups: list[list[int]] = [[]]
    for number in range(1, len(widths)):
        beside = sheet.columns[number + 1 : number + 2] == ["paper"]
        wide = sum(widths[number : number + 1 + beside])
        full = widths[0] + sum(widths[i] for i in groups[-1]) + wide > width
        if groups[-1] and full and sheet.columns[number] != "paper":
            groups.append([])
        groups[-1].append(number)
    pieces: list[Sheet] = []
    for group in groups:
        kept = [0, *group]
        places = {(row, kept.index(c)): place for (row, c), place in sheet.places.items() if c in kept}
        rows = [[row[i] for i in kept] for row in sheet.rows]
        pieces.append(Sheet("" if pieces else sheet.title, [sheet.columns[i] for i in kept], rows, places))
    return pieces


def text_of(sheet: Sheet) -> str:
    """In lines of any length, without colours."""
    width = 2 * len(sheet.columns) + sum(max(map(len, c)) for c in zip(sheet.columns, *sheet.rows, strict=True))
    screen = Console(width=width, file=StringIO(), color_system=None, highlight=False, markup=False)
    screen.print(terminal_table(sheet))
    lines = [line.rstrip() for line in screen.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    return "\n".join([sheet.title, "", *lines] if sheet.title else lines)


def markdown(sheet: Sheet) -> str:
    lines = [sheet.columns, ["---", *["---:"] * (len(sheet.columns) - 1)]]
    lines += _marked(sheet, {1: "**{}**", 2: "<u>{}</u>"})
    table = "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)
    return f"{sheet.title}\n\n{table}" if sheet.title else table


def latex(sheet: Sheet) -> str:
    """For the packages booktabs and nothing else."""
    plain = Sheet("", sheet.columns, [list(map(_tex, row)) for row in sheet.rows], sheet.places)
    lines = [rf"\begin{{tabular}}{{l{'r' * (len(sheet.columns) - 1)}}}", r"\toprule"]
    if sheet.title:
        lines += [rf"\multicolumn{{{len(sheet.columns)}}}{{l}}{{{_tex(sheet.title)}}} \\", r"\midrule"]
    lines += [" & ".join(map(_tex, sheet.columns)) + r" \\", r"\midrule"]
    lines += [" & ".join(row) + r" \\" for row in _marked(plain, {1: r"\textbf{{{}}}", 2: r"\underline{{{}}}"})]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])


def latex_note(text: str) -> str:
    """A line beneath a table."""
    return rf"{{\par\noindent\footnotesize {_tex(text)}\par}}"


def csv_text(comparison: Comparison) -> str:
    """All numbers of the comparison, unrounded, a line for each method."""
    return csv_of(comparison.rows())


def csv_of(records: Iterable[dict[str, Any]]) -> str:
    """Records as lines; a table within one as columns, a list with spaces between its values, "-" for none."""
    rows = [_flat(record) for record in records]
    text = StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if name == "fields":
            flat |= value
        elif isinstance(value, dict):
            flat |= {f"{name}_{key}": each for key, each in value.items()}
        elif isinstance(value, list):
            flat[name] = " ".join("-" if each is None else str(each) for each in value)
        else:
            flat[name] = value
    return flat


def _marked(sheet: Sheet, marks: dict[int, str]) -> list[list[str]]:
    """The rows, with the cells that have a place marked."""
    return [
        [marks.get(sheet.places.get((number, i), 0), "{}").format(cell) for i, cell in enumerate(row)]
        for number, row in enumerate(sheet.rows)
    ]


TEX = {"\\": r"\textbackslash{}", "±": r"$\pm$", "↓": r"$\downarrow$", "↑": r"$\uparrow$", "~": r"\textasciitilde{}"}
TEX |= {"Δ": r"$\Delta$", "σ": r"$\sigma$", "ζ": r"$\zeta$", "²": "$^2$", "†": r"\dag{}"}
TEX |= {"^": r"\textasciicircum{}"} | {sign: rf"\{sign}" for sign in "&%$#_{}"}


def _tex(text: str) -> str:
    return "".join(TEX.get(sign, sign) for sign in text)
