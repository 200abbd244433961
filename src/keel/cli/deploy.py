"""`keel deploy`: set up a federation over Flower."""

import json
import os
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
    algorithm: Annotated[str, typer.Option(help="Name of the algorithm, see keel algorithms.")] = "localghbm",
) -> None:
    """Create a folder with a Flower app, scripts and a README.

    The README has every command of a federation.

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
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Also simulate on one machine, and compare the models' hashes.")
    ] = False,
) -> None:
    """Run a federation's app here, on synthetic data.

    Do this before you install it on other machines.

    Example: keel deploy check my-federation
    """
    _require_flower()
    from keel.deploy.check import check_app

    typer.echo(check_app(folder, rounds, simulate))


@app.command()
def certificates(
    hosts: Annotated[list[str], typer.Argument(help="Names and addresses under which the sites reach the server.")],
    out: Annotated[Path, typer.Option(help="The folder to write to.")] = Path("certificates"),
) -> None:
    """Create the authority and the server's certificate.

    Example: keel deploy certificates keel.example.org
    """
    _require_flower()
    from keel.deploy.credentials import make_certificates
    from keel.deploy.flwr_connection import point_to

    make_certificates(out, hosts)
    point_to(out.absolute().parent)
    typer.echo(f"Copy {out / 'ca.crt'} to every site. Keep {out / 'ca.key'} and {out / 'server.key'} private.")


@app.command()
def key(
    path: Annotated[Path, typer.Argument(help="The file for the private key.")],
) -> None:
    """Create a site's two keys. Run this at the site.

    One key identifies its node, the other is for its certificate.

    Example: keel deploy key keys/site-0
    """
    _require_flower()
    from keel.deploy.credentials import make_node_key

    public = make_node_key(path)
    typer.echo(f"Send {public} and {path}.csr to the server. Keep {path} and {path}.key private.")


OUTLIER = 3
"""Exit code of `keel deploy status` if the training is in order but for the values of a site."""
CERTIFICATES = typer.Option(help="The folder with the certificates.")


@app.command()
def proxy(
    folder: Annotated[Path, typer.Argument(help="The folder of a federation.")] = Path(),
    listen: Annotated[str, typer.Option(help="Address and port for the sites.")] = "0.0.0.0:8443",
    superlink: Annotated[str, typer.Option(help="Address and port of Flower's server.")] = "127.0.0.1:8000",
    largest_body: Annotated[str, typer.Option(help="Largest request of a site, with the unit k, m or g.")] = "16m",
) -> None:
    """Write nginx.conf for the proxy in front of the server.

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
    """Sign the certificate of a site. Run this on the server.

    The site passes the proxy with it.

    Example: keel deploy site-certificate 0
    """
    _require_flower()
    from keel.deploy.authority import Authority

    file = Authority.load(certificates).certify_site(site, request or Path(f"keys/site-{site}.csr"))
    typer.echo(f"Send {file} and {certificates / 'ca.crt'} to site {site}. Neither is secret.")
    _warn_of_expiry(certificates)


@app.command()
def renew(certificates: Annotated[Path, CERTIFICATES] = Path("certificates")) -> None:
    """Renew all certificates for a year.

    The keys and the authority stay the same.

    Example: keel deploy renew
    """
    _require_flower()
    from keel.deploy.authority import Authority

    authority = Authority.load(certificates)
    authority.write_revocations(authority.revocations())
    authority.renew_server()
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
    """Revoke all certificates of a site, as after a theft.

    Example: keel deploy revoke 0
    """
    _require_flower()
    from keel.deploy.authority import Authority
    from keel.deploy.node_records import unregister_text

    number = Authority.load(certificates).revoke_site(site)
    typer.echo(f"revoked {number} certificate(s) of site {site}: {certificates / 'ca.crl'}")
    typer.echo("Then, on the server, in the federation's folder:")
    typer.echo("  ./start_proxy.sh -s reload")
    typer.echo(f"  FLWR_HOME=$PWD/.flwr {unregister_text(certificates.absolute().parent, site)}")


