"""The command. Imports what is heavy only when a command needs it, so that --help answers at once."""

import json
import os
import shlex
import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keel.deploy.cli import app as deploy_app
from keel.errors import KeelError, Stopped, unknown

if TYPE_CHECKING:
    from keel.reporting.comparison import Comparison
    from keel.runs.spec import Spec

app = typer.Typer(
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def keel(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Federated learning that does not drift."""
    if version:
        from importlib.metadata import version as version_of

        typer.echo(version_of("keel-fl"))
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


USAGE_ERROR: Any = typer.BadParameter.__bases__[0]
"""What typer raises for a wrong option; it has no public name in every version that Keel lives with."""


class Format(StrEnum):
    """The forms of a table."""

    text = "text"
    markdown = "markdown"
    latex = "latex"
    csv = "csv"


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
Target = Annotated[
    str | None,
    typer.Option(help="What is to be reached: a number, or the algorithm whose final accuracy it is (else FedAvg's)."),
]
Interval = Annotated[bool, typer.Option("--interval", help="95 % confidence intervals instead of deviations.")]
Cost = Annotated[bool, typer.Option("--cost", help="Also the cost to reach the target, by the paper's procedure.")]
Form = Annotated[Format, typer.Option("--format", help="How the table is printed.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what it would take, and run nothing.")]


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the run folders and report.html go.")] = Path("runs/demo"),
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each method.")] = 5,
    rounds: Annotated[int | None, typer.Option(min=1, help="Shorter or longer than the 300 of the demo.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compare four methods on handwritten digits.

    Example: keel demo
    """
    from keel.demo import run_demo
    from keel.reporting.page import write_report

    comparison = run_demo(out, seeds, rounds, quiet)
    report = out / "report.html"
    write_report(comparison, report)
    if as_json:
        _print_json(comparison.rows())
        return
    from keel.reporting.tables import explanation, results, terminal_table
    from keel.terminal import console

    console.print()
    console.print(f"Handwritten digits, 100 clients with one class each, 10 % in a round, {seeds} seeds.\n")
    console.print(terminal_table(results(comparison)))
    console.print(f"\n{explanation(comparison)}\n")
    console.print(f"Runs:   {out}")
    console.print(f"Report: {report.absolute().as_uri()}", soft_wrap=True)


@app.command()
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
    engine: Annotated[str | None, typer.Option(help="engine.name: auto, serial, cohort or pool.")] = None,
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
        "engine": {"name": engine},
    }
    table = override(_with_options(read_spec(spec) if spec else {}, options), set_ or [])
    resolved = make_spec(table)
    if dry_run:
        _print_price([resolved], as_json)
        return
    with watching([resolved.algorithm.title], [resolved.rounds], quiet) as watch:
        ended = run_spec(resolved, out=out, hooks=[lambda record, *_: watch(0, record)], announce=announcing(quiet))
    _report_end(ended.path, ended.summary, as_json)


@app.command()
def resume(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run that was stopped.")],
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
        ended = resume_run(path, hooks=[lambda record, *_: watch(0, record)])
    _report_end(ended.path, ended.summary, as_json)


@app.command()
def compare(
    spec: Annotated[Path | None, typer.Argument(help="A TOML spec that all runs share.")] = None,
    methods: Annotated[str | None, typer.Option(help="Algorithms with commas between: fedavg,ghbm,fedhbm.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each method, from the spec's seed on.")] = 5,
    over: Annotated[
        list[str] | None, typer.Option(metavar="KEY=A,B", help="Another field and its values, as data.alpha=0,10000.")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a field.")] = None,
    data: Annotated[str | None, typer.Option(help="data.name")] = None,
    model: Annotated[str | None, typer.Option(help="model.name")] = None,
    rounds: Annotated[int | None, typer.Option(help="rounds")] = None,
    rate: Annotated[float | None, typer.Option(help="participation.rate")] = None,
    target: Target = None,
    interval: Interval = False,
    cost: Cost = False,
    out: Annotated[Path, typer.Option(help="Where the run folders and report.html go.")] = Path("runs/compare"),
    form: Form = Format.text,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compare methods over seeds, and over any other fields.

    Runs that exist are not run again, interrupted ones go on. Example: keel compare --methods fedavg,ghbm --seeds 3
    """
    from keel.reporting.comparison import compare as compare_runs
    from keel.reporting.page import write_report
    from keel.runs.comparing import jobs_of, run_jobs
    from keel.runs.spec import override, read_spec

    options = {
        "data": {"name": data},
        "model": {"name": model},
        "rounds": rounds,
        "participation": {"rate": rate},
    }
    table = override(_with_options(read_spec(spec) if spec else {}, options), set_ or [])
    names = [name.strip() for name in (methods or "").split(",") if name.strip()]
    jobs = jobs_of(table, names, seeds, over or [], out)
    baseline, number = _target(target)
    known = {job.spec.algorithm.name for job in jobs}
    if baseline is not None and baseline not in known:
        raise unknown("--target", baseline, known)
    if dry_run:
        _print_price([job.spec for job in jobs], as_json)
        return
    comparison = compare_runs(run_jobs(jobs, quiet), baseline, number)
    report = out / "report.html"
    write_report(comparison, report)
    _print_comparison(comparison, form, interval, cost, as_json, report)


@app.command()
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
    given = override(_with_options({}, options), set_ or [])
    plan = make_plan(merge(read_spec(spec) if spec else {}, given), fixed=flatten(given))
    if dry_run:
        points = plan.search.points or len(plan.points())
        _print_price([plan.base] * points * len(plan.seeds), as_json)  # as if every point cost the same
        return
    ended = run_sweep(plan, out, quiet)
    if as_json:
        _print_json({"path": str(ended.path), "best": str(ended.best) if ended.best else None, "points": ended.rows})
    else:
        from keel.reporting.tables import sweep_explanation, sweep_table
        from keel.terminal import console

        console.print(sweep_table(ended.rows))
        console.print(f"\n{sweep_explanation(ended.rows, plan.search.on)}\n")
        console.print(f"Points: {ended.path / 'sweep.json'}", soft_wrap=True)
        if ended.best is not None:
            console.print(f"Best:   keel run {shlex.quote(str(ended.best))}", soft_wrap=True)
    if ended.best is None:
        typer.echo("keel: no point finished, so that none is chosen", err=True)
        raise typer.Exit(1)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of them.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("report.html"),
    charts: Annotated[Path | None, typer.Option(help="A folder for the charts as SVG, PDF and PNG files.")] = None,
    target: Target = None,
    interval: Interval = False,
    cost: Cost = False,
    network: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Time as in a federation with this network, as up_mbps=5."),
    ] = None,
    form: Form = Format.text,
    as_json: AsJson = False,
) -> None:
    """Write a page about any number of runs.

    Example: keel report runs/demo -o report.html
    """
    from keel.reporting.comparison import compare
    from keel.reporting.page import write_charts, write_report
    from keel.runs.batch import read_runs
    from keel.runs.spec import read_network

    baseline, number = _target(target)
    comparison = compare(read_runs(runs), baseline, number, read_network(network) if network else None)
    write_report(comparison, out)
    if charts is not None:
        write_charts(comparison, charts)
    _print_comparison(comparison, form, interval, cost, as_json, out)


@app.command()
def algorithms(as_json: AsJson = False) -> None:
    """List the algorithms and what they send.

    Example: keel algorithms --json
    """
    from keel.algorithms import REGISTRY, describe

    rows = [describe(cls) for cls in REGISTRY.values()]
    if as_json:
        _print_json(rows)
        return
    from rich.table import Table

    from keel.terminal import console

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("name", "paper", "memory", "mean", "down", "up", "cost"):
        table.add_column(name, justify="right" if name in ("down", "up", "cost") else "left", no_wrap=True)
    for row in rows:
        properties = ["yes" if row[key] else "no" for key in ("stateful", "mean_suffices")]
        traffic = [f"{row[key]:g}" for key in ("down", "up", "relative_cost")]
        table.add_row(row["name"], row["paper"], *properties, *traffic)
    console.print(table)
    console.print("\nmemory: kept by clients between rounds. mean: all the server needs of reports.")


app.add_typer(deploy_app, name="deploy")
data_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="List, fetch and look at data sets.")
app.add_typer(data_app, name="data")


@data_app.command("list")
def data_list(as_json: AsJson = False) -> None:
    """List the data sets, and whether their files are there.

    Example: keel data list
    """
    from keel.data.catalog import CATALOG, describe
    from keel.data.store import data_folder

    rows = [describe(name) for name in CATALOG]
    if as_json:
        _print_json(rows)
        return
    from rich.table import Table

    from keel.terminal import console

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("name", "what", "files"):
        table.add_column(name, no_wrap=name != "what")
    for row in rows:
        table.add_row(row["name"], row["title"], row["files"])
    console.print(table)
    origin = "from KEEL_DATA" if os.environ.get("KEEL_DATA") else "KEEL_DATA would name another"
    console.print(f"\nData folder: {data_folder()} ({origin})", soft_wrap=True)


@data_app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(help="A data set that keel data list names.")], quiet: Quiet = False
) -> None:
    """Fetch a data set's files, check them and prepare them.

    A download that was cut off is gone on with. Example: keel data get cifar10
    """
    from inspect import signature

    from keel.data.catalog import find, load
    from keel.data.fetch import fetch
    from keel.data.store import data_folder
    from keel.terminal import console, fetching

    entry, folder = find(name), data_folder()
    for download in entry.downloads:
        if download.missing(folder):
            with fetching(download.path, quiet) as progress:
                fetch(download, folder, progress)
    if entry.files_of_its_own:
        load(name, {})
        console.print(f"{name} is ready in {folder}", soft_wrap=True)
    elif signature(entry.load).parameters:
        raise KeelError(f"data.name: {name!r} is for files of your own; keel data show {name} --set ... looks at them")
    else:
        console.print(f"{name} needs no files")


@data_app.command("show")
def data_show(
    name: Annotated[str, typer.Argument(help="A data set that keel data list names.")],
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a field.")] = None,
    clients: Annotated[int | None, typer.Option(help="data.clients")] = None,
    alpha: Annotated[float | None, typer.Option(help="data.alpha: 0 is one class per client.")] = None,
    partition: Annotated[str | None, typer.Option(help="data.partition: dirichlet, iid or key.")] = None,
    seed: Annotated[int | None, typer.Option(help="seed")] = None,
    as_json: AsJson = False,
) -> None:
    """Show how a data set is dealt out: sizes, classes, and who holds what.

    Example: keel data show digits --alpha 0.5
    """
    from keel.data.catalog import find
    from keel.data.holdings import holdings
    from keel.runs.spec import make_spec, override, split_of
    from keel.task import load_data

    find(name)
    options = {"data": {"name": name, "clients": clients, "alpha": alpha, "partition": partition}, "seed": seed}
    spec = make_spec(override(_with_options({}, options), set_ or []))
    told = {**holdings(load_data(spec)), "split": split_of(spec.data)}
    if as_json:
        _print_json(told)
        return
    from keel.reporting.tables import heterogeneity, picture
    from keel.terminal import console

    console.print(heterogeneity(told))
    console.print()
    console.print(picture(told, console.width))


def _with_options(table: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given, put over the table."""
    for key, value in options.items():
        if isinstance(value, dict):
            given = {field: v for field, v in value.items() if v is not None}
            if given:
                below = table.get(key, {})
                table[key] = {**below, **given} if isinstance(below, dict) else below
        elif value is not None:
            table[key] = value
    return table


def _report_end(path: Path, summary: dict[str, Any], as_json: bool) -> None:
    from keel.terminal import console, errors
    from keel.units import percent, size

    if as_json:
        _print_json({**summary, "path": str(path)})
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


def _print_price(specs: list["Spec"], as_json: bool) -> None:
    """What runs would take together; those that differ in the seed alone are measured once."""
    from keel.runs.price import price
    from keel.terminal import console
    from keel.units import duration, size

    groups: dict[str, list[Spec]] = {}
    for spec in specs:
        groups.setdefault(spec.model_copy(update={"seed": 0}).to_toml(), []).append(spec)
    prices = [(group, price(group[0])) for group in groups.values()]
    if as_json:
        _print_json([{"label": group[0].label, "runs": len(group), **asdict(found)} for group, found in prices])
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("each run of", overflow="fold")
    networked = any(spec.network is not None for spec in specs)
    for name in ("rounds", "bytes", "disk", "RAM", "time here", *(["federation"] if networked else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for group, found in prices:
        figures = [f"{found.rounds:,}", size(found.bytes), size(found.disk), size(found.ram), duration(found.seconds)]
        figures += [duration(found.federation_seconds)] if found.federation_seconds is not None else []
        table.add_row(group[0].algorithm.title, *figures)
    console.print(table)
    seconds = sum(len(group) * found.seconds for group, found in prices)
    disk = sum(len(group) * found.disk for group, found in prices)
    runs = f"{len(specs)} run" + "s" * (len(specs) > 1)
    console.print(
        f"\n{runs}: about {duration(seconds)} of computing on this machine, up to {size(disk)} on disk. "
        "RAM: besides the program and the data."
    )


def _target(text: str | None) -> tuple[str | None, float | None]:
    """The baseline and the number that --target says, one of them at the most."""
    try:
        number = None if text is None else float(text)
    except ValueError:
        return text, None
    if number is not None and not 0 < number <= 1:
        raise KeelError(f"--target: {text}; accepted: an accuracy above 0 up to 1, as in 0.8, or an algorithm")
    return None, number


def _print_comparison(
    comparison: "Comparison", form: Format, interval: bool, cost: bool, as_json: bool, page: Path
) -> None:
    from keel.reporting import tables
    from keel.terminal import console

    sheets = [tables.results(comparison, interval), *([tables.costs(comparison)] if cost else [])]
    if as_json:
        _print_json(comparison.rows())
    elif form is Format.csv:
        typer.echo(tables.csv_text(comparison), nl=False)
    elif form is not Format.text:
        typer.echo("\n\n".join(map(tables.markdown if form is Format.markdown else tables.latex, sheets)))
    else:
        for sheet in sheets:
            console.print(tables.terminal_table(sheet))
            console.print()
        console.print(f"{tables.explanation(comparison, interval)}\n")
        console.print(f"Report: {page.absolute().as_uri()}", soft_wrap=True)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


def main() -> None:
    """The entry point: a mistake of the user's is one line and exit code 2, whatever found it."""
    try:
        status = app(standalone_mode=False)
    except (KeelError, USAGE_ERROR) as error:
        message = error.format_message() if isinstance(error, USAGE_ERROR) else str(error)
        typer.echo(f"keel: {' '.join(message.split())}", err=True)
        sys.exit(2)
    except OSError as error:  # a full disk, a folder that cannot be written, a pipe that was closed
        typer.echo(f"keel: {error}", err=True)
        sys.exit(1)
    except (KeyboardInterrupt, typer.Abort):
        typer.echo("keel: stopped at once; what was saved before can be gone on with (keel resume)", err=True)
        sys.exit(130)
    except Stopped:
        typer.echo("keel: stopped; the same command goes on where it was", err=True)
        sys.exit(130)
    sys.exit(status if isinstance(status, int) else 0)
