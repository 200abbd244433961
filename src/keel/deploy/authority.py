"""The federation's certificate authority: issues, renews and revokes certificates.

A folder of certificates has ca.crt, ca.key and ca.crl (revoked certificates), server.crt and server.key, the current
certificate of each site (site-0.crt, ...), and in issued/ every certificate that a site has ever had.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from keel.errors import KeelError
from keel.runs.files import write_atomic

LIFETIME = timedelta(days=365)
CA_LIFETIME = timedelta(days=3650)
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


@dataclass
class Authority:
    """The authority in a folder of certificates, with its private key."""

    folder: Path
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def load(cls, folder: Path) -> "Authority":
        if not (folder / "ca.crt").exists():
            raise KeelError(
                f"{folder / 'ca.crt'} does not exist; run this on the server, after keel deploy certificates"
            )
        if not (folder / "ca.key").exists():
            raise KeelError(
                f"{folder / 'ca.key'} does not exist; if it is kept offline, bring it here for this command and remove "
                "it afterwards, or run the command on a copy of the folder that has it and copy the result back"
            )
        key = load_pem_private_key((folder / "ca.key").read_bytes(), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise KeelError(f"{folder / 'ca.key'} must be an elliptic-curve key, as keel deploy certificates makes")
        return cls(folder, read_certificate(folder / "ca.crt"), key)

    def server_certificate(self, key: ec.EllipticCurvePublicKey, hosts: list[str]) -> x509.Certificate:
        names = x509.SubjectAlternativeName([_host(host) for host in hosts])
        return self._sign(common_name(hosts[0]), key, ExtendedKeyUsageOID.SERVER_AUTH, names)

    def renew_server(self) -> x509.Certificate:
        """Replace server.crt by a certificate of the same key and names with a new lifetime."""
        file = self.folder / "server.crt"
        old = read_certificate(file)
        names = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        new = self._sign(old.subject, _public_key(old), ExtendedKeyUsageOID.SERVER_AUTH, names)
        write_atomic(file, [new.public_bytes(Encoding.PEM)])
        return new

    def certify_site(self, site: int, request: Path) -> Path:
        """Sign the certificate that a site requests, and return its path. The name in it is the site's, `site-0`."""
        file = self.folder / f"site-{site}.crt"
        if file.exists():
            raise KeelError(f"{file} exists; run keel deploy renew, or keel deploy revoke {site} before a new one")
        if not request.exists():
            raise KeelError(f"{request} does not exist; run keel deploy key at the site and send it to the server")
        signed = _read_request(request)
        key = signed.public_key()
        if self._is_revoked(key):
            raise KeelError(f"{request} has the key of a revoked certificate; run keel deploy key at the site again")
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise KeelError(f"{request} must have an elliptic-curve key, as keel deploy key makes")
        return self._issue_site(site, key)

    def renew_site(self, site: int) -> Path:
        """Replace a site's certificate by one of the same key with a new lifetime."""
        file = self.folder / f"site-{site}.crt"
        key = _public_key(read_certificate(file))
        if self._is_revoked(key):
            raise KeelError(f"{file} has the key of a revoked certificate; remove it, and have a new key signed")
        return self._issue_site(site, key)

    def sites(self) -> list[int]:
        """Return the numbers of the sites that have a certificate."""
        return sorted(int(file.stem.removeprefix("site-")) for file in self.folder.glob("site-*.crt"))

    def issued(self, site: int | None = None) -> list[x509.Certificate]:
        """Return every certificate that the site, or any site, has ever had."""
        names = "site-*.crt" if site is None else f"site-{site}-*.crt"
        return [read_certificate(file) for file in sorted((self.folder / "issued").glob(names))]

    def revoke_site(self, site: int) -> int:
        """Revoke every certificate that the site has had, and return their number."""
        revoked = self.revocations()
        serials = {entry.serial_number for entry in revoked}
        new = [certificate for certificate in self.issued(site) if certificate.serial_number not in serials]
        if not new:
            raise KeelError(f"site {site} has no valid certificate in {self.folder}")
        now = datetime.now(UTC)
        entries = [
            x509.RevokedCertificateBuilder().serial_number(old.serial_number).revocation_date(now).build()
            for old in new
        ]
        self.write_revocations([*revoked, *entries])
        (self.folder / f"site-{site}.crt").unlink(missing_ok=True)
        return len(new)

    def revocations(self) -> list[x509.RevokedCertificate]:
        """Return the entries of ca.crl. A missing list is an error: as an empty one it would undo every revocation."""
        file = self.folder / "ca.crl"
        try:
            return list(x509.load_pem_x509_crl(file.read_bytes()))
        except FileNotFoundError:
            raise KeelError(f"{file} does not exist; restore it from a backup of the server") from None
        except ValueError:
            raise KeelError(f"{file} is not a revocation list; restore it from a backup of the server") from None

    def _is_revoked(self, key: object) -> bool:
        """Return whether a certificate of this key was revoked, of whichever site it was."""
        revoked = {entry.serial_number for entry in self.revocations()}
        return any(old.public_key() == key for old in self.issued() if old.serial_number in revoked)

    def write_revocations(self, entries: list[x509.RevokedCertificate]) -> None:
        """Write ca.crl. It is valid as long as the authority: a proxy refuses every site when its list has expired."""
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.certificate.subject)
            .last_update(datetime.now(UTC) - timedelta(days=1))
            .next_update(self.certificate.not_valid_after_utc)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
            .add_extension(x509.CRLNumber(int(datetime.now(UTC).timestamp() * 1000)), critical=False)
        )
        for entry in entries:
            builder = builder.add_revoked_certificate(entry)
        write_atomic(self.folder / "ca.crl", [builder.sign(self.key, hashes.SHA384()).public_bytes(Encoding.PEM)])

    def _issue_site(self, site: int, key: ec.EllipticCurvePublicKey) -> Path:
        certificate = self._sign(common_name(f"site-{site}"), key, ExtendedKeyUsageOID.CLIENT_AUTH)
        content = certificate.public_bytes(Encoding.PEM)
        (self.folder / "issued").mkdir(mode=0o700, exist_ok=True)
        # First the record that a revocation needs, then the certificate.
        (self.folder / "issued" / f"site-{site}-{certificate.serial_number:x}.crt").write_bytes(content)
        write_atomic(self.folder / f"site-{site}.crt", [content])
        return self.folder / f"site-{site}.crt"

    def _sign(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePublicKey,
        usage: x509.ObjectIdentifier,
        names: x509.SubjectAlternativeName | None = None,
    ) -> x509.Certificate:
        end = min(datetime.now(UTC) + LIFETIME, self.certificate.not_valid_after_utc)
        builder = (
            _unsigned(subject, self.certificate.subject, key, end)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.KeyUsage(**{**KEY_USAGES, "digital_signature": True}), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
        )
        if names is not None:
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self.key, hashes.SHA384())


