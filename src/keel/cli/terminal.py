"""Output of the commands: the console, tables, and the progress of downloads."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from keel.runs.progress import errors as errors  # commands print notices with it

if TYPE_CHECKING:
    from keel.runs.resources import Footprint

console = Console(highlight=False, markup=False)

UNLIMITED = 10_000
"""Columns of a table that is printed to a pipe."""


def print_table(table: Table) -> None:
    """Print a table in the width of the terminal; in a pipe, each row is one line."""
    (console if console.is_terminal else Console(highlight=False, markup=False, width=UNLIMITED)).print(table)


@contextmanager
def show_download(label: str, quiet: bool = False) -> Iterator[Callable[[int, int | None], None]]:
    """Show the progress of a download, and yield a callback for the bytes received and the total (None: unknown)."""
    if quiet or not errors.is_terminal:
        if not quiet:
            errors.print(f"downloading {label}")
        yield lambda received, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors) as bars:
        task = bars.add_task(label, total=None)
        yield lambda received, total: bars.update(task, completed=received, total=total)


def announce_footprint(quiet: bool) -> Callable[["Footprint"], None]:
    """Return a callback that prints the footprint and the engine of a run before it begins."""

    def announce(footprint: "Footprint") -> None:
        errors.print(f"Footprint: {footprint}.", soft_wrap=True)
        errors.print(f"Engine: {footprint.engine}.", soft_wrap=True)
        if footprint.privacy:
            errors.print(f"Privacy: {footprint.privacy}.", soft_wrap=True)

    return (lambda footprint: None) if quiet else announce
