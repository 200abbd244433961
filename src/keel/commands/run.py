"""keel run and keel resume."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from keel.commands.options import Address, AsJson, DryRun, Engine, Quiet, print_json, with_options
from keel.commands.price import print_price


def run(
    spec: Annotated[Path | None, typer.Argument(help="A TOML spec; without one, defaults and options.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a field.")] = None,
    algorithm: Annotated[str | None, typer.Option(help="algorithm.name: see keel algorithms.")] = None,
    data: Annotated[str | None, typer.Option(help="data.name")] = None,
    model: Annotated[str | None, typer.Option(help="model.name")] = None,
    clients: Annotated[int | None, typer.Option(help="data.clients")] = None,
    alpha: Annotated[float | None, typer.Option(help="data.alpha: 0 is one class per client.")] = None,
    partition: Annotated[str | None, typer.Option(help="data.partition: dirichlet, iid or key.")] = None,
    rounds: Annotated[int | None, typer.Option(help="rounds")] = None,
    lr: Annotated[float | None, typer.Option(help="local.lr")] = None,
    rate: Annotated[float | None, typer.Option(help="participation.rate")] = None,
    seed: Annotated[int | None, typer.Option(help="seed")] = None,
    engine: Engine = None,
    address: Address = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; else a new one below runs/.")] = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Run one experiment, from a spec or from options alone.

    Example: keel run --algorithm ghbm --rounds 100 --set algorithm.tau=20
    """
    from keel.runs.run import run as run_spec
    from keel.runs.spec import make_spec, override, read_spec
    from keel.terminal import announcing, watching

    options = {
        "algorithm": {"name": algorithm},
        "data": {"name": data, "clients": clients, "alpha": alpha, "partition": partition},
        "model": {"name": model},
        "rounds": rounds,
        "local": {"lr": lr},
        "participation": {"rate": rate},
        "seed": seed,
        "engine": {"name": engine, "address": address},
    }
    table = override(with_options(read_spec(spec) if spec else {}, options), set_ or [])
    resolved = make_spec(table)
    if dry_run:
        print_price([resolved], as_json)
        return
    with watching([resolved.algorithm.title], [resolved.rounds], quiet) as watch:
        ended = run_spec(resolved, out=out, hooks=[lambda record, *_: watch(0, record)], announce=announcing(quiet))
    _report_end(ended.path, ended.summary, as_json)


def resume(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run that was stopped.")],
    address: Address = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Go on with a run that was stopped.

    Example: keel resume runs/digits-mlp-ghbm-seed0
    """
    from keel.runs.folder import RunFolder
    from keel.runs.run import resume as resume_run
    from keel.terminal import watching

    spec = RunFolder.open(path).spec
    with watching([spec.algorithm.title], [spec.rounds], quiet) as watch:
        ended = resume_run(path, address=address, hooks=[lambda record, *_: watch(0, record)])
    _report_end(ended.path, ended.summary, as_json)


def _report_end(path: Path, summary: dict[str, Any], as_json: bool) -> None:
    from keel.terminal import console, errors
    from keel.units import percent, size

    if as_json:
        print_json({**summary, "path": str(path)})
    else:
        traffic = size(summary["bytes_down"] + summary["bytes_up"])
        quality = summary["accuracy"] if summary["accuracy"] is not None else summary["last_accuracy"]
        console.print(
            f"{summary['status']} after {summary['rounds']} round{'s' * (summary['rounds'] != 1)}: "
            f"accuracy {percent(quality)}, "
            f"{traffic} sent, {summary['seconds']:.1f} s ({summary['engine']})",
            soft_wrap=True,
        )
        console.print(f"run: {path}", soft_wrap=True)
    if summary["status"] == "interrupted":
        errors.print(f"stopped; go on with: keel resume {shlex.quote(str(path))}", soft_wrap=True)
        raise typer.Exit(130)
