"""keel data: the data sets, their files, and who holds what."""

import os
from typing import Annotated

import typer

from keel.commands.options import AsJson, Quiet, print_json, with_options
from keel.errors import KeelError

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="List, fetch and look at data sets.")


@app.command("list")
def data_list(as_json: AsJson = False) -> None:
    """List the data sets, and whether their files are there.

    Example: keel data list
    """
    from keel.data.catalog import CATALOG, describe
    from keel.data.store import data_folder

    rows = [describe(name) for name in CATALOG]
    if as_json:
        print_json(rows)
        return
    from rich.table import Table

    from keel.terminal import console, print_table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("name", "what", "files"):
        table.add_column(name, no_wrap=name != "what")
    for row in rows:
        table.add_row(row["name"], row["title"], row["files"])
    print_table(table)
    origin = "from KEEL_DATA" if os.environ.get("KEEL_DATA") else "KEEL_DATA would name another"
    console.print(f"\nData folder: {data_folder()} ({origin})", soft_wrap=True)


@app.command("get")
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
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        accepted = "a folder that can be made and written (KEEL_DATA)"
        raise KeelError(f"KEEL_DATA: {str(folder)!r} is none ({error.strerror}); accepted: {accepted}") from None
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


@app.command("show")
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
    spec = make_spec(override(with_options({}, options), set_ or []))
    told = {**holdings(load_data(spec)), "split": split_of(spec.data)}
    if as_json:
        print_json(told)
        return
    from keel.reporting.tables import heterogeneity, picture
    from keel.terminal import console

    console.print(heterogeneity(told))
    console.print()
    console.print(picture(told, console.width))
