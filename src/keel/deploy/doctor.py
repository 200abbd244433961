"""`keel deploy doctor`: checks of the machine, the certificates and the connection, before and during a federation."""

import re
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any

from keel.deploy.approval import Approval
from keel.deploy.authority import read_certificate
from keel.deploy.expiry import WARNING_DAYS, days_left
from keel.deploy.flwr_connection import CONFIG, authority_of, trusted_certificate
from keel.deploy.site_policy import read_policy
from keel.deploy.versions import SOFTWARE, installed_versions
from keel.errors import KeelError
from keel.runs.findings import Finding, resource_findings

MAX_SKEW = 10.0
"""Difference of the clocks in seconds above which the check fails: Flower rejects messages from the future."""
TIMEOUT = 10.0
LISTEN = re.compile(r"^\s*listen \S*?:?(\d+) ssl;", re.MULTILINE)
"""The proxy's port in nginx.conf."""


def machine_findings(folder: Path, at_site: bool) -> Iterator[Finding]:
    """Check versions, disk, memory, GPU, and the certificates and private keys in a federation's folder."""
    yield Finding(
        "versions", "ok", ", ".join(f"{SOFTWARE[name]} {text}" for name, text in installed_versions().items())
    )
    yield from resource_findings(folder)
    certificates = sorted((folder / "certificates").glob("*.crt"))
    if not certificates:
        fix = "copy ca.crt and site-N.crt from the server" if at_site else "run keel deploy certificates HOST"
        yield Finding("certificates", "failed", f"{folder / 'certificates'} has none; {fix}")
    for file in certificates:
        yield _expiry(file)
    for file in sorted([*(folder / "certificates").glob("*.key"), *(folder / "keys").glob("*")]):
        if file.suffix not in (".pub", ".csr"):
            private = not file.stat().st_mode & 0o077
            text = "only its owner can read it" if private else f"others can read it; run chmod 600 {file}"
            yield Finding(f"key {file.name}", "ok" if private else "failed", text)


def site_findings(folder: Path) -> Iterator[Finding]:
    """Check the policy and the approval of a site, without which its node does not start."""
    checks: dict[str, Callable[[], object]] = {
        "policy": lambda: read_policy(folder / "site.toml"),
        "approval": lambda: Approval(folder / "approved").hash(),
    }
    for check, read in checks.items():
        try:
            read()
        except KeelError as error:
            yield Finding(check, "failed", str(error))
        else:
            yield Finding(check, "ok", "valid")


def site_identity(folder: Path, node: Mapping[str, Any]) -> tuple[Path, Path] | None:
    """Return the certificate and the private key of the site that a node's configuration names, if it names one."""
    site = node.get("site")
    return None if site is None else (folder / f"certificates/site-{site}.crt", folder / f"keys/site-{site}.key")


def connection_findings(
    server: str,
    ca: Path,
    identity: tuple[Path, Path] | None = None,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> Iterator[Finding]:
    """Check from a site that the server's port is reachable, its certificate valid, and the clocks equal.

    Args:
        server: "host:port".
        ca: The certificate of the federation's authority.
        identity: The site's certificate and its private key, if a proxy demands them.
    """
    for file in identity or ():
        if not file.exists():
            fix = "make it with keel deploy key" if file.suffix == ".key" else "have it signed on the server"
            yield Finding("tls", "failed", f"{file} does not exist; {fix}")
            return
    host, _, port = server.rpartition(":")
    try:
        socket.create_connection((host, int(port)), TIMEOUT).close()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        yield Finding("port", "failed", f"{server} is not reachable ({reason}); check the address, and the firewall")
        return
    yield Finding("port", "ok", f"{server} is reachable")
    try:
        context = ssl.create_default_context(cafile=str(ca))
        if identity is not None:
            context.load_cert_chain(*map(str, identity))
        connection = HTTPSConnection(host, int(port), timeout=TIMEOUT, context=context)
        connection.request("HEAD", "/")
        response = connection.getresponse()
        date = response.headers.get("Date")
        connection.close()
    except (OSError, HTTPException) as error:
        fix = "copy certificates/ca.crt from the server again, and set both clocks"
        yield Finding("tls", "failed", f"no TLS connection ({type(error).__name__}: {error}); {fix}")
        return
    if response.status == HTTPStatus.BAD_REQUEST:  # nginx refuses a client's certificate after the handshake
        refused = "this certificate" if identity is not None else "a connection without a site's certificate"
        fix = "have a new key signed on the server" if identity is not None else "pass site=N in --node-config"
        yield Finding("tls", "failed", f"the proxy refuses {refused}; {fix}")
        return
    yield Finding("tls", "ok", f"the certificate of {host} comes from the federation's authority")
    yield _clock(date, now())


def server_findings(folder: Path, port: int) -> Iterator[Finding]:
    """Check on the server that Flower's server and the proxy listen, and that `flwr` trusts the server.

    Args:
        port: That of Flower's server. The proxy's is in nginx.conf.
    """
    yield _connection(folder)
    yield _listens("server", port, "./start_server.sh")
    try:
        found = LISTEN.search((folder / "nginx.conf").read_text(encoding="utf-8"))
    except FileNotFoundError:
        found = None
    if found is None:
        yield Finding("proxy", "failed", f"{folder / 'nginx.conf'} has no port; write it with keel deploy proxy")
    else:
        yield _listens("proxy", int(found[1]), "./start_proxy.sh")


def _connection(folder: Path) -> Finding:
    try:
        named = trusted_certificate(folder)
    except KeelError as error:
        return Finding("flwr", "failed", str(error))
    if named != (expected := authority_of(folder)):
        return Finding("flwr", "failed", f"{folder / CONFIG} names {named}; set root-certificates to {expected}")
    return Finding("flwr", "ok", "trusts the server's authority")


def _listens(check: str, port: int, script: str) -> Finding:
    try:
        socket.create_connection(("127.0.0.1", port), TIMEOUT).close()
    except OSError:
        return Finding(check, "warning", f"nothing listens on port {port}; start it with {script}")
    return Finding(check, "ok", f"listens on port {port}")


def _clock(date: str | None, now: datetime) -> Finding:
    if date is None:
        return Finding("clock", "warning", "the server sends no Date; compare the clocks yourself")
    seconds = (now - parsedate_to_datetime(date)).total_seconds()
    if abs(seconds) > MAX_SKEW:
        direction = "ahead of" if seconds > 0 else "behind"
        return Finding(
            "clock", "failed", f"this clock is {abs(seconds):.0f} s {direction} the server's; synchronise both with NTP"
        )
    return Finding("clock", "ok", f"within {MAX_SKEW:g} s of the server's")


def _expiry(file: Path) -> Finding:
    check = f"certificate {file.name}"
    try:
        certificate = read_certificate(file)
    except KeelError:
        return Finding(check, "failed", "is not a certificate; copy it again")
    left, expires = days_left(certificate), certificate.not_valid_after_utc
    if left < 0:
        return Finding(check, "failed", f"has expired on {expires:%Y-%m-%d}; make a new one")
    if left < WARNING_DAYS:
        return Finding(check, "warning", f"expires in {left} days, on {expires:%Y-%m-%d}; make a new one")
    return Finding(check, "ok", f"expires on {expires:%Y-%m-%d}")
