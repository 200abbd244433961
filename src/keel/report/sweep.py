"""The result of keel.sweep: the points of a search with their scores."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keel.config.schema import Spec
from keel.core.records import PrimaryMetric
from keel.report.sweep_table import sweep_explanation, sweep_table
from keel.report.tables import Sheet, latex, markdown
from keel.runs.frames import make_frame

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class BestPoint:
    """The point of a sweep with the best score."""

    fields: dict[str, Any]
    """The searched fields with their values."""
    score: float
    """The mean of the primary metric over seeds, on the examples that the sweep selects on."""
    spec: Spec
    """The point as a complete spec, evaluated on the test examples."""
    path: Path
    """The TOML file of `spec`."""


@dataclass(frozen=True, repr=False)
class Sweep:
    """The points of a search with their scores, the best first. In a notebook it is shown as a table."""

    path: Path
    """The folder of the sweep, with sweep.json, best.toml and the run folders."""
    rows: list[dict[str, Any]]
    """A row per point, the best first: fields, status, score, deviation and scores by seed."""
    best: BestPoint | None
    """The best point; None if no point finished."""
    on: str
    """The examples on which points are scored: "validation" or "test"."""
    primary: PrimaryMetric
    """The metric by which points are ranked, with its `name` and its direction, `maximize`."""

    def __repr__(self) -> str:
        best = "none finished" if self.best is None else f"best {self.best.fields}"
        return f"<keel.Sweep {str(self.path)!r}: {len(self.rows)} points, {best}>"

    def to_frame(self) -> "pandas.DataFrame":
        """Return the points as a pandas DataFrame: a column per searched field, and the scores."""
        return make_frame(self.rows)

    def to_markdown(self) -> str:
        """Return the points as a Markdown table."""
        return markdown(self._sheet())

    def to_latex(self) -> str:
        """Return the points as a LaTeX table, which requires the package booktabs."""
        return latex(self._sheet())

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        from keel.report.notebook import table_html  # imports the chart libraries, which a sweep does not need

        return table_html([self._sheet()], [sweep_explanation(self.rows, self.on, self.primary), str(self.path)])

    def _sheet(self) -> Sheet:
        """Return the table that the command prints."""
        table = sweep_table(self.rows, self.primary)
        columns = [[str(cell) for cell in column.cells] for column in table.columns]
        rows = [list(row) for row in zip(*columns, strict=True)]
        return Sheet("", [str(column.header) for column in table.columns], rows, {})
