"""`keel paper`: the paper's tables and figures by name."""

from pathlib import Path
from typing import Annotated

import typer

paper_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="The paper's tables and figures, by name.")


@paper_app.command("run")
def paper_run(
    name: Annotated[str, typer.Argument(help="A table or figure that keel paper list names.")],
    scale: Annotated[str, typer.Option(help="paper, desktop or smoke.")] = "smoke",
    out: Annotated[Path, typer.Option(help="Where runs and results go; what is there is used.")] = Path("runs/paper"),
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs of each method, instead of the recipe's.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Run what a table or figure needs, and render it.

    Example: keel paper run tau --scale smoke
    """
    from keel.paper.recipes import find
    from keel.paper.running import run_parts

    item = find(name)
    run_parts(item.parts(scale), out, seeds, quiet)
