"""What people see while work goes on: bars in a terminal, plain lines in a pipe, nothing when quiet."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from keel.rounds import Record
from keel.runs.room import Room
from keel.units import percent, size

console = Console(highlight=False, markup=False)
errors = Console(stderr=True, highlight=False, markup=False)

WIDE = 10_000


def print_table(table: Table) -> None:
    """A table as wide as the terminal lets it be; in a pipe a row is a line."""
    (console if console.is_terminal else Console(highlight=False, markup=False, width=WIDE)).print(table)


Watcher = Callable[[int, Record], None]
"""Hears of a round of run number so-and-so."""


@contextmanager
def fetching(label: str, quiet: bool = False) -> Iterator[Callable[[int, int | None], None]]:
    """A bar for a download, told the bytes that are there and how many there will be; a line for a pipe."""
    if quiet or not errors.is_terminal:
        if not quiet:
            errors.print(f"fetching {label}")
        yield lambda there, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors) as bars:
        task = bars.add_task(label, total=None)
        yield lambda there, total: bars.update(task, completed=there, total=total)


def announcing(quiet: bool) -> Callable[[Room], None]:
    """Tells what a run can take, before it begins."""
    return lambda room: None if quiet else errors.print(f"Takes {room}.", soft_wrap=True)


@contextmanager
def watching(
    labels: list[str], rounds: list[int], quiet: bool = False, names: list[str] | None = None
) -> Iterator[Watcher]:
    """A watcher of several runs; those of one label share a bar, and `names` tell them apart there.

    It writes to standard error, not among results.
    """
    if quiet:
        yield lambda number, record: None
        return
    totals = dict.fromkeys(labels, 0)
    for label, total in zip(labels, rounds, strict=True):
        totals[label] += total
    if errors.is_terminal:
        with _bars() as bars:
            yield _Watched(labels, names, _Bars(bars, totals))
    else:
        yield _Watched(labels, names, _Lines(totals))


class _Watched:
    """Adds up the rounds and the bytes of the runs that share a label."""

    def __init__(self, labels: list[str], names: list[str] | None, show: Callable[[str, int, str], None]):
        self.labels, self.names, self.show = labels, names or labels, show
        self.done = [0] * len(labels)
        self.bytes = dict.fromkeys(labels, 0)
        self.accuracy = dict.fromkeys(labels, "")
        self.diverged = dict.fromkeys(labels, 0)

    def __call__(self, number: int, record: Record) -> None:
        self.done[number] = record["round"]
        label = self.labels[number]
        self.bytes[label] += record.get("bytes_down", 0) + record.get("bytes_up", 0)
        self.diverged[label] += bool(record.get("diverged"))
        if "accuracy" in record:
            whose = f" ({self.names[number]})" if self.names[number] != label else ""
            self.accuracy[label] = f"{percent(record['accuracy'])}{whose}"
        done = sum(d for d, other in zip(self.done, self.labels, strict=True) if other == label)
        failed = f"{self.diverged[label]} diverged" if self.diverged[label] else ""
        state = "  ".join(part for part in (size(self.bytes[label]), failed, self.accuracy[label]) if part)
        self.show(label, done, state)


class _Bars:
    def __init__(self, bars: Progress, totals: dict[str, int]):
        self.bars = bars
        self.tasks: dict[str, TaskID] = {
            label: bars.add_task(label, total=total, state="") for label, total in totals.items()
        }

    def __call__(self, label: str, done: int, state: str) -> None:
        self.bars.update(self.tasks[label], completed=done, state=state)


class _Lines:
    """Ten lines for each label."""

    def __init__(self, totals: dict[str, int]):
        self.totals = totals
        self.tenths = dict.fromkeys(totals, 0)

    def __call__(self, label: str, done: int, state: str) -> None:
        tenths = 10 * done // self.totals[label]
        if tenths > self.tenths[label] or "diverged" in state:
            self.tenths[label] = tenths
            errors.print(f"{label}: {done} of {self.totals[label]} rounds  {state}", soft_wrap=True)


def _bars() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.completed:.0f}/{task.total:.0f} rounds"),
        TextColumn("{task.fields[state]}", justify="right", table_column=Column(no_wrap=True, max_width=34)),
        TimeRemainingColumn(compact=True),
        console=errors,
        expand=True,
    )
