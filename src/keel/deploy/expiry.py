"""Certificates that expire soon."""

from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

from keel.deploy.authority import read_certificate

WARNING_DAYS = 30


def days_left(certificate: x509.Certificate) -> int:
    """Return the full days until a certificate expires, negative if it has expired."""
    return (certificate.not_valid_after_utc - datetime.now(UTC)).days


def expiring(folder: Path, days: int = WARNING_DAYS) -> dict[str, int]:
    """Return the certificates in a folder that expire within `days`: file name -> days left, negative if expired."""
    left = {file.name: days_left(read_certificate(file)) for file in sorted(folder.glob("*.crt"))}
    return {name: rest for name, rest in left.items() if rest < days}


def expiry_warnings(folder: Path) -> list[str]:
    """Return a line for each certificate that expires within 30 days."""
    fixes = {"ca.crt": "start a new federation with keel deploy certificates"}
    renew = "run keel deploy renew on the server and copy the new certificate to its site"
    return [
        f"{folder / name} {'has expired' if rest < 0 else f'expires in {rest} days'}; {fixes.get(name, renew)}"
        for name, rest in expiring(folder).items()
    ]
