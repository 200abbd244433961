"""The command `keel sweep`."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from keel.cli.dry_run import print_estimate
from keel.cli.options import (
    Address,
    Algorithm,
    AsJson,
    Data,
    DryRun,
    Engine,
    Model,
    Quiet,
    Rounds,
    Set,
    print_json,
    with_options,
)


def sweep(
    spec: Annotated[
        Path | None,
        typer.Argument(help="A TOML spec, which may have a [search] table (default: defaults and options)."),
    ] = None,
    over: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUES", help="Search a field: key=value,value or key=low..high[,log]."),
    ] = None,
    grid: Annotated[str | None, typer.Option(help="A named grid: paper, or one that docs/sweep.md lists.")] = None,
    method: Annotated[str | None, typer.Option(help="grid (default), random or optuna.")] = None,
    points: Annotated[int | None, typer.Option(help="Number of points for random and optuna.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds per point: a number, or seeds with commas between.")] = None,
    on: Annotated[str | None, typer.Option(help="Select the best point on: validation (default) or test.")] = None,
    sampler: Annotated[str | None, typer.Option(help="Optuna sampler: tpe (default), random, cmaes or gp.")] = None,
    pruner: Annotated[
        str | None, typer.Option(help="Optuna pruner: median, halving or hyperband (default: none).")
    ] = None,
    set_: Set = None,
    algorithm: Algorithm = None,
    data: Data = None,
    model: Model = None,
    rounds: Rounds = None,
    engine: Engine = None,
    address: Address = None,
    out: Annotated[Path | None, typer.Option(help="The folder of the sweep (default: one in runs/).")] = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Search over fields of a spec for the best point.

    The best point is written as a spec. Run the same command again to continue an interrupted sweep.

    Example: keel sweep --algorithm ghbm --over local.lr=0.1,0.3 --seeds 2
    """
    from keel.config.overrides import flatten, merge, override, read_spec
    from keel.runs.search_space import make_plan, parse_over, parse_seeds

    options = {
        "algorithm": {"name": algorithm},
        "data": {"name": data},
        "model": {"name": model},
        "rounds": rounds,
        "engine": {"name": engine, "address": address},
        "search": {
            "grid": grid,
            "method": method,
            "points": points,
            "seeds": None if seeds is None else parse_seeds(seeds),
            "on": on,
            "sampler": sampler,
            "pruner": pruner,
            "fields": parse_over(over) if over else None,
        },
    }
    overrides = override(with_options({}, options), set_ or [])
    plan = make_plan(merge(read_spec(spec) if spec else {}, overrides), fixed=flatten(overrides))
    if dry_run:
        points = plan.search.points or len(plan.points())
        print_estimate([plan.base] * points * len(plan.seeds), as_json)  # assumes that every point costs the same
        return

    from keel.runs.sweep import run_sweep  # after the plan is checked, since it imports PyTorch

    ended = run_sweep(plan, out, quiet)
    if as_json:
        selected = {"metric": ended.primary.name, "maximize": ended.primary.maximize}
        best = str(ended.best) if ended.best else None
        print_json({"path": str(ended.path), "best": best, **selected, "points": ended.rows})
    else:
        from keel.cli.terminal import console, print_table
        from keel.report.sweep_table import sweep_explanation, sweep_table

        print_table(sweep_table(ended.rows, ended.primary))
        console.print(f"\n{sweep_explanation(ended.rows, plan.search.on, ended.primary)}\n")
        console.print(f"Points: {ended.path / 'sweep.json'}", soft_wrap=True)
        if ended.best is not None:
            console.print(f"Best:   keel run {shlex.quote(str(ended.best))}", soft_wrap=True)
    if ended.best is None:
        typer.echo("keel: no point finished, so none is selected", err=True)
        raise typer.Exit(1)
