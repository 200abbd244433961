"""The commands `keel verify` and `keel repair`."""

from pathlib import Path
from typing import Annotated

import typer

from keel.cli.options import AsJson, print_json
from keel.errors import KeelError


def verify(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN...", help="The folders of runs, or folders above them.")],
    as_json: AsJson = False,
) -> None:
    """Check that the files of a run are as they were written. The exit code is 1 if one is not.

    The checkpoints of a run that a process is writing are not checked.

    Example: keel verify runs/digits-mlp-ghbm-seed0
    """
    from keel.runs.finding import find_runs
    from keel.runs.folder import RunFolder
    from keel.runs.verify import damages

    runs: list[RunFolder] = []
    missing: list[KeelError] = []
    for path in paths:
        try:
            runs += find_runs([path])
        except KeelError as error:
            missing.append(error)
    if not runs:
        raise missing[0]
    found = {}
    for folder in runs:
        written = folder.is_being_written()
        found[str(folder.path)] = lines = [str(damage) for damage in damages(folder, checkpoints=not written)]
        if not as_json:
            note = "; it is being written, so its checkpoints were not checked" if written else ""
            typer.echo(f"{folder.path}: {'damaged' if lines else 'intact'}{note}")
            typer.echo("".join(f"  {line}\n" for line in lines), nl=False)
    if as_json:
        print_json(found)
    if missing:
        raise missing[0]
    if any(found.values()):
        raise typer.Exit(1)


def repair(path: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]) -> None:
    """Restore a damaged run from its intact parts. Then keel resume can continue it.

    Example: keel repair runs/digits-mlp-ghbm-seed0
    """
    from keel.runs.folder import RunFolder
    from keel.runs.repair import repair as repair_run

    done = repair_run(RunFolder.open(path))
    typer.echo("\n".join(done) if done else f"{path}: intact")
