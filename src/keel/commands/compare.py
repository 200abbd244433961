"""keel demo, keel compare and keel report: methods side by side, as a table and as a page."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keel.commands.options import (
    Address,
    AsJson,
    Cost,
    DryRun,
    Engine,
    Form,
    Format,
    Interval,
    Quiet,
    Target,
    print_json,
    with_options,
)
from keel.commands.price import print_price
from keel.errors import KeelError, unknown

if TYPE_CHECKING:
    from keel.reporting.comparison import Comparison


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

    comparison = run_demo(out, seeds, rounds, quiet)
    report = _write_page(out, "fedavg", None)
    if as_json:
        print_json(comparison.rows())
        return
    from keel.reporting.tables import explanation, results, terminal_table
    from keel.terminal import console, print_table

    console.print()
    console.print(f"Handwritten digits, 100 clients with one class each, 10 % in a round, {seeds} seeds.\n")
    print_table(terminal_table(results(comparison)[0]))
    console.print(f"\n{explanation(comparison)}\n")
    console.print(f"Runs:   {out}")
    console.print(f"Report: {report.absolute().as_uri()}", soft_wrap=True)


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
    engine: Engine = None,
    address: Address = None,
    target: Target = None,
    interval: Interval = False,
    cost: Cost = False,
    out: Annotated[Path, typer.Option(help="Where the run folders and report.html go.")] = Path("runs/compare"),
    form: Form = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compare methods over seeds, and over any other fields.

    Runs that exist are not run again, interrupted ones go on. Example: keel compare --methods fedavg,ghbm --seeds 3
    """
    from keel.reporting.comparison import compare as compare_runs
    from keel.runs.comparing import jobs_of, run_jobs
    from keel.runs.spec import override, read_spec

    options = {
        "data": {"name": data},
        "model": {"name": model},
        "rounds": rounds,
        "participation": {"rate": rate},
        "engine": {"name": engine, "address": address},
    }
    table = override(with_options(read_spec(spec) if spec else {}, options), set_ or [])
    names = [name.strip() for name in (methods or "").split(",") if name.strip()]
    jobs = jobs_of(table, names, seeds, over or [], out)
    _one_form(form, as_json)
    baseline, number = _target(target)
    known = {job.spec.algorithm.name for job in jobs}
    if baseline is not None and baseline not in known:
        raise unknown("--target", baseline, known)
    if dry_run:
        print_price([job.spec for job in jobs], as_json)
        return
    comparison = compare_runs(run_jobs(jobs, quiet), baseline, number)
    report = _write_page(out, baseline, number)
    _print_comparison(comparison, form, interval, cost, as_json, report, quiet)


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
    form: Form = None,
    as_json: AsJson = False,
) -> None:
    """Write a page about any number of runs.

    Example: keel report runs/demo -o report.html
    """
    from keel.reporting.comparison import compare
    from keel.reporting.page import write_charts, write_report
    from keel.runs.batch import read_runs
    from keel.runs.spec import read_network

    _one_form(form, as_json)
    baseline, number = _target(target)
    comparison = compare(read_runs(runs), baseline, number, read_network(network) if network else None)
    write_report(comparison, out)
    if charts is not None:
        write_charts(comparison, charts)
    _print_comparison(comparison, form, interval, cost, as_json, out, quiet=False)
    if charts is not None and not as_json and form in (None, Format.text):
        typer.echo(f"Charts: {charts}")


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
    comparison: "Comparison", form: Format | None, interval: bool, cost: bool, as_json: bool, page: Path, quiet: bool
) -> None:
    """The table; where the page is goes beside it, or to standard error where a program may read the table."""
    from keel.reporting import tables
    from keel.terminal import console, errors, print_table

    sheets = [*tables.results(comparison, interval), *(tables.costs(comparison) if cost else [])]
    if as_json:
        print_json(comparison.rows())
    elif form is Format.csv:
        typer.echo(tables.csv_text(comparison), nl=False)
    elif form in (Format.markdown, Format.latex):
        typer.echo("\n\n".join(map(tables.markdown if form is Format.markdown else tables.latex, sheets)))
    else:
        for sheet in sheets:
            if sheet.title:
                console.print(sheet.title, style="italic", soft_wrap=True)
            print_table(tables.terminal_table(sheet))
            console.print()
        console.print(f"{tables.explanation(comparison, interval)}\n")
        errors, quiet = console, False
    if not quiet:
        errors.print(f"Report: {page.absolute().as_uri()}", soft_wrap=True)


def _write_page(folder: Path, baseline: str | None, target: float | None) -> Path:
    """The page about all runs in a folder, as `keel report` makes it, those of other calls too."""
    from keel.reporting.comparison import compare as compare_runs
    from keel.reporting.page import write_report
    from keel.runs.batch import read_runs

    page = folder / "report.html"
    write_report(compare_runs(read_runs([folder]), baseline, target), page)
    return page


def _one_form(form: Format | None, as_json: bool) -> None:
    if form is not None and as_json:
        raise KeelError(f"--json, --format {form}: both are given; accepted: one of them")
