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

    make_certificates(out, hosts)
    typer.echo(f"Copy {out / 'ca.crt'} to every site. Keep {out / 'ca.key'} and {out / 'server.key'} private.")


@app.command()
def key(
    path: Annotated[Path, typer.Argument(help="The file for the private key.")],
) -> None:
    """Create the keys of a site: one identifies its node, one is for its certificate. Run this at the site.

    Example: keel deploy key keys/site-0
    """
    _require_flower()
    from keel.deploy.credentials import make_node_key

    public = make_node_key(path)
    typer.echo(f"Send {public} and {path}.csr to the server. Keep {path} and {path}.key private.")


CERTIFICATES = typer.Option(help="The folder with the certificates.")


@app.command()
def proxy(
    folder: Annotated[Path, typer.Argument(help="The folder of a federation.")] = Path(),
    listen: Annotated[str, typer.Option(help="Address and port for the sites.")] = "0.0.0.0:8443",
    superlink: Annotated[str, typer.Option(help="Address and port of Flower's server.")] = "127.0.0.1:8000",
    largest_body: Annotated[str, typer.Option(help="Largest request of a site, with the unit k, m or g.")] = "16m",
) -> None:
    """Write nginx.conf, the configuration of the proxy in front of the server.

    Example: keel deploy proxy --listen 0.0.0.0:443
    """
    from keel.deploy.proxy import proxy_values, write_proxy

    typer.echo(write_proxy(folder, proxy_values(listen, superlink, largest_body)))


@app.command()
def site_certificate(
    site: Annotated[int, typer.Argument(min=0, help="The number of the site.")],
    request: Annotated[Path | None, typer.Option(help="The site's request; by default keys/site-N.csr.")] = None,
    certificates: Annotated[Path, CERTIFICATES] = Path("certificates"),
) -> None:
    """Sign the certificate with which a site passes the proxy. Run this on the server.

    Example: keel deploy site-certificate 0
    """
    _require_flower()
    from keel.deploy.authority import Authority

    file = Authority.load(certificates).certify_site(site, request or Path(f"keys/site-{site}.csr"))
    typer.echo(f"Send {file} and {certificates / 'ca.crt'} to site {site}. Neither is secret.")
    _warn_of_expiry(certificates)


@app.command()
def renew(certificates: Annotated[Path, CERTIFICATES] = Path("certificates")) -> None:
    """Renew the certificates of the server and of all sites for a year, with the same keys and authority.

    Example: keel deploy renew
    """
    _require_flower()
    from keel.deploy.authority import Authority

    authority = Authority.load(certificates)
    authority.renew_server()
    authority.write_revocations(authority.revocations())
    typer.echo(f"renewed {certificates / 'server.crt'}")
    for site in authority.sites():
        typer.echo(f"renewed {authority.renew_site(site)}: send it to site {site}")
    typer.echo("Restart the server, and run ./start_proxy.sh -s reload.")
    _warn_of_expiry(certificates)


@app.command()
def revoke(
    site: Annotated[int, typer.Argument(min=0, help="The number of the site.")],
    certificates: Annotated[Path, CERTIFICATES] = Path("certificates"),
) -> None:
    """Revoke every certificate of a site, for example after a theft.

    Example: keel deploy revoke 0
    """
    _require_flower()
    from keel.deploy.authority import Authority

    number = Authority.load(certificates).revoke_site(site)
    typer.echo(f"revoked {number} certificate(s) of site {site}")
    typer.echo("Run ./start_proxy.sh -s reload, and flwr supernode unregister for the site's node.")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def supernode(
    context: typer.Context,
    certificate: Annotated[Path, typer.Argument(help="The site's certificate.")],
    key: Annotated[Path, typer.Argument(help="The private key of the certificate.")],
) -> None:
    """Run flower-supernode with a client certificate and the arguments that follow; start_site.sh calls it.

    Example: keel deploy supernode certificates/site-0.crt keys/site-0.key --superlink keel.example.org:8443
    """
    _require_flower()
    for file in certificate, key:
        if not file.exists():
            raise KeelError(f"{file} does not exist; see section 3 of the federation's README")
    _warn_of_expiry(certificate.parent)
    from keel.deploy.flower_adapter import run_supernode

    run_supernode(certificate, key, context.args)


def _warn_of_expiry(folder: Path) -> None:
    from keel.deploy.expiry import expiry_warnings

    for line in expiry_warnings(folder):
        typer.echo(f"keel: warning: {line}", err=True)


def _require_flower() -> None:
    if find_spec("flwr") is None:
        raise KeelError("keel deploy requires flwr, which is not installed; run pip install 'keel-fl[flower]'")
