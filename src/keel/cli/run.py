"""The commands `keel run` and `keel resume`."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keel.cli.dry_run import print_estimate
from keel.cli.options import (
    Address,
    Algorithm,
    Alpha,
    AsJson,
    Clients,
    Data,
    DryRun,
    Engine,
    Lr,
    Model,
    Partition,
    Quiet,
    Rate,
    Rounds,
    Set,
    print_json,
    with_options,
)
from keel.signals import exit_code

if TYPE_CHECKING:
    from keel.core.records import PrimaryMetric, Summary


def run(
    spec: Annotated[Path | None, typer.Argument(help="A TOML spec (default: defaults and options).")] = None,
    set_: Set = None,
    algorithm: Algorithm = None,
    data: Data = None,
    model: Model = None,
    clients: Clients = None,
    alpha: Alpha = None,
    partition: Partition = None,
    rounds: Rounds = None,
    lr: Lr = None,
    rate: Rate = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all random numbers.")] = None,
    engine: Engine = None,
    address: Address = None,
    out: Annotated[Path | None, typer.Option(help="The run folder (default: a new folder in runs/).")] = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Run one experiment, from a spec or from options.

    Example: keel run --algorithm ghbm --rounds 100 --set algorithm.tau=20
    """
    from keel.config.defaults import make_spec
    from keel.config.overrides import override, read_spec

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
        print_estimate([resolved], as_json)
        return

    from keel.cli.terminal import announce_footprint  # after the spec is checked, since these import PyTorch
    from keel.runs.progress import ProgressObserver, show_progress
    from keel.runs.run import run as run_spec

    with show_progress([resolved.algorithm.title], [resolved.rounds], quiet) as watch:
        progress = ProgressObserver(lambda of_round: watch(0, of_round))
        ended = run_spec(resolved, out=out, hooks=[progress], announce=announce_footprint(quiet))
    _report_end(ended.path, ended.summary, as_json)


def resume(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of an interrupted run.")],
    address: Address = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Continue an interrupted run from its last checkpoint.

    Example: keel resume runs/digits-mlp-ghbm-seed0
    """
    from keel.runs.folder import RunFolder
    from keel.runs.progress import ProgressObserver, show_progress
    from keel.runs.run import resume as resume_run

    folder = RunFolder.open(path)
    with show_progress([folder.title], [folder.table.get("rounds", 0)], quiet, paths=[path]) as watch:
        ended = resume_run(path, address=address, hooks=[ProgressObserver(lambda of_round: watch(0, of_round))])
    _report_end(ended.path, ended.summary, as_json)


def _client_mean(path: Path, primary: "PrimaryMetric") -> str:
    """Return the mean over clients at the last evaluation, as a part of a sentence; empty if it is not measured."""
    from keel.runs.folder import RunFolder

    folder = RunFolder(path)
    if "clients" not in folder.table["evaluation"]:
        return ""
    means = [record["clients"]["mean"] for record in folder.records() if "mean" in record.get("clients", {})]
    return f"mean over clients {primary.text(means[-1])}, " if means else ""


def _report_end(path: Path, summary: "Summary", as_json: bool) -> None:
    """Print how a run ended; exit with 130 (Ctrl-C), 143 or 129 if it was interrupted."""
    from keel.cli.terminal import console, errors
    from keel.core.records import end_value, primary_metric
    from keel.units import size

    if as_json:
        print_json({**summary, "path": str(path)})
    else:
        traffic = size(summary["bytes_down"] + summary["bytes_up"])
        primary = primary_metric(summary)
        rule = f"{summary['stop_reason']}; " if summary["status"] == "stopped" else ""
        clients = _client_mean(path, primary)
        epsilon = f"epsilon {summary['epsilon']:.3g}, " if summary.get("epsilon") is not None else ""
        epsilon += f"noise multiplier {summary['noise_multiplier']:.4g}, " if "noise_multiplier" in summary else ""
        console.print(
            f"{summary['status']} after {summary['rounds']} round{'s' * (summary['rounds'] != 1)}: "
            f"{rule}{primary.label} {primary.text(end_value(summary))}, {clients}{epsilon}"
            f"{traffic} sent, {summary['seconds']:.1f} s ({summary['engine']})",
            soft_wrap=True,
        )
        console.print(f"run: {path}", soft_wrap=True)
    if summary["status"] == "interrupted":
        errors.print(f"interrupted; continue with: keel resume {shlex.quote(str(path))}", soft_wrap=True)
        raise typer.Exit(exit_code())
