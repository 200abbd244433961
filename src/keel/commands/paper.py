"""keel paper: the paper's tables and figures by name."""

from enum import StrEnum
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from keel.commands.options import AsJson, DryRun, Quiet, print_json

if TYPE_CHECKING:
    from keel.reporting.tables import Sheet

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="The paper's tables and figures, by name.")

HERE = Path("runs/paper")
Out = Annotated[Path, typer.Option(help="Where runs and renderings go; runs that are there are used.")]


class Scale(StrEnum):
    """How much of it."""

    paper = "paper"
    desktop = "desktop"
    smoke = "smoke"


@app.command("list")
def paper_list(out: Out = HERE, as_json: AsJson = False) -> None:
    """List the tables and figures: what they show, what they cost, what is there.

    Example: keel paper list
    """
    from rich.padding import Padding

    from keel.paper.price import listing, listing_lines
    from keel.terminal import console

    rows = listing(out)
    if as_json:
        print_json(rows)
        return
    for indent, line in listing_lines(rows, out):
        if console.is_terminal:
            console.print(Padding(line, (0, 0, 0, indent)))
        else:
            console.print(" " * indent + line, soft_wrap=True)


@app.command("run")
def paper_run(
    name: Annotated[str, typer.Argument(help="A table or figure that keel paper list names, or its number.")],
    scale: Annotated[Scale, typer.Option(help="The printed protocol, hours on two cores, or seconds.")] = Scale.smoke,
    out: Out = HERE,
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs of each method, instead of the recipe's.")] = None,
    as_is: Annotated[bool, typer.Option("--as-is", help="Run nothing: render what has ended.")] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Run what a table or figure needs, and render it.

    Stopped, the same command goes on. Example: keel paper run tau --scale smoke
    """
    from keel.paper.recipes import check_scale, find
    from keel.paper.results import make
    from keel.paper.running import Shelf, run_parts
    from keel.runs.room import check_place

    item = find(name)
    check_scale(item, scale.value)
    check_place(out)
    if dry_run:
        _price(item.name, scale, out, seeds, as_json, quiet)
        return
    if not as_is:
        run_parts(item.parts(scale.value), out, seeds, quiet)
    result = make(item, scale.value, Shelf(out), seeds)

    from keel.paper.views import title_of, view, write
    from keel.terminal import console

    shown = view(result, "" if out == HERE else f" --out {quote(str(out))}")
    files = write(result, shown, out / f"{item.name}-{scale}")
    if as_json:
        print_json(result)
        return
    console.print(f"{title_of(result)}\n", soft_wrap=True)
    for sheet in shown.sheets:
        _print_sheet(sheet)
    for note in shown.notes:
        console.print(note, soft_wrap=True)
    console.print(f"\nFiles:  {', '.join(file.name for file in files)} in {files[0].parent}", soft_wrap=True)


def _price(name: str, scale: Scale, out: Path, seeds: int | None, as_json: bool, quiet: bool) -> None:
    from keel.paper.price import priced, priced_sheets, priced_words
    from keel.paper.recipes import find
    from keel.terminal import console, errors

    def tell(what: str) -> None:
        if not quiet:
            errors.print(f"measuring {what}", soft_wrap=True)

    found = priced(find(name).parts(scale.value), out, seeds, tell)
    if as_json:
        print_json(found)
        return
    for sheet in priced_sheets(found):
        _print_sheet(sheet)
    console.print(priced_words(found), soft_wrap=True)


def _print_sheet(sheet: "Sheet") -> None:
    """In pieces that fit the terminal; in a pipe whole."""
    from keel.reporting.tables import fitted, terminal_table
    from keel.terminal import console, print_table

    for piece in fitted(sheet, console.width) if console.is_terminal else [sheet]:
        if piece.title:
            console.print(f"{piece.title}\n", soft_wrap=not console.is_terminal)
        print_table(terminal_table(piece))
        console.print()
