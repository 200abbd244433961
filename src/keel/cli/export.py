"""The command `keel export`."""

from pathlib import Path
from typing import Annotated

import typer

from keel.cli.options import AsJson, print_json


def export(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="The file to write, which ends in .safetensors.  [default: model.safetensors]",
        ),
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="The best model on the validation examples (evaluation.select).")
    ] = False,
    adapters: Annotated[
        bool, typer.Option("--adapters", help="Only the adapters of a model of peft, as adapter_model.safetensors.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write the trained model of a run as a safetensors file. A model card is written next to it.

    Example: keel export runs/digits-mlp-ghbm-seed0 -o model.safetensors
    """
    from keel.cli.terminal import console
    from keel.runs.export import export as export_run
    from keel.runs.folder import RunFolder

    exported = export_run(RunFolder.open(path), out, force=force, best=best, adapters=adapters)
    files = [exported.model, exported.card, *([exported.config] if exported.config else [])]
    if as_json:
        print_json({"files": list(map(str, files)), "sha256": exported.sha256, "round": exported.round})
        return
    console.print(f"model after round {exported.round}: {', '.join(map(str, files))}", soft_wrap=True)
