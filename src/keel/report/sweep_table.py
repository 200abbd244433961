"""The table that `keel sweep` prints."""

from typing import Any

from rich.table import Table

from keel.core.records import PrimaryMetric

MAX_POINTS = 20
"""Points that the table shows; sweep.json has all."""


def sweep_table(rows: list[dict[str, Any]], primary: PrimaryMetric) -> Table:
    """Return the points of a sweep as a table, the best first, with the metric by which it selected."""
    fields = list(rows[0]["fields"])
    names = [field.rpartition(".")[2] for field in fields]
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for field, name in zip(fields, names, strict=True):
        table.add_column(name if names.count(name) == 1 else field, justify="right", overflow="fold")
    table.add_column(primary.label, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in rows[:MAX_POINTS]:
        values = [f"{v:.4g}" if isinstance(v, float) else str(v) for v in row["fields"].values()]
        remark = "best" if row["best"] else "" if row["status"] == "finished" else row["status"]
        table.add_row(*values, primary.text(row["score"], row["deviation"]), remark)
    return table


def sweep_explanation(rows: list[dict[str, Any]], on: str, primary: PrimaryMetric) -> str:
    """Explain the metric in the table, and count the points that the table leaves out."""
    part = "a validation split of the training data" if on == "validation" else "the test set"
    seeds = len(rows[0]["scores"])
    over = f", then mean ± standard deviation over {seeds} seeds" if seeds > 1 else ""
    more = f" {len(rows) - MAX_POINTS} more points are in sweep.json." if len(rows) > MAX_POINTS else ""
    return f"{primary.heading} on {part}: average over the last rounds{over}.{more}"
