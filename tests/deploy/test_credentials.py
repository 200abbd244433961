"""Certificates are valid for their names only, and only the owner can read private keys."""

import socket
import ssl
import threading
from pathlib import Path

import pytest

from keel import KeelError

pytest.importorskip("flwr", reason="flwr is not installed: the extra flower")

from keel.deploy.credentials import make_certificates, make_node_key


def handshake(server: Path, ca: Path, name: str) -> None:
    """Connect with TLS over a pair of sockets. The client trusts the CA in `ca` and expects the server's name."""
    ours, theirs = socket.socketpair()
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(server / "server.crt", server / "server.key")

    def serve() -> None:
        try:
            serving.wrap_socket(theirs, server_side=True).close()
        except OSError:  # the client rejected the certificate; it raises the error that the test expects
            theirs.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        client = ssl.create_default_context(cafile=str(ca / "ca.crt"))
        client.verify_flags |= ssl.VERIFY_X509_STRICT
        client.wrap_socket(ours, server_hostname=name).close()
    finally:
        ours.close()
        thread.join()


def test_a_certificate_is_valid_only_for_its_names_and_with_its_authority(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    make_certificates(one, ["keel.example.org", "127.0.0.1"])
    make_certificates(other, ["keel.example.org"])
    handshake(one, one, "keel.example.org")
    handshake(one, one, "127.0.0.1")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(one, one, "elsewhere.example.org")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(one, other, "keel.example.org")


def test_private_keys_are_private_and_no_file_is_overwritten(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["localhost"])
    public = make_node_key(tmp_path / "keys" / "site-0")
    assert public.read_text().startswith("ecdsa-sha2-nistp384 ")
    for name in "ca.key", "server.key", "keys/site-0":
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    with pytest.raises(KeelError, match="exists"):
        make_certificates(tmp_path, ["localhost"])
    with pytest.raises(KeelError, match="exists"):
        make_node_key(tmp_path / "keys" / "site-0")
    with pytest.raises(KeelError, match="host"):
        make_certificates(tmp_path / "new", ["a name with blänks"])
