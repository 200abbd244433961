"""Certificates of the server and keys of the nodes. Only the owner can read a private key.

The federation has its own certificate authority (CA). A site checks the server's certificate against it. The private
key of a node is made at the site and stays there.
"""

import os
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from keel.errors import KeelError

LIFETIME = timedelta(days=825)
KEY_USAGES = dict.fromkeys(
    (
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "key_agreement",
        "encipher_only",
        "decipher_only",
        "crl_sign",
        "key_cert_sign",
        "digital_signature",
    ),
    False,
)


def make_certificates(folder: Path, hosts: list[str]) -> None:
    """Make a CA (ca.crt, ca.key) and the server's certificate (server.crt, server.key).

    Args:
        hosts: Names and addresses of the server for which the certificate is valid.
    """
    present = [name for name in ("ca.crt", "ca.key", "server.crt", "server.key") if (folder / name).exists()]
    if present:
        raise KeelError(f"{folder / present[0]} exists and sites may trust it; choose another folder")
    ca_key, key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    ca_name = _common_name("Keel federation CA")
    ca = (
        _certificate(ca_name, ca_name, ca_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.KeyUsage(**{**KEY_USAGES, "key_cert_sign": True, "crl_sign": True}), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    certificate = (
        _certificate(_common_name(hosts[0]), ca_name, key.public_key())
        .add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(**{**KEY_USAGES, "digital_signature": True}), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    folder.mkdir(parents=True, exist_ok=True)
    _write_private(folder / "ca.key", _pem(ca_key))
    _write_private(folder / "server.key", _pem(key))
    (folder / "ca.crt").write_bytes(ca.public_bytes(Encoding.PEM))
    (folder / "server.crt").write_bytes(certificate.public_bytes(Encoding.PEM))


def make_node_key(path: Path) -> Path:
    """Write a node's private key to `path` and its public key next to it (.pub); return the path of the latter."""
    public = path.with_name(f"{path.name}.pub")
    if path.exists() or public.exists():
        raise KeelError(f"{path} exists and the server may know its node by it; choose another name")
    key = ec.generate_private_key(ec.SECP384R1())
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_private(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")
    return public


def _certificate(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + LIFETIME)
    )


def _common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(text))
    except ValueError:
        pass
    try:
        return x509.DNSName(text)
    except ValueError:
        raise KeelError(f"host must be a DNS name or an IP address (got {text!r})") from None


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write_private(file: Path, content: bytes) -> None:
    """Write a file that only its owner can read, from its creation on."""
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
        stream.write(content)
