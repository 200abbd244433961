"""What people see while work goes on: bars in a terminal, plain lines in a pipe, nothing when quiet."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from keel.rounds import Record

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)


class Watcher(Protocol):
    def __call__(self, number: int, record: Record) -> None:
        """Hears of a round of run `number`."""


@contextmanager
def watching(labels: list[str], rounds: list[int], quiet: bool = False) -> Iterator[Watcher]:
    """A watcher for several runs at once; output goes to standard error, so that results can be piped."""
    if quiet:
        yield lambda number, record: None
    elif errors.is_terminal:
        with _bars() as bars:
            tasks = [
                bars.add_task(label, total=total, accuracy="") for label, total in zip(labels, rounds, strict=True)
            ]
            yield lambda number, record: _advance(bars, tasks[number], record)
    else:
        yield lambda number, record: _print_line(labels[number], rounds[number], record)


def _bars() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[accuracy]}", justify="right"),
        TimeRemainingColumn(compact=True),
        console=errors,
        expand=True,
    )


def _advance(bars: Progress, task: object, record: Record) -> None:
    accuracy = {"accuracy": f"{100 * record['accuracy']:.1f} %"} if "accuracy" in record else {}
    if record.get("diverged"):
        accuracy = {"accuracy": "diverged"}
    bars.update(task, completed=record["round"], **accuracy)  # type: ignore[arg-type]


def _print_line(label: str, rounds: int, record: Record) -> None:
    """Ten lines a run, and the last."""
    t = record["round"]
    if record.get("diverged"):
        errors.print(f"{label}: round {t} of {rounds}, diverged")
    elif t == rounds or t % max(1, rounds // 10) == 0:
        accuracy = f", accuracy {100 * record['accuracy']:.1f} %" if "accuracy" in record else ""
        errors.print(f"{label}: round {t} of {rounds}{accuracy}")
