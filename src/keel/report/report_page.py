"""keel.report: the page on runs, from Python."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from keel.config.network import Network
from keel.config.overrides import make_network
from keel.errors import KeelError
from keel.report.comparison import Comparison, compare
from keel.report.notebook import comparison_html
from keel.report.page import write_charts, write_report
from keel.report.sweep import Sweep
from keel.runs.finding import find_runs
from keel.runs.result import Run

Runs = Run | Comparison | Sweep | str | Path
"""What a report can be about: a run, a folder with runs, a comparison or a sweep."""


@dataclass(frozen=True, repr=False)
class ReportPage:
    """A report that was written. It can be used as a path; in a notebook it is shown as curves and a table."""

    path: Path
    """The HTML file."""
    comparison: Comparison
    """The runs in it, with `to_frame`, `to_markdown` and `to_latex`; `skipped` are those that cannot be read."""

    def __repr__(self) -> str:
        return f"<keel.ReportPage {str(self.path)!r}>"

    def __fspath__(self) -> str:
        return os.fspath(self.path)

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        return comparison_html(self.comparison) + f"<p>{escape(str(self.path))}</p>"


def report(
    runs: Runs | Iterable[Runs],
    out: str | Path = "report.html",
    *,
    baseline: str | None = None,
    target: float | None = None,
    network: Network | Mapping[str, Any] | None = None,
    charts: str | Path | None = None,
) -> ReportPage:
    """Write an HTML report on runs, as the command `keel report` does.

    Runs that cannot be read are skipped; the page lists them, and so does `comparison.skipped` of the result.

    Args:
        runs: A run, a comparison, a sweep, a run folder or a folder that contains some, or several of them.
        out: The HTML file to write.
        baseline: The algorithm, or the title of a method, with which the others are compared. The default is that of
            a comparison, otherwise "fedavg".
        target: The target that rounds and bytes are counted to. The default is that of a comparison, otherwise the
            final value of the baseline in the same setting.
        network: Estimate wall-clock time for this network, as in {"up_mbps": 5.0}.
        charts: A folder for the charts as SVG, PDF and PNG files.

    Raises:
        KeelError: A folder has no runs, no run can be read or has an evaluation, or an argument is not valid.
    """
    given = [runs] if isinstance(runs, Runs) else list(runs)
    if not given:
        raise KeelError("runs is empty; give runs, run folders, a comparison or a sweep")
    if len(given) == 1 and isinstance(given[0], Comparison):
        target = given[0].target if target is None else target
        baseline = baseline or _used_baseline(given[0])
    folders = find_runs([path for each in given for path in _paths(each)])
    comparison = compare(folders, baseline, target, _network(network), skip_damaged=True)
    write_report(comparison, Path(out))
    if charts is not None:
        write_charts(comparison, Path(charts))
    return ReportPage(Path(out), comparison)


def _used_baseline(comparison: Comparison) -> str | None:
    """The baseline of a comparison, unless it is a default that no method has."""
    return comparison.baseline if any(comparison.baseline in m.names for m in comparison.methods) else None


def _paths(runs: Runs) -> list[Path]:
    if isinstance(runs, Comparison):
        return runs.paths
    if isinstance(runs, str | Path):
        return [Path(runs)]
    if isinstance(runs, Run | Sweep):
        return [runs.path]
    raise KeelError(f"runs must hold runs, folders, comparisons or sweeps (got {runs!r})")


def _network(network: Network | Mapping[str, Any] | None) -> Network | None:
    return network if network is None or isinstance(network, Network) else make_network(network)
