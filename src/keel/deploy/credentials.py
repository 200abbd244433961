"""The federation's first certificates, and the keys of the sites. Only the owner can read a private key.

The federation has its own certificate authority (CA). A site checks the server's certificate against it, and the proxy
checks the sites' certificates against it. The private keys of a site are made at the site and stay there.
"""

import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from keel.deploy.authority import CA_LIFETIME, Authority, authority_certificate, common_name, pem
from keel.errors import KeelError


def make_certificates(folder: Path, hosts: list[str]) -> None:
    """Make a CA (ca.crt, ca.key, ca.crl) and the server's certificate (server.crt, server.key).

    Args:
        hosts: Names and addresses of the server for which the certificate is valid, besides those of the loopback
            interface, by which the proxy and operators reach it.
    """
    present = [name for name in ("ca.crt", "ca.key", "server.crt", "server.key") if (folder / name).exists()]
    if present:
        raise KeelError(f"{folder / present[0]} exists and sites may trust it; choose another folder")
    ca_key, key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    authority = Authority(folder, authority_certificate(ca_key, CA_LIFETIME), ca_key)
    names = list(dict.fromkeys([*hosts, "localhost", "127.0.0.1"]))
    certificate = authority.server_certificate(key.public_key(), names)
    private_folder(folder)
    write_private(folder / "ca.key", pem(ca_key))
    write_private(folder / "server.key", pem(key))
    (folder / "ca.crt").write_bytes(authority.certificate.public_bytes(Encoding.PEM))
    (folder / "server.crt").write_bytes(certificate.public_bytes(Encoding.PEM))
    authority.write_revocations([])


def make_node_key(path: Path) -> Path:
    """Write the keys of a site, and return the path of the node's public key.

    The node's private key is `path`, its public key ends in .pub. The private key for TLS ends in .key, and the request
    for its certificate in .csr.
    """
    if not path.name or path.is_dir():
        raise KeelError(f"{str(path)!r} is a folder; name a new file, as in keys/site-0")
    public, tls_key, request = (path.with_name(path.name + ending) for ending in (".pub", ".key", ".csr"))
    if any(file.exists() for file in (path, public, tls_key, request)):
        raise KeelError(f"{path} exists and the server may know its node by it; choose another name")
    key, client_key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    private_folder(path.parent)
    write_private(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")
    write_private(tls_key, pem(client_key))
    signed = x509.CertificateSigningRequestBuilder(common_name(path.name)).sign(client_key, hashes.SHA384())
    request.write_bytes(signed.public_bytes(Encoding.PEM))
    return public


def private_folder(folder: Path) -> None:
    """Make a folder that only its owner can open. The mode of an existing folder stays as it is."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def write_private(file: Path, content: bytes) -> None:
    """Write a file that only its owner can read, from its creation on."""
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
        stream.write(content)