def authority_certificate(key: ec.EllipticCurvePrivateKey, lifetime: timedelta) -> x509.Certificate:
    """Return the self-signed certificate of a new authority."""
    name = common_name("Keel federation CA")
    return (
        _unsigned(name, name, key.public_key(), datetime.now(UTC) + lifetime)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.KeyUsage(**{**KEY_USAGES, "key_cert_sign": True, "crl_sign": True}), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )


def read_certificate(file: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(file.read_bytes())
    except FileNotFoundError:
        raise KeelError(f"{file} does not exist; run keel deploy certificates on the server") from None
    except ValueError:
        raise KeelError(f"{file} is not a certificate; copy it again") from None


def common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _unsigned(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, end: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - timedelta(days=1))
        .not_valid_after(end)
    )


def _read_request(file: Path) -> x509.CertificateSigningRequest:
    try:
        request = x509.load_pem_x509_csr(file.read_bytes())
    except ValueError:
        raise KeelError(f"{file} is not a certificate request; copy it from the site again") from None
    if not request.is_signature_valid:
        raise KeelError(f"{file} has an invalid signature; copy it from the site again")
    return request


def _public_key(certificate: x509.Certificate) -> ec.EllipticCurvePublicKey:
    key = certificate.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)  # Keel issues no other
    return key


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(text))
    except ValueError:
        pass
    try:
        if not text:
            raise ValueError("an empty name")
        return x509.DNSName(text)
    except ValueError:
        raise KeelError(f"host must be a DNS name or an IP address (got {text!r})") from None
