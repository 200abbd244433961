"""keel data: list, download and inspect data sets."""

import os
from typing import Annotated

import typer

from keel.cli.options import Alpha, AsJson, Clients, Partition, Quiet, print_json, with_options
from keel.errors import KeelError

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="List, download and inspect data sets.")
Name = Annotated[str, typer.Argument(help="A data set of keel data list, or module:name.")]


@app.command("list")
def data_list(as_json: AsJson = False) -> None:
    """List the data sets and whether their files are available.

    Example: keel data list
    """
    from keel.data.catalog import CATALOG, describe
    from keel.data.store import data_folder

    rows = [describe(name) for name in CATALOG]
    if as_json:
        print_json(rows)
        return
    from rich.table import Table

    from keel.cli.terminal import console, print_table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("name", "description", "files"):
        table.add_column(name, no_wrap=name != "description")
    for row in rows:
        table.add_row(row["name"], row["title"], row["files"])
    print_table(table)
    origin = "from KEEL_DATA" if os.environ.get("KEEL_DATA") else "set KEEL_DATA to use another"
    console.print(f"\nData folder: {data_folder()} ({origin})", soft_wrap=True)


@app.command("get")
def data_get(name: Name, quiet: Quiet = False) -> None:
    """Download the files of a data set, verify and prepare them.

    An interrupted download is resumed. Example: keel data get cifar10
    """
    from inspect import signature

    from keel.cli.terminal import console, show_download
    from keel.data.catalog import find, load
    from keel.data.fetch import fetch
    from keel.data.store import data_folder

    entry, folder = find(name), data_folder()
    if not entry.needs_files and signature(entry.load).parameters:
        raise KeelError(
            f"data.name: {name!r} reads your files and downloads none; "
            f"inspect them with keel data show {name} --set ..."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KeelError(f"KEEL_DATA must be a writable folder (got {str(folder)!r}: {error.strerror})") from None
    for download in entry.downloads:
        if download.missing(folder):
            with show_download(download.path, quiet) as progress:
                fetch(download, folder, progress)
    if entry.needs_files:
        load(name, {})
        console.print(f"{name} is ready in {folder}", soft_wrap=True)
    else:
        console.print(f"{name} needs no files")


@app.command("show")
def data_show(
    name: Name,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Set a field of the spec, as in data.max_examples=50; repeatable."
        ),
    ] = None,
    clients: Clients = None,
    alpha: Alpha = None,
    partition: Partition = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the partition.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the clients of a partitioned data set: sizes and labels.

    Example: keel data show digits --alpha 0.5
    """
    from keel.config.defaults import make_spec
    from keel.config.overrides import override
    from keel.config.schema import partition_label
    from keel.data.catalog import find
    from keel.data.statistics import client_statistics
    from keel.runs.build import load_data

    find(name)
    options = {"data": {"name": name, "clients": clients, "alpha": alpha, "partition": partition}, "seed": seed}
    spec = make_spec(override(with_options({}, options), set_ or []))
    statistics = {**client_statistics(load_data(spec)), "split": partition_label(spec.data)}
    if as_json:
        print_json(statistics)
        return
    from keel.cli.terminal import console
    from keel.report.label_distribution import heterogeneity, label_chart

    if "picture" not in statistics:
        sizes = "{clients:,} clients, {train_examples:,} training and {test_examples:,} test examples"
        console.print(f"{name}: {sizes.format(**statistics)}; the targets are not class labels")
        return
    console.print(heterogeneity(statistics))
    console.print()
    console.print(label_chart(statistics, console.width))
