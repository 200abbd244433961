"""`keel deploy`: set up a federation over Flower."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from keel.errors import KeelError

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Set up a real federation over Flower.")


@app.command()
def new(
    folder: Annotated[Path, typer.Argument(help="The folder to create.")],
    sites: Annotated[int, typer.Option(min=1, help="Number of sites.")] = 3,
    algorithm: Annotated[str, typer.Option(help="Name of the algorithm, see keel algorithms.")] = "fedhbm",
) -> None:
    """Create a new federation: a folder with a Flower app, scripts and a README with every command.

    Example: keel deploy new my-federation --sites 3
    """
    from keel.deploy.new import new_federation

    paths = new_federation(folder, sites, algorithm)
    typer.echo("\n".join(map(str, paths)))
    typer.echo(f"\nNext: keel deploy check {folder}, then {folder / 'README.md'}")


@app.command()
def check(
    folder: Annotated[Path, typer.Argument(help="The folder of a federation.")] = Path(),
    rounds: Annotated[int, typer.Option(min=1, help="Largest number of rounds to run.")] = 3,
) -> None:
    """Run a federation's app in one process, on synthetic data, before you install it on other machines.

    Example: keel deploy check my-federation
    """
    _require_flower()
    from keel.deploy.check import check_app

    typer.echo(check_app(folder, rounds))


@app.command()
def certificates(
    hosts: Annotated[list[str], typer.Argument(help="Names and addresses under which the sites reach the server.")],
    out: Annotated[Path, typer.Option(help="The folder to write to.")] = Path("certificates"),
) -> None:
    """Create a certificate authority and the server's certificate.

    Example: keel deploy certificates keel.example.org
    """
    _require_flower()
    from keel.deploy.credentials import make_certificates

    make_certificates(out, list(dict.fromkeys([*hosts, "localhost", "127.0.0.1"])))
    typer.echo(f"Copy {out / 'ca.crt'} to every site. Keep {out / 'ca.key'} and {out / 'server.key'} private.")


@app.command()
def key(
    path: Annotated[Path, typer.Argument(help="The file for the private key.")],
) -> None:
    """Create the key pair that identifies a site's node.

    Example: keel deploy key keys/site-0
    """
    _require_flower()
    from keel.deploy.credentials import make_node_key

    public = make_node_key(path)
    typer.echo(f"Send {public} to the server, which registers it. Keep {path} private.")


@app.command()
def approve(
    source: Annotated[Path, typer.Argument(help="The folder of the app, or a bundle (.fab).")] = Path(),
    approved: Annotated[Path, typer.Option(help="The folder of the approval.")] = Path("approved"),
    yes: Annotated[bool, typer.Option("--yes", help="Approve without a question.")] = False,
) -> None:
    """Show an app's files and what has changed since the last approval, and let this site run it.

    Example: keel deploy approve my-federation
    """
    _require_flower()
    from keel.deploy.approval import Approval, read_app
    from keel.deploy.flower_adapter import build_bundle

    approval = Approval(approved)
    bundle = build_bundle(source) if source.is_dir() else _read_bundle(source)
    new_app, last = read_app(bundle), approval.approved_app()
    for path, content in sorted(new_app.files.items()):
        typer.echo(f"{len(content):>9} bytes  {path}")
    if last is None:
        for path, content in sorted(new_app.files.items()):
            typer.echo(f"\n--- {path}\n{content.decode(errors='backslashreplace')}")
    else:
        typer.echo(new_app.diff(last) or "no file has changed since the last approval")
    typer.echo(f"hash {new_app.hash}")
    if not yes and not typer.confirm("Does this site run this code on its data?"):
        raise KeelError("the app is not approved")
    typer.echo(f"approved: {approval.approve(bundle)}")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def node(
    context: typer.Context,
    approved: Annotated[Path, typer.Option(help="The folder of the approval.")] = Path("approved"),
    policy: Annotated[Path, typer.Option(help="The policy of this site.")] = Path("site.toml"),
) -> None:
    """Run the node of a site: flower-supernode with its options, which runs only the approved app.

    Example: keel deploy node --superlink keel.example.org:8000 --root-certificates certificates/ca.crt
    """
    _require_flower()
    from keel.deploy.node import run_node

    run_node(approved, policy, context.args)


@app.command()
def clean(
    folder: Annotated[Path, typer.Argument(help="The folder of the client state.")] = Path("client-state"),
    days: Annotated[
        int | None, typer.Option(min=0, help="Days to keep; by default retention_days of the policy.")
    ] = None,
    policy: Annotated[Path, typer.Option(help="The policy of this site.")] = Path("site.toml"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be removed.")] = False,
) -> None:
    """Remove the client state of trainings that no round has used for some days.

    Example: keel deploy clean --days 90 --dry-run
    """
    _require_flower()
    from keel.deploy.clean import clean_state
    from keel.deploy.site_policy import read_policy

    kept = read_policy(policy).retention_days if days is None else days
    trainings = clean_state(folder, kept, dry_run=dry_run)
    verb = "would remove" if dry_run else "removed"
    typer.echo("\n".join([*(f"{verb} {path}" for path in trainings), f"{verb} {len(trainings)} trainings"]))


def _read_bundle(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise KeelError(f"app {str(file)!r} cannot be read ({error.strerror})") from None


def _require_flower() -> None:
    if find_spec("flwr") is None:
        raise KeelError("keel deploy requires flwr, which is not installed; run pip install 'keel-fl[flower]'")
