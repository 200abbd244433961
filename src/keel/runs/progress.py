"""Progress of runs: bars in a terminal and in a notebook, plain lines on standard error in a pipe, nothing if quiet."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import Any, TypedDict

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from keel.core.observers import Observer, RoundEnd
from keel.core.records import PrimaryMetric, Record, primary_metric
from keel.core.training_state import TrainingState
from keel.runs.folder import RunFolder
from keel.units import size

errors = Console(stderr=True, highlight=False, markup=False)


class RoundProgress(TypedDict, total=False):
    """What progress shows of a round."""

    round: int
    bytes_down: int
    bytes_up: int
    diverged: bool
    metric: str
    """The key of the primary metric."""
    maximize: bool
    value: float
    """The primary metric; missing unless the round was evaluated."""
    epsilon: float
    """With `[privacy]`: epsilon after the round."""


ProgressCallback = Callable[[int, RoundProgress], None]
"""Called with the number of a run and the progress of its round."""


class ProgressObserver(Observer):
    """Calls a function with the progress of each round."""

    def __init__(self, report: Callable[[RoundProgress], None]):
        self.report = report
        self.primary = PrimaryMetric()

    def round_ended(self, event: RoundEnd) -> None:
        self.primary = event.loop.task.primary

    def round_recorded(self, record: Record, state: TrainingState, seconds: float) -> None:
        self.report(progress_of(record, self.primary))


def progress_of(record: Record, primary: PrimaryMetric) -> RoundProgress:
    """Return the part of a record that progress shows."""
    progress: RoundProgress = {"round": record["round"], "metric": primary.name, "maximize": primary.maximize}
    for key in ("bytes_down", "bytes_up", "diverged"):
        if key in record:
            progress[key] = record[key]
    if isinstance(value := record.get(primary.name), int | float):
        progress["value"] = value
    if (epsilon := record.get("epsilon")) is not None:
        progress["epsilon"] = epsilon
    return progress


@contextmanager
def show_progress(
    labels: list[str],
    rounds: list[int],
    quiet: bool = False,
    names: list[str] | None = None,
    paths: list[Path] | None = None,
) -> Iterator[ProgressCallback]:
    """Show the progress of several runs, and yield the callback that reports their rounds.

    Args:
        labels: The label of each run; runs of one label share a bar.
        rounds: The number of rounds of each run.
        quiet: Show nothing.
        names: What distinguishes the runs of one label, as in "seed 3".
        paths: The folder of each run, from which the bytes of a resumed run's earlier rounds are read.
    """
    if quiet:
        yield lambda number, record: None
        return
    totals = dict.fromkeys(labels, 0)
    for label, total in zip(labels, rounds, strict=True):
        totals[label] += total
    if errors.is_jupyter:
        with _Notebook(totals) as notebook:
            yield _Totals(labels, names, paths, notebook)
    elif errors.is_terminal:
        with _progress_bars() as bars:
            yield _Totals(labels, names, paths, _Bars(bars, totals))
    else:
        yield _Totals(labels, names, paths, _Lines(totals))


class _Totals:
    """Adds up the rounds and the bytes of the runs that share a label."""

    def __init__(
        self,
        labels: list[str],
        names: list[str] | None,
        paths: list[Path] | None,
        show: Callable[[str, int, str], None],
    ):
        self.labels, self.names, self.paths, self.show = labels, names or labels, paths, show
        self.done = [0] * len(labels)
        self.bytes = dict.fromkeys(labels, 0)
        self.quality = dict.fromkeys(labels, "")
        self.diverged = dict.fromkeys(labels, 0)
        self.epsilon = dict.fromkeys(labels, 0.0)
        """The largest of the runs of a label."""

    def __call__(self, number: int, progress: RoundProgress) -> None:
        label = self.labels[number]
        if self.done[number] == 0 and progress["round"] > 1 and self.paths is not None:
            self.bytes[label] += _bytes_before(self.paths[number], progress["round"])
        self.done[number] = progress["round"]
        self.bytes[label] += _bytes(progress)
        self.diverged[label] += bool(progress.get("diverged"))
        if "value" in progress:
            run = f" ({self.names[number]})" if self.names[number] != label else ""
            self.quality[label] = f"{_quality(progress)}{run}"
        self.epsilon[label] = max(self.epsilon[label], progress.get("epsilon", 0.0))
        done = sum(d for d, other in zip(self.done, self.labels, strict=True) if other == label)
        failed = f"{self.diverged[label]} diverged" if self.diverged[label] else ""
        private = f"epsilon {self.epsilon[label]:.3g}" if self.epsilon[label] else ""
        state = "  ".join(part for part in (size(self.bytes[label]), failed, private, self.quality[label]) if part)
        self.show(label, done, state)


def _quality(progress: RoundProgress) -> str:
    """Return the value of the primary metric, with its name unless it is the usual accuracy."""
    primary = primary_metric(progress)
    value = primary.text(progress["value"])
    return value if primary == PrimaryMetric() else f"{primary.label} {value}"


def _bytes(record: Record | RoundProgress) -> int:
    return record.get("bytes_down", 0) + record.get("bytes_up", 0)


def _bytes_before(path: Path, round: int) -> int:
    """Return the bytes of the rounds before this one. Later rounds may be in the file already."""
    return sum(_bytes(record) for record in RunFolder(path).records() if record["round"] < round)


class _Bars:
    """One bar per label."""

    def __init__(self, bars: Progress, totals: dict[str, int]):
        self.bars = bars
        self.tasks: dict[str, TaskID] = {
            label: bars.add_task(label, total=total, state="") for label, total in totals.items()
        }

    def __call__(self, label: str, done: int, state: str) -> None:
        self.bars.update(self.tasks[label], completed=done, state=state)


class _Notebook:
    """One bar per label as HTML below the cell, without widgets."""

    SECONDS = 0.2
    """The shortest interval between two updates."""

    def __init__(self, totals: dict[str, int]):
        self.lines = {label: (0, total, "") for label, total in totals.items()}
        self.due = 0.0

    def __enter__(self) -> "_Notebook":
        display = import_module("IPython.display").display  # no dependency of Keel: a notebook brings it
        self.display: Any = display(self, display_id=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.display.update(self)

    def __call__(self, label: str, done: int, state: str) -> None:
        self.lines[label] = (done, self.lines[label][1], state)
        if monotonic() > self.due:
            self.due = monotonic() + self.SECONDS
            self.display.update(self)

    def _repr_html_(self) -> str:
        rows = [
            f'<tr><td>{escape(label)}</td><td><progress value="{done}" max="{total}"></progress></td>'
            f"<td>{done}/{total} rounds</td><td>{escape(state)}</td></tr>"
            for label, (done, total, state) in self.lines.items()
        ]
        return f"<table>{''.join(rows)}</table>"


class _Lines:
    """Ten lines per label, and one for each run that diverges."""

    def __init__(self, totals: dict[str, int]):
        self.totals = totals
        self.tenths = dict.fromkeys(totals, 0)

    def __call__(self, label: str, done: int, state: str) -> None:
        tenths = 10 * done // self.totals[label]
        if tenths > self.tenths[label] or "diverged" in state:
            self.tenths[label] = tenths
            errors.print(f"{label}: {done} of {self.totals[label]} rounds  {state}", soft_wrap=True)


def _progress_bars() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.completed:.0f}/{task.total:.0f} rounds"),
        TextColumn("{task.fields[state]}", justify="right", table_column=Column(no_wrap=True, max_width=34)),
        TimeRemainingColumn(compact=True),
        console=errors,
        expand=True,
    )
