"""The commands `keel demo`, `keel compare` and `keel report`: methods in one table and on one page."""

from collections.abc import Callable, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keel.cli.dry_run import print_estimate
from keel.cli.options import (
    Address,
    Alpha,
    AsJson,
    Clients,
    Cost,
    Data,
    DryRun,
    Engine,
    Form,
    Format,
    Interval,
    Lr,
    Model,
    Partition,
    Quiet,
    Rate,
    Rounds,
    Set,
    Target,
    print_json,
    with_options,
)
from keel.errors import KeelError

if TYPE_CHECKING:
    from keel.report.comparison import Comparison
    from keel.report.picture import Deviation
    from keel.report.tables import Sheet
    from keel.runs.folder import RunFolder


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the run folders and report.html.")] = Path("runs/demo"),
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Number of runs per method.")] = 5,
    rounds: Annotated[int | None, typer.Option(min=1, help="Number of rounds (default: 600).")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compare five methods on handwritten digits.

    Example: keel demo
    """
    from keel.cli.demo import TITLE, demo_jobs, deviation_job, measured_deviation
    from keel.report.comparison import compare as compare_runs
    from keel.report.picture import curves_picture, deviation_picture
    from keel.runs.compare import run_jobs

    *folders, measured = run_jobs([*demo_jobs(out, seeds, rounds), deviation_job(out, rounds)], quiet)
    comparison, deviation = compare_runs(folders, "fedavg", skip_damaged=True), measured_deviation(measured)
    page = _write_page(out, "fedavg", None, deviation, TITLE)
    if as_json:
        print_json(comparison.rows())
        return
    from keel.cli.terminal import console

    console.print()
    console.print(f"{TITLE}, {seeds} seed{'s' * (seeds > 1)}.\n")
    _print_text(comparison, interval=False, cost=False)
    for picture in (curves_picture(comparison), deviation_picture(deviation)):
        if picture:
            console.print("\n".join([*picture, ""]))
    console.print(f"Runs:   {out}", soft_wrap=True)
    console.print(f"Report: {page.absolute().as_uri()}", soft_wrap=True)


def compare(
    spec: Annotated[Path | None, typer.Argument(help="A TOML spec that all runs share.")] = None,
    methods: Annotated[str | None, typer.Option(help="Algorithms with commas between: fedavg,ghbm,fedhbm.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of runs per method, from the spec's seed on.")] = 5,
    over: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=A,B", help="Also vary a field, as in data.alpha=0,10000; repeatable."),
    ] = None,
    same: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Give a field the first method's value in all methods; repeatable."),
    ] = None,
    set_: Set = None,
    data: Data = None,
    model: Model = None,
    clients: Clients = None,
    alpha: Alpha = None,
    partition: Partition = None,
    rounds: Rounds = None,
    lr: Lr = None,
    rate: Rate = None,
    seed: Annotated[int | None, typer.Option(help="The first seed.")] = None,
    engine: Engine = None,
    address: Address = None,
    target: Target = None,
    interval: Interval = False,
    cost: Cost = False,
    out: Annotated[Path, typer.Option(help="Folder for the run folders and report.html.")] = Path("runs/compare"),
    form: Form = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compare methods over seeds and other fields.

    Finished runs are reused, interrupted runs are resumed.

    Example: keel compare --methods fedavg,ghbm --seeds 3
    """
    from keel.config.overrides import override, read_spec

    options = {
        "data": {"name": data, "clients": clients, "alpha": alpha, "partition": partition},
        "model": {"name": model},
        "rounds": rounds,
        "local": {"lr": lr},
        "participation": {"rate": rate},
        "seed": seed,
        "engine": {"name": engine, "address": address},
    }
    table = override(with_options(read_spec(spec) if spec else {}, options), set_ or [])
    names = [name.strip() for name in (methods or "").split(",") if name.strip()]
    _check_format(form, as_json)
    baseline, number = _target(target)
    _check_first_jobs(table, names, over or [])

    from keel.report.comparison import check_target  # after the specs are checked, since these import PyTorch
    from keel.report.comparison import compare as compare_runs
    from keel.runs.build import make_task
    from keel.runs.compare import baseline_of, jobs_of, run_jobs

    jobs = jobs_of(table, names, seeds, over or [], out, same or [])
    baseline = None if baseline is None else baseline_of(baseline, jobs)
    if number is not None and not 0 < number <= 1:  # the data show whether the metric is a fraction
        check_target(number, {make_task(job.spec).primary for job in jobs[:1]})
    if dry_run:
        print_estimate([job.spec for job in jobs], as_json)
        return
    comparison = compare_runs(run_jobs(jobs, quiet), baseline, number, skip_damaged=True)
    page = _write_page(out, baseline, number)
    _print_comparison(comparison, form, interval, cost, as_json, page, quiet)


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders that contain them.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The HTML file to write.")] = Path("report.html"),
    charts: Annotated[Path | None, typer.Option(help="A folder for the charts as SVG, PDF and PNG files.")] = None,
    target: Target = None,
    interval: Interval = False,
    cost: Cost = False,
    network: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Estimate wall-clock time for this network, as in up_mbps=5."),
    ] = None,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Write no file; show the page at a local address while runs are in progress."),
    ] = False,
    form: Form = None,
    as_json: AsJson = False,
) -> None:
    """Write an HTML report on runs, and print its table.

    Example: keel report runs/demo -o report.html
    """
    from keel.config.overrides import read_network
    from keel.report.comparison import compare
    from keel.report.page import write_charts, write_report
    from keel.runs.finding import find_runs

    _check_format(form, as_json)
    baseline, number = _target(target)
    estimated = read_network(network) if network else None
    if watch:
        if as_json or form is not None or charts is not None:
            raise KeelError("--watch excludes --json, --format and --charts; give one of them")
        _watch(runs, lambda folders: compare(folders, baseline, number, estimated, skip_damaged=True))
        return
    comparison = compare(find_runs(runs), baseline, number, estimated, skip_damaged=True)
    if charts is not None:
        charts.mkdir(parents=True, exist_ok=True)  # an error of it comes before the page is written
    problem = write_report(comparison, out)
    _print_comparison(comparison, form, interval, cost, as_json, out, quiet=False)
    _print_problems(comparison, problem)
    if charts is not None:
        write_charts(comparison, charts)
    if charts is not None and not as_json and form in (None, Format.text):
        typer.echo(f"Charts: {charts}")


