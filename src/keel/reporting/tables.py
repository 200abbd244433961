"""The numbers of a comparison as people read them."""

from typing import Any

from rich.table import Table

from keel.reporting.comparison import Comparison


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


def saving(value: float | None) -> str:
    if value is None:
        return "-"
    return "" if value == 0 else f"{-100 * value:+.0f} %"


COLUMNS = ["method", "accuracy", "rounds", "saved", "bytes", "saved"]


def cells(comparison: Comparison) -> list[list[str]]:
    """The rows of the table as text, one list per method."""
    return [
        [
            row["label"],
            accuracy(row),
            "never" if row["rounds_to_target"] is None else str(row["rounds_to_target"]),
            saving(row["rounds_saved"]),
            size(row["bytes_to_target"]),
            saving(row["bytes_saved"]),
        ]
        for row in comparison.rows()
    ]


def terminal_table(comparison: Comparison) -> Table:
    target = "" if comparison.target is None else f"rounds and bytes until {percent(comparison.target)} is reached"
    table = Table(caption=target, caption_justify="left", box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
    for row in cells(comparison):
        table.add_row(*row)
    return table
