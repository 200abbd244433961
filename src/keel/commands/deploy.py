"""keel deploy: what it takes to federate for real, over Flower."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from keel.errors import KeelError

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Federate for real, over Flower.")

EXTRA = "deploy: needs flwr, which is not installed; accepted: pip install 'keel-fl[flower]'"


@app.command()
def new(
    folder: Annotated[Path, typer.Argument(help="A folder that is not there yet.")],
    sites: Annotated[int, typer.Option(min=1, help="How many take part.")] = 3,
    algorithm: Annotated[str, typer.Option(help="See keel algorithms.")] = "fedhbm",
) -> None:
    """Write the folder of a new federation: a Flower app, scripts, a README with every command.

    Example: keel deploy new my-federation --sites 3
    """
    from keel.deploy.new import new_federation

    written = new_federation(folder, sites, algorithm)
    typer.echo("\n".join(map(str, written)))
    typer.echo(f"\nNext: keel deploy check {folder}, then {folder / 'README.md'}")


@app.command()
def check(
    folder: Annotated[Path, typer.Argument(help="The folder of a federation.")] = Path(),
    rounds: Annotated[int, typer.Option(min=1, help="How many to try, at the most.")] = 3,
) -> None:
    """Run a federation's app in one process, on made-up sites, before anything is installed anywhere.

    Example: keel deploy check my-federation
    """
    _need_flower()
    from keel.deploy.check import check_app

    typer.echo(check_app(folder, rounds))


@app.command()
def certificates(
    hosts: Annotated[list[str], typer.Argument(help="Names and addresses by which the sites reach the server.")],
    out: Annotated[Path, typer.Option(help="Where they go.")] = Path("certificates"),
) -> None:
    """Make a certificate authority and the server's certificate.

    Example: keel deploy certificates keel.example.org
    """
    _need_flower()
    from keel.deploy.credentials import make_certificates

    make_certificates(out, list(dict.fromkeys([*hosts, "localhost", "127.0.0.1"])))
    typer.echo(f"{out / 'ca.crt'} goes to every site. {out / 'ca.key'} and {out / 'server.key'} go nowhere.")


@app.command()
def key(
    path: Annotated[Path, typer.Argument(help="The file of the private key.")],
) -> None:
    """Make the key by which a site's node is known.

    Example: keel deploy key keys/site-0
    """
    _need_flower()
    from keel.deploy.credentials import make_node_key

    public = make_node_key(path)
    typer.echo(f"{public} goes to the server, to be registered. {path} goes nowhere.")


def _need_flower() -> None:
    if find_spec("flwr") is None:
        raise KeelError(EXTRA)