def _watch(runs: list[Path], compare_folders: "Callable[[list[RunFolder]], Comparison]") -> None:
    """Show the page on a local address until Ctrl-C, which is how this command ends: the exit code is 0."""
    from keel.report.watch import LivePage, Server
    from keel.signals import raising

    with raising(), Server(LivePage(runs, compare_folders)) as server:
        typer.echo(f"{server.address} (press Ctrl-C to end)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


def _check_first_jobs(table: dict[str, Any], methods: Sequence[str | None], over: list[str]) -> None:
    """Raise the KeelError of each method's first job if it can be known before PyTorch is imported."""
    from keel.config.defaults import completed
    from keel.config.overrides import merge, put
    from keel.runs.search_space import parse_over

    first = merge(table)
    first.pop("seed", None)  # each job has its own
    for field, values in parse_over(over).items():
        if isinstance(values, list):
            put(first, field, values[0])
    for name in methods or [None]:
        completed(with_options({**first}, {"algorithm": {"name": name}}))


def _target(text: str | None) -> tuple[str | None, float | None]:
    """Return the baseline and the number that --target names, one of them at most."""
    try:
        number = None if text is None else float(text)
    except ValueError:
        return text, None
    if number is not None and not isfinite(number):
        raise KeelError(f"--target must be a finite number, as in 0.8, or an algorithm (got {text})")
    return None, number


def _print_comparison(
    comparison: "Comparison", form: Format | None, interval: bool, cost: bool, as_json: bool, page: Path, quiet: bool
) -> None:
    """Print the table, and where the page is: on standard error if a program may read the table."""
    from keel.cli.terminal import console, errors

    readable = not as_json and form in (None, Format.text)
    if as_json:
        print_json(comparison.rows())
    elif readable:
        _print_text(comparison, interval, cost)
    else:
        _print_markup(comparison, form, interval, cost)
    if readable or not quiet:
        (console if readable else errors).print(f"Report: {page.absolute().as_uri()}", soft_wrap=True)


def _print_text(comparison: "Comparison", interval: bool, cost: bool) -> None:
    """Print the tables for the terminal, with the notes that explain them."""
    from keel.cli.terminal import console, print_table
    from keel.report.explanations import difference_notes, explanation
    from keel.report.tables import costs, fitted, results, terminal_table

    recorded = _recorded(comparison)
    if console.is_terminal:  # there may be many columns
        recorded = [piece for sheet in recorded for piece in fitted(sheet, console.width)]
    for sheet in [*results(comparison, interval), *(costs(comparison) if cost else []), *recorded]:
        if sheet.title:
            console.print(sheet.title, style="italic", soft_wrap=True)
        print_table(terminal_table(sheet))
        console.print()
    for note in difference_notes(comparison):
        console.print(note)
    if difference_notes(comparison):
        console.print("To compare with equal values, run keel compare with --same FIELD and another --out.\n")
    console.print(f"{explanation(comparison, interval)}\n")


def _recorded(comparison: "Comparison") -> "list[Sheet]":
    """Return the tables of what the runs recorded beyond the primary metric."""
    from keel.report.tables import client_metrics, other_metrics, privacy_losses

    return [*client_metrics(comparison), *other_metrics(comparison), *privacy_losses(comparison)]


def _print_markup(comparison: "Comparison", form: Format | None, interval: bool, cost: bool) -> None:
    """Print the tables as Markdown, LaTeX or CSV."""
    from keel.report import tables

    if form is Format.csv:
        typer.echo(tables.csv_text(comparison), nl=False)
        return
    more = [*(tables.costs(comparison) if cost else []), *_recorded(comparison)]
    write = tables.latex_text if form is Format.latex else tables.markdown_text
    typer.echo(write(comparison, interval, more))


def _write_page(
    folder: Path,
    baseline: str | None,
    target: float | None,
    deviation: "Deviation | None" = None,
    title: str | None = None,
) -> Path:
    """Write the page on all runs in a folder, including those of earlier commands."""
    from keel.report.comparison import compare as compare_runs
    from keel.report.page import write_report
    from keel.runs.finding import find_runs

    page = folder / "report.html"
    comparison = compare_runs(find_runs([folder]), baseline, target, skip_damaged=True)
    _print_problems(comparison, write_report(comparison, page, deviation, title))
    return page


def _print_problems(comparison: "Comparison", problem: str | None) -> None:
    """Print a line for each run that was skipped, and why the page has no charts."""
    from keel.cli.terminal import errors

    for run in comparison.skipped:
        errors.print(f"skipped {run}", soft_wrap=True)
    if problem is not None:
        errors.print(problem, soft_wrap=True)


def _check_format(form: Format | None, as_json: bool) -> None:
    if form is not None and as_json:
        raise KeelError(f"--json and --format {form} exclude each other; give one of them")
