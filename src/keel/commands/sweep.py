"""keel sweep."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from keel.commands.options import Address, AsJson, DryRun, Engine, Quiet, print_json, with_options
from keel.commands.price import print_price


def sweep(
    spec: Annotated[
        Path | None, typer.Argument(help="A TOML spec, which may have a [search] table; without one, defaults.")
    ] = None,
    over: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUES", help="Search a field: key=value,value or key=low..high[,log]."),
    ] = None,
    grid: Annotated[str | None, typer.Option(help="A grid by name: paper, or one of the paper's own.")] = None,
    method: Annotated[str | None, typer.Option(help="grid (the default), random or optuna.")] = None,
    points: Annotated[int | None, typer.Option(help="How many points: random and optuna.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Runs of each point: a number, or seeds with commas.")] = None,
    on: Annotated[str | None, typer.Option(help="What is chosen on: validation (the default) or test.")] = None,
    sampler: Annotated[str | None, typer.Option(help="Optuna's: tpe (the default), random, cmaes or gp.")] = None,
    pruner: Annotated[str | None, typer.Option(help="Optuna's: median, halving or hyperband; else none.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a field.")] = None,
    algorithm: Annotated[str | None, typer.Option(help="algorithm.name: see keel algorithms.")] = None,
    data: Annotated[str | None, typer.Option(help="data.name")] = None,
    model: Annotated[str | None, typer.Option(help="model.name")] = None,
    rounds: Annotated[int | None, typer.Option(help="rounds")] = None,
    engine: Engine = None,
    address: Address = None,
    out: Annotated[Path | None, typer.Option(help="The sweep's folder; else one below runs/.")] = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Search over fields of a spec, and write the best point as a spec.

    Stopped, the same command goes on. Example: keel sweep --algorithm ghbm --over local.lr=0.1,0.3 --seeds 2
    """
    from keel.runs.search import make_plan, parse_over, parse_seeds
    from keel.runs.spec import flatten, merge, override, read_spec
    from keel.runs.sweep import run_sweep

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
    given = override(with_options({}, options), set_ or [])
    plan = make_plan(merge(read_spec(spec) if spec else {}, given), fixed=flatten(given))
    if dry_run:
        points = plan.search.points or len(plan.points())
        print_price([plan.base] * points * len(plan.seeds), as_json)  # as if every point cost the same
        return
    ended = run_sweep(plan, out, quiet)
    if as_json:
        print_json({"path": str(ended.path), "best": str(ended.best) if ended.best else None, "points": ended.rows})
    else:
        from keel.reporting.tables import sweep_explanation, sweep_table
        from keel.terminal import console, print_table

        print_table(sweep_table(ended.rows))
        console.print(f"\n{sweep_explanation(ended.rows, plan.search.on)}\n")
        console.print(f"Points: {ended.path / 'sweep.json'}", soft_wrap=True)
        if ended.best is not None:
            console.print(f"Best:   keel run {shlex.quote(str(ended.best))}", soft_wrap=True)
    if ended.best is None:
        typer.echo("keel: no point finished, so that none is chosen", err=True)
        raise typer.Exit(1)
