"""The commands `keel verify` and `keel repair`."""

from pathlib import Path
from typing import Annotated

import typer

from keel.cli.options import AsJson, print_json


def verify(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN...", help="The folders of runs, or folders above them.")],
    as_json: AsJson = False,
) -> None:
    """Check that every file of a run has the content that was written. The exit code is 1 if one has not.

    Example: keel verify runs/digits-mlp-ghbm-seed0
    """
    from keel.runs.finding import find_runs
    from keel.runs.verify import damages

    found = {str(folder.path): list(map(str, damages(folder))) for folder in find_runs(paths)}
    if as_json:
        print_json(found)
    else:
        for path, lines in found.items():
            typer.echo("\n".join([f"{path}: {'damaged' if lines else 'intact'}", *(f"  {line}" for line in lines)]))
    if any(found.values()):
        raise typer.Exit(1)


def repair(path: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]) -> None:
    """Restore a damaged run from the parts that are intact, so that keel resume can continue it.

    Example: keel repair runs/digits-mlp-ghbm-seed0
    """
    from keel.runs.folder import RunFolder
    from keel.runs.repair import repair as repair_run

    done = repair_run(RunFolder.open(path))
    typer.echo("\n".join(done) if done else f"{path}: intact")
