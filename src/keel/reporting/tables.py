"""The numbers of a comparison as people read them."""

from typing import Any

from rich.table import Table

from keel.reporting.comparison import WINDOW, Comparison


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def size(value: float | None) -> str:
    if value is None:
        return "-"
    for unit, divisor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= divisor:
            return f"{value / divisor:.1f} {unit}"
    return f"{value:.0f} B"


def accuracy(row: dict[str, Any]) -> str:
    if row["accuracy_mean"] is None:
        return str(row["status"])
    spread = "" if row["accuracy_std"] is None else f" ± {100 * row['accuracy_std']:.1f}"
    return f"{100 * row['accuracy_mean']:.1f}{spread} %"


def _rounds(row: dict[str, Any]) -> str:
    if row["target"] is None:
        return "-"
    return "never" if row["rounds_to_target"] is None else str(row["rounds_to_target"])


def saving(value: float | None) -> str:
    """A share that was saved; below zero where it cost more."""
    return "-" if value is None else f"{100 * value:.0f} %"


def explanation(comparison: Comparison) -> str:
    """What the columns mean, in a sentence or two."""
    words = "Accuracy: each seed's average over the last rounds, then mean ± deviation over the seeds."
    known = {target for target in comparison.targets if target is not None}
    if known:
        at = percent(min(known)) if len(known) == 1 else "its target"
        name = next(m.label for m in comparison.methods if m.algorithm == comparison.baseline)
        words += (
            f" Rounds and bytes: until the average over {WINDOW} rounds stands at {at}, "
            f"the final accuracy of {name if len(known) < 2 else comparison.baseline} in the same setting."
        )
    return words


COLUMNS = ["method", "accuracy", "rounds", "saved", "bytes", "saved"]


def cells(comparison: Comparison) -> list[list[str]]:
    """The rows of the table as text, one list per method."""
    return [
        [
            row["label"],
            accuracy(row),
            _rounds(row),
            saving(row["rounds_saved"]),
            size(row["bytes_to_target"]),
            saving(row["bytes_saved"]),
        ]
        for row in comparison.rows()
    ]


def terminal_table(comparison: Comparison) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column(COLUMNS[0], overflow="fold")  # the one that may be long
    for name in COLUMNS[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in cells(comparison):
        table.add_row(*row)
    return table
