"""Certificates are valid for their names only, and only the owner can read private keys."""

import socket
import ssl
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from keel import KeelError
from tests.conftest import Called

pytest.importorskip("flwr", reason="flwr is not installed: the extra flower")

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from keel.deploy import authority as authority_module
from keel.deploy.authority import Authority, read_certificate
from keel.deploy.credentials import make_certificates, make_node_key
from keel.deploy.expiry import expiring


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
    for name in "ca.key", "server.key", "keys/site-0", "keys/site-0.key":
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o700
    with pytest.raises(KeelError, match="exists"):
        make_certificates(tmp_path, ["localhost"])
    with pytest.raises(KeelError, match="exists"):
        make_node_key(tmp_path / "keys" / "site-0")
    with pytest.raises(KeelError, match="host"):
        make_certificates(tmp_path / "new", ["a name with blänks"])


def federation(folder: Path, *sites: int) -> Authority:
    make_certificates(folder / "certificates", ["keel.example.org"])
    authority = Authority.load(folder / "certificates")
    for site in sites:
        authority.certify_site(site, make_node_key(folder / "keys" / f"site-{site}").with_suffix(".csr"))
    return authority


def test_a_sites_certificate_has_its_name_its_own_key_and_is_for_clients_only(tmp_path: Path) -> None:
    federation(tmp_path, 4)
    certificate = read_certificate(tmp_path / "certificates" / "site-4.crt")
    assert certificate.subject.rfc4514_string() == "CN=site-4"
    key = load_pem_private_key((tmp_path / "keys" / "site-4.key").read_bytes(), None)
    assert certificate.public_key() == key.public_key()
    usages = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usages) == [x509.ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate.verify_directly_issued_by(read_certificate(tmp_path / "certificates" / "ca.crt"))
    assert (certificate.not_valid_after_utc - certificate.not_valid_before_utc).days == 366


def test_a_site_that_has_a_certificate_gets_no_second_one_and_a_revoked_key_none(tmp_path: Path) -> None:
    authority, request = federation(tmp_path, 0), tmp_path / "keys" / "site-0.csr"
    with pytest.raises(KeelError, match="keel deploy revoke 0"):
        authority.certify_site(0, request)
    authority.renew_site(0)
    assert authority.revoke_site(0) == 2
    assert {entry.serial_number for entry in authority.revocations()} == {
        certificate.serial_number for certificate in authority.issued(0)
    }
    with pytest.raises(KeelError, match="key of a revoked certificate"):
        authority.certify_site(0, request)
    with pytest.raises(KeelError, match="key of a revoked certificate"):
        authority.certify_site(7, request)
    with pytest.raises(KeelError, match="no valid certificate"):
        authority.revoke_site(0)
    new = make_node_key(tmp_path / "new" / "site-0").with_suffix(".csr")
    assert authority.certify_site(0, new).exists()
    with pytest.raises(KeelError, match="keel deploy key at the site"):
        authority.certify_site(1, tmp_path / "keys" / "site-1.csr")
    new.write_text("nonsense")
    with pytest.raises(KeelError, match="not a certificate request"):
        authority.certify_site(1, new)


def test_a_revoked_certificate_is_not_renewed_and_a_missing_list_is_an_error(tmp_path: Path) -> None:
    authority, file = federation(tmp_path, 0), tmp_path / "certificates/site-0.crt"
    content = file.read_bytes()
    authority.revoke_site(0)
    file.write_bytes(content)
    with pytest.raises(KeelError, match="key of a revoked certificate"):
        authority.renew_site(0)
    (tmp_path / "certificates/ca.crl").unlink()
    request = make_node_key(tmp_path / "keys/site-1").with_suffix(".csr")
    for action in (
        lambda: authority.revoke_site(0),
        lambda: authority.renew_site(0),
        lambda: authority.certify_site(1, request),
    ):
        with pytest.raises(KeelError, match=r"ca\.crl does not exist; restore it"):
            action()


def test_certificates_that_expire_soon_are_reported_and_renewed(
    keel: Callable[..., Called], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr(authority_module, "LIFETIME", timedelta(days=20, hours=1))
        federation(tmp_path, 0)
    folder = tmp_path / "certificates"
    before = read_certificate(folder / "server.crt")
    assert expiring(folder, 30) == {"server.crt": 20, "site-0.crt": 20}
    make_node_key(tmp_path / "keys" / "site-1")
    issued = keel("deploy", "site-certificate", "1")
    assert issued.code == 0, issued.err
    assert "warning: certificates/site-0.crt expires in 20 days; run keel deploy renew" in issued.err
    renewed = keel("deploy", "renew")
    assert renewed.code == 0, renewed.err
    assert renewed.err == ""
    assert "send it to site 1" in renewed.out
    after = read_certificate(folder / "server.crt")
    assert expiring(folder, 30) == {}
    assert after.public_key() == before.public_key()
    assert after.serial_number != before.serial_number
    handshake(folder, folder, "keel.example.org")


def test_the_commands_need_the_authority(keel: Callable[..., Called]) -> None:
    for words in ["site-certificate", "0"], ["renew"], ["revoke", "0"]:
        called = keel("deploy", *words)
        assert called.code == 2
        assert "ca.crt does not exist; run this on the server" in called.err


def test_a_key_needs_a_name_and_a_certificate_a_host(tmp_path: Path) -> None:
    for path in (Path(), tmp_path):
        with pytest.raises(KeelError, match=r"is a folder; name a new file, as in keys/site-0$"):
            make_node_key(path)
    with pytest.raises(KeelError, match=r"^host must be a DNS name or an IP address \(got ''\)$"):
        make_certificates(tmp_path / "certificates", [""])
    assert not list(tmp_path.iterdir())
