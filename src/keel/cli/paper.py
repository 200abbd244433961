"""keel paper: list, run and render the paper's tables and figures."""

from enum import StrEnum
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from keel.cli.options import AsJson, DryRun, Quiet, print_json

if TYPE_CHECKING:
    from keel.report.tables import Sheet

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="List, run and render the paper's tables and figures."
)

DEFAULT_OUT = Path("runs/paper")
Out = Annotated[Path, typer.Option(help="Folder of the runs and renderings; finished runs in it are reused.")]


class Scale(StrEnum):
    """The size of the experiments."""

    paper = "paper"
    desktop = "desktop"
    smoke = "smoke"


@app.command("list")
def paper_list(out: Out = DEFAULT_OUT, as_json: AsJson = False) -> None:
    """List the tables and figures, their cost and finished runs.

    Example: keel paper list
    """
    from rich.padding import Padding

    from keel.cli.terminal import console
    from keel.paper.estimate import format_listing, list_recipes

    rows = list_recipes(out)
    if as_json:
        print_json(rows)
        return
    for indent, line in format_listing(rows, out):
        if console.is_terminal:
            console.print(Padding(line, (0, 0, 0, indent)))
        else:
            console.print(" " * indent + line, soft_wrap=True)


@app.command("run")
def paper_run(
    name: Annotated[str, typer.Argument(help="A name from keel paper list, or the paper's number.")],
    scale: Annotated[
        Scale, typer.Option(help="paper: the printed protocol; desktop: hours on two cores; smoke: seconds.")
    ] = Scale.smoke,
    out: Out = DEFAULT_OUT,
    seeds: Annotated[
        int | None, typer.Option(min=1, max=1000, help="Number of seeds, instead of the recipe's.")
    ] = None,
    as_is: Annotated[bool, typer.Option("--as-is", help="Run nothing; render the finished runs.")] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Run the missing runs of a table or figure, and render it.

    After an interruption, the same command resumes. Example: keel paper run tau --scale smoke
    """
    from keel.paper.execution import run_parts
    from keel.paper.recipes import check_scale, find_recipe
    from keel.paper.results import make_result
    from keel.paper.run_index import RunIndex
    from keel.runs.resources import check_output_folder

    recipe = find_recipe(name)
    check_scale(recipe, scale.value)
    check_output_folder(out)
    if dry_run:
        _print_estimate(recipe.name, scale, out, seeds, as_json, quiet)
        return
    if not as_is:
        run_parts(recipe.parts(scale.value), out, seeds, quiet)
    result = make_result(recipe, scale.value, RunIndex(out), seeds)

    from keel.cli.terminal import console
    from keel.paper.files import write_files
    from keel.paper.views import make_view, title_of

    view = make_view(result, "" if out == DEFAULT_OUT else f" --out {quote(str(out))}")
    files = write_files(result, view, out / f"{recipe.name}-{scale}")
    if as_json:
        print_json(result)
        return
    console.print(f"{title_of(result)}\n", soft_wrap=True)
    for sheet in view.sheets:
        _print_sheet(sheet)
    for note in view.notes:
        console.print(note, soft_wrap=True)
    console.print(f"\nFiles:  {', '.join(file.name for file in files)} in {files[0].parent}", soft_wrap=True)


def _print_estimate(name: str, scale: Scale, out: Path, seeds: int | None, as_json: bool, quiet: bool) -> None:
    from keel.cli.terminal import console, errors
    from keel.paper.estimate import estimate_parts, estimate_sheets, summarise_estimate
    from keel.paper.recipes import find_recipe

    def report(method: str) -> None:
        if not quiet:
            errors.print(f"measuring {method}", soft_wrap=True)

    rows = estimate_parts(find_recipe(name).parts(scale.value), out, seeds, report)
    if as_json:
        print_json(rows)
        return
    for sheet in estimate_sheets(rows):
        _print_sheet(sheet)
    console.print(summarise_estimate(rows), soft_wrap=True)


def _print_sheet(sheet: "Sheet") -> None:
    """Print a table, in pieces that fit the terminal; in a pipe as a whole."""
    from keel.cli.terminal import console, print_table
    from keel.report.tables import fitted, terminal_table

    for piece in fitted(sheet, console.width) if console.is_terminal else [sheet]:
        if piece.title:
            console.print(f"{piece.title}\n", soft_wrap=not console.is_terminal)
        print_table(terminal_table(piece))
        console.print()