def _warn_of_expiry(folder: Path) -> None:
    from keel.deploy.expiry import expiry_warnings

    for line in expiry_warnings(folder):
        typer.echo(f"keel: warning: {line}", err=True)


@app.command()
def status(
    run: Annotated[Path, typer.Argument(help="The run folder of a training.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the state of a training.

    The exit code is 1 if it failed or if a site contributed nothing, and 3 if a site is reported as an outlier.

    Example: keel deploy status runs/first
    """
    from keel.deploy.status import training_status

    state = training_status(run)
    typer.echo(json.dumps(state) if as_json else "\n".join(state["lines"]))
    raise typer.Exit(1 if not state["ok"] else OUTLIER if state["outliers"] else 0)


audit = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Check an audit log.")
app.add_typer(audit, name="audit")


@audit.command("verify")
def verify_audit(
    file: Annotated[Path, typer.Argument(help="The audit log.")],
    noted: Annotated[str | None, typer.Option(help="A hash of the log that you noted earlier.")] = None,
) -> None:
    """Check the chain of an audit log, and print its last hash. The exit code is 1 if a line is wrong.

    Note the last hash elsewhere: without it nobody can see that lines at the end were removed.

    Example: keel deploy audit verify runs/first.audit.jsonl
    """
    from keel.deploy.audit import verify

    result = verify(file, noted)
    typer.echo(f"{result.lines} lines, last hash {result.last_hash}" if result.fault is None else result.fault)
    raise typer.Exit(0 if result.fault is None else 1)


@app.command()
def doctor(
    folder: Annotated[Path, typer.Argument(help="The folder of the federation.")] = Path(),
    server: Annotated[str | None, typer.Option(help="At a site: the server as HOST:PORT.")] = None,
    node_config: Annotated[str | None, typer.Option(help="At a site: its --node-config, to run its loader.")] = None,
    certificate: Annotated[
        Path | None, typer.Option(help="At a site: its certificate, if not certificates/site-N.crt.")
    ] = None,
    key: Annotated[Path | None, typer.Option(help="At a site: its private key, if not keys/site-N.key.")] = None,
    port: Annotated[int, typer.Option(help="On the server: the port of Flower's server.")] = 8000,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check machine, certificates, connection, clock and data.

    No example is printed. The exit code is 1 if a check fails.

    Without --server and --node-config it checks the server.

    Example: keel deploy doctor --server keel.example.org:8443 --node-config 'site=0 data="/srv/patients.csv"'
    """
    _require_flower()
    from keel.deploy.check import read_app
    from keel.deploy.data_doctor import site_data_findings
    from keel.deploy.doctor import (
        connection_findings,
        machine_findings,
        server_findings,
        site_findings,
        site_identity,
    )
    from keel.deploy.flower_adapter import parse_node_config

    read_app(folder)  # an error of one line if it is no federation's folder
    at_site = server is not None or node_config is not None
    findings = list(machine_findings(folder, at_site))
    node = {} if node_config is None else parse_node_config(node_config)
    if server is not None:
        given = (certificate, key) if certificate is not None and key is not None else None
        identity = given or site_identity(folder, node)
        findings += connection_findings(server, folder / "certificates" / "ca.crt", identity)
    if node_config is not None:
        findings += [*site_findings(folder), *site_data_findings(folder, node)]
    if not at_site:
        findings += server_findings(folder, port)
    for finding in findings:
        if not as_json:
            typer.echo(f"{finding.status:8} {finding.check}: {finding.text}")
    failed = any(finding.status == "failed" for finding in findings)
    if as_json:
        typer.echo(json.dumps({"ok": not failed, "findings": [vars(finding) for finding in findings]}))
    raise typer.Exit(1 if failed else 0)


@app.command()
def approve(
    source: Annotated[Path, typer.Argument(help="The folder of the app, or a bundle (.fab).")] = Path(),
    approved: Annotated[Path, typer.Option(help="The folder of the approval.")] = Path("approved"),
    yes: Annotated[bool, typer.Option("--yes", help="Approve without a question.")] = False,
) -> None:
    """Show an app and its changes, and let this site run it.

    The changes are those since the last approval.

    Example: keel deploy approve my-federation
    """
    _require_flower()
    from keel.deploy.approval import Approval, printable, read_app
    from keel.deploy.flower_adapter import build_bundle

    approval = Approval(approved)
    bundle = build_bundle(source) if source.is_dir() else _read_bundle(source)
    new_app, last = read_app(bundle), approval.approved_app()
    for path, content in sorted(new_app.files.items()):
        typer.echo(f"{len(content):>9} bytes  {path}")
    if last is None:
        for path, content in sorted(new_app.files.items()):
            typer.echo(f"\n--- {path}\n{printable(content)}")
    elif new_app.hash == last.hash:
        typer.echo("no file has changed since the last approval")
    else:
        typer.echo(new_app.diff(last))
    typer.echo(f"hash {new_app.hash}")
    if not yes and not typer.confirm("Does this site run this code on its data?"):
        raise KeelError("the app is not approved")
    typer.echo(f"approved: {approval.approve(bundle)}")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def node(
    context: typer.Context,
    certificate: Annotated[Path, typer.Option(help="The site's certificate, with which it passes the server's proxy.")],
    certificate_key: Annotated[Path, typer.Option(help="The private key of the certificate.")],
    approved: Annotated[Path, typer.Option(help="The folder of the approval.")] = Path("approved"),
    policy: Annotated[Path, typer.Option(help="The policy of this site.")] = Path("site.toml"),
) -> None:
    """Run a site's node, which runs only the approved app.

    It is flower-supernode, and takes its options.

    start_site.sh calls it. Example: keel deploy node --certificate certificates/site-0.crt
    --certificate-key keys/site-0.key --superlink keel.example.org:8443 --root-certificates certificates/ca.crt
    """
    _require_flower()
    for file in certificate, certificate_key:
        if not file.exists():
            raise KeelError(f"{file} does not exist; see section 3 of the federation's README")
    _warn_of_expiry(certificate.parent)
    from keel.deploy.flower_adapter import present_certificate
    from keel.deploy.node import run_node

    present_certificate(certificate, certificate_key)
    run_node(approved, policy, context.args)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def superlink(
    context: typer.Context,
    max_reply_mb: Annotated[
        int, typer.Option(min=1, help="Largest reply of a site in apps that do not announce its size.")
    ] = 1024,
) -> None:
    """Run Flower's server, which refuses oversized replies.

    It is flower-superlink, and takes its options.

    start_server.sh calls it. The server app announces the size of its replies in the folder KEEL_SERVER_STATE.
    Example: keel deploy superlink --host 127.0.0.1 --port 8000 --database state.db
    """
    _require_flower()
    from keel.deploy.certified_nodes import CertifiedNodes
    from keel.deploy.flower_adapter import run_superlink
    from keel.deploy.reply_limit import FOLDER, ReplyQuota, announced_limits

    if not (folder := os.environ.get(FOLDER)):
        raise KeelError(f"{FOLDER} must be a folder that the server app shares, as in start_server.sh (not set)")
    quota = ReplyQuota(announced_limits(Path(folder), max_reply_mb * 2**20))
    run_superlink(context.args, quota, CertifiedNodes(Path(folder)))


@app.command()
def clean(
    folder: Annotated[Path, typer.Argument(help="The folder of the client state.")] = Path("client-state"),
    days: Annotated[
        int | None, typer.Option(min=0, help="Days to keep; by default retention_days of the policy.")
    ] = None,
    policy: Annotated[Path, typer.Option(help="The policy of this site.")] = Path("site.toml"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be removed.")] = False,
) -> None:
    """Remove client states that no training has used lately.

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
