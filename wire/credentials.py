"""A peer's identity on an encrypted network: its key, its certificate, and the run's CA, the only one trusted.

A certificate names its peer in URIs of the subject alternative name: ``p2ptrain:peer:<id>`` once, and
``p2ptrain:role:<role>`` for each role. Host names are not checked: a peer may move, but its id stays.
"""

from __future__ import annotations

import hashlib
import ipaddress
import ssl
import warnings
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.utils import CryptographyDeprecationWarning
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from p2ptrain.core.disk import Disk, write_atomic
from p2ptrain.core.errors import ProtocolError, StorageError
from p2ptrain.core.ids import is_id

CERTIFICATE_LIFETIME_S = 24 * 3600.0
SKEW_S = 3600.0
"""Certificates are valid from this long before they were made, for machines whose clock is behind."""
MAX_DER_BYTES = 2048
"""Longest certificate or request that is parsed: P-256 makes about 600 bytes; a handshake frame holds 4 KiB."""
FILE_NAME = "credentials.pem"

_PEER, _ROLE = "p2ptrain:peer:", "p2ptrain:role:"
_MARK = b"-----BEGIN CERTIFICATE-----"
_DAMAGED = (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm, x509.InvalidVersion)
"""What cryptography raises for invalid certificates and keys."""
_NAMELESS = (x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType)
"""What cryptography raises for names that are missing or of an unknown kind."""


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """What a certificate says about its peer.

    Attributes:
        not_after: Unix seconds at which it expires.
        serial: unique within the run.
    """

    peer_id: str
    roles: frozenset[str]
    not_after: float
    serial: int


# ------------------------------------------------------------------------------------------- what comes from a peer


def identity_of_untrusted(certificate_der: bytes) -> PeerIdentity:
    """Return the peer that a certificate names; TLS checks who signed it. Raises ``ProtocolError``."""
    certificate = certificate_of_untrusted(certificate_der)
    try:
        names = _names(certificate.extensions)
    except (ValueError, UnsupportedAlgorithm, *_NAMELESS) as error:
        raise ProtocolError(f"the certificate names no peer: {error}") from error
    peers = [name.removeprefix(_PEER) for name in names if name.startswith(_PEER)]
    roles = [name.removeprefix(_ROLE) for name in names if name.startswith(_ROLE)]
    if len(peers) != 1 or len(peers) + len(roles) != len(names) or len(roles) > 8:
        raise ProtocolError("the certificate does not name exactly one peer and its roles")
    if not all(map(is_id, (*peers, *roles))):
        raise ProtocolError("the certificate's peer id or role is not a valid identifier")
    return PeerIdentity(
        peers[0], frozenset(roles), certificate.not_valid_after_utc.timestamp(), certificate.serial_number
    )


def certificate_of_untrusted(certificate_der: bytes) -> x509.Certificate:
    """Parse a certificate in DER. Raises ``ProtocolError``."""
    if len(certificate_der) > MAX_DER_BYTES:
        raise ProtocolError(f"the certificate has {len(certificate_der)} bytes, at most {MAX_DER_BYTES} are allowed")
    try:
        with warnings.catch_warnings():
            # Reject defects that the library tolerates for old authorities, such as a negative serial number.
            warnings.simplefilter("error", CryptographyDeprecationWarning)
            certificate = x509.load_der_x509_certificate(certificate_der)
            _ = (certificate.serial_number, certificate.not_valid_after_utc, certificate.version)  # parsed on access
    except (ValueError, x509.InvalidVersion, CryptographyDeprecationWarning) as error:
        raise ProtocolError(f"not a certificate: {error}") from error
    return certificate


def request_of_untrusted(csr_der: bytes) -> tuple[str, ec.EllipticCurvePublicKey]:
    """Parse a certificate request in DER to the peer id and the key that it is for.

    Raises:
        ProtocolError: it is no request, not for a P-256 key, or not signed with that key.
    """
    if len(csr_der) > MAX_DER_BYTES:
        raise ProtocolError(f"the certificate request has {len(csr_der)} bytes, at most {MAX_DER_BYTES} are allowed")
    try:
        request = x509.load_der_x509_csr(csr_der)
        key = request.public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
            raise ProtocolError("the certificate request's key is not a P-256 key")
        if not request.is_signature_valid:
            raise ProtocolError("the certificate request is not signed with its own key")
        names = _names(request.extensions)
    except (ValueError, x509.InvalidVersion, *_NAMELESS) as error:
        raise ProtocolError(f"not a certificate request: {error}") from error
    except (UnsupportedAlgorithm, InvalidSignature) as error:
        raise ProtocolError("the certificate request uses an unknown algorithm") from error
    if len(names) != 1 or not names[0].startswith(_PEER) or not is_id(peer_id := names[0].removeprefix(_PEER)):
        raise ProtocolError("the certificate request does not name exactly one peer")
    return peer_id, key


def _names(extensions: x509.Extensions) -> list[str]:
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    if not all(isinstance(name, x509.UniformResourceIdentifier) for name in names):
        raise ProtocolError("the certificate has a name that is not a URI")
    return [str(name.value) for name in names]


# ----------------------------------------------------------------------------------------- making keys and certificates


def new_key_and_request(peer_id: str) -> tuple[bytes, bytes]:
    """Make a P-256 key (PEM, PKCS #8, secret) and the request (DER) for a certificate of ``peer_id``."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder = x509.CertificateSigningRequestBuilder().subject_name(_common_name(peer_id))
    request = builder.add_extension(_alternative([_PEER + peer_id]), critical=False).sign(key, hashes.SHA256())
    return _key_pem(key), request.public_bytes(serialization.Encoding.DER)


def new_authority(name: str, *, now: float) -> tuple[bytes, bytes]:
    """Make a run CA: its key (PEM, secret) and its own certificate (PEM), which may sign peers only.

    ``name`` is for display; ``now`` is in Unix seconds.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _common_name(name)
    # ten years
    builder = _builder(subject, subject, key.public_key(), key.public_key(), now, 10 * 365 * 24 * 3600.0, ca=True)
    return _key_pem(key), builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def sign_certificate(
    ca_key_pem: bytes,
    ca_pem: bytes,
    public_key: ec.EllipticCurvePublicKey,
    *,
    peer_id: str,
    roles: Iterable[str],
    now: float,
    lifetime_s: float = CERTIFICATE_LIFETIME_S,
    serial: int = 0,
) -> bytes:
    """Make a certificate (DER) under the run CA for ``public_key`` that names ``peer_id`` and ``roles``.

    Args:
        now: Unix seconds; the certificate is valid from ``SKEW_S`` before to ``lifetime_s`` after.
        serial: at most 20 bytes long, unique within the run; 0 for a random one.

    Raises:
        ValueError: the CA's key or certificate is damaged.
    """
    ca_key, issuer = _signer(ca_key_pem, ca_pem)
    builder = _builder(_common_name(peer_id), issuer, public_key, ca_key.public_key(), now, lifetime_s, serial)
    names = [_PEER + peer_id, *(_ROLE + role for role in sorted(roles))]
    builder = builder.add_extension(_alternative(names), critical=False)
    builder = builder.add_extension(
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
    )
    return builder.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def _signer(ca_key_pem: bytes, ca_pem: bytes) -> tuple[ec.EllipticCurvePrivateKey, x509.Name]:
    ca_key = serialization.load_pem_private_key(ca_key_pem, password=None)
    if not isinstance(ca_key, ec.EllipticCurvePrivateKey):
        raise ValueError("the CA's key is not of an elliptic curve")
    return ca_key, x509.load_pem_x509_certificate(ca_pem).subject


SERVER_LIFETIME_S = 30 * 24 * 3600.0


def server_certificate(ca_key_pem: bytes, ca_pem: bytes, names: Collection[str], *, now: float) -> bytes:
    """Make a certificate with its key and the CA (PEM, secret) for an HTTPS server of these names and IP addresses.

    It names no peer, so it admits to nothing else. Raises ``ValueError`` if the CA's key or certificate is damaged.
    """
    ca_key, issuer = _signer(ca_key_pem, ca_pem)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _common_name("p2ptrain seed")
    builder = _builder(subject, issuer, key.public_key(), ca_key.public_key(), now, SERVER_LIFETIME_S)
    alternative = x509.SubjectAlternativeName([_general_name(name) for name in names])
    builder = builder.add_extension(alternative, critical=False)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    made = builder.sign(ca_key, hashes.SHA256())
    return _key_pem(key) + made.public_bytes(serialization.Encoding.PEM) + ca_pem


def server_names(certificate_pem: bytes) -> list[str]:
    """The names and IP addresses of an HTTPS server's certificate, in small letters. Raises ``ValueError``."""
    certificate = x509.load_pem_x509_certificate(certificate_pem)
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except _NAMELESS as error:
        raise ValueError("it names no server") from error
    return [str(name.value).lower() for name in found]


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def der_of(certificate_pem: bytes) -> bytes:
    """Convert a PEM certificate to DER, the form that is sent and pinned. Raises ``ValueError``."""
    return x509.load_pem_x509_certificate(certificate_pem).public_bytes(serialization.Encoding.DER)


def pem_of(certificate_der: bytes) -> bytes:
    return ssl.DER_cert_to_PEM_cert(certificate_der).encode()


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    signer: ec.EllipticCurvePublicKey,
    now: float,
    lifetime_s: float,
    serial: int = 0,
    *,
    ca: bool = False,
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder(issuer, subject, key, serial or x509.random_serial_number())
    builder = builder.not_valid_before(datetime.fromtimestamp(now - SKEW_S, UTC))
    builder = builder.not_valid_after(datetime.fromtimestamp(now + lifetime_s, UTC))
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    builder = builder.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=ca, path_length=0 if ca else None), critical=True)
    never = ["content_commitment", "key_agreement", "encipher_only", "decipher_only"]
    never += ["key_encipherment", "data_encipherment"]
    usage = x509.KeyUsage(not ca, **dict.fromkeys(never, False), key_cert_sign=ca, crl_sign=ca)
    return builder.add_extension(usage, critical=True)


def _common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _alternative(uris: list[str]) -> x509.SubjectAlternativeName:
    return x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri) for uri in uris])


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


# ---------------------------------------------------------------------------------------------- what a peer presents


@dataclass(frozen=True, slots=True)
class Credentials:
    """A peer's key, its certificate and the run's CA, as stored in one file of ``directory``.

    They share a file so that a renewal replaces key and certificate atomically. OpenSSL reads a key from a file only.
    """

    directory: Path
    ca_pem: bytes
    certificate_pem: bytes
    key_pem: bytes = field(repr=False)

    @property
    def identity(self) -> PeerIdentity:
        return identity_of_untrusted(der_of(self.certificate_pem))

    @property
    def pin(self) -> bytes:
        """As in a ticket of the run."""
        return hashlib.sha256(der_of(self.ca_pem)).digest()

    @property
    def path(self) -> Path:
        return self.directory / FILE_NAME

    @classmethod
    def load(cls, disk: Disk, directory: Path) -> Self:
        """Load credentials, and check that they belong together (not their expiry). Raises ``StorageError``."""
        path = directory / FILE_NAME
        key, *certificates = disk.read(path, max_bytes=32 << 10).split(_MARK)
        try:
            certificate_pem, ca_pem = (_MARK + text for text in certificates)
            found = cls(directory, ca_pem, certificate_pem, key)
            found._check()
        except (*_DAMAGED, ProtocolError) as error:
            raise StorageError(f"{path} is damaged: {error}", remedy="remove it, and join with a ticket") from error
        return found

    def save(self, disk: Disk) -> None:
        """Write the file atomically, readable by this user only. Raises ``StorageError``."""
        disk.make_dir(self.directory)
        disk.set_mode(self.directory, 0o700)  # if it existed already
        write_atomic(disk, self.path, self.key_pem + self.certificate_pem + self.ca_pem, private=True)

    def server_context(self, *, require_client_certificate: bool = True) -> ssl.SSLContext:
        """Make the context for accepting: TLS 1.3, callers under the run's CA only. Raises ``StorageError``.

        A seed does not require a client certificate, because an enrolling caller has none.
        """
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # no resumption: every connection proves its certificate
        context.verify_mode = ssl.CERT_REQUIRED if require_client_certificate else ssl.CERT_OPTIONAL
        return context

    def client_context(self) -> ssl.SSLContext:
        """Make the context for dialling: TLS 1.3, a server under the run's CA only. Raises ``StorageError``."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = authority_context(self.ca_pem, protocol)
        try:
            context.load_cert_chain(self.path)
        except (OSError, ssl.SSLError) as error:
            raise StorageError(
                f"cannot use {self.path}: {error}", remedy="remove it, and join with a ticket"
            ) from error
        return context

    def _check(self) -> None:
        key = serialization.load_pem_private_key(self.key_pem, password=None)
        certificate, authority = map(x509.load_pem_x509_certificate, (self.certificate_pem, self.ca_pem))
        certificate.verify_directly_issued_by(authority)
        if key.public_key() != certificate.public_key():
            raise ValueError("the private key does not belong to the certificate")
        identity_of_untrusted(der_of(self.certificate_pem))


def granted_untrusted(
    certificate_der: bytes, *, peer_id: str, roles: Collection[str], key_pem: bytes, ca_pem: bytes, directory: Path
) -> Credentials:
    """Make credentials, not saved yet, from a certificate that the seed granted.

    Raises:
        ProtocolError: it is not a certificate under ``ca_pem`` for this key, peer id and roles.
    """
    certificate_of_untrusted(certificate_der)
    granted = Credentials(directory, ca_pem, pem_of(certificate_der), key_pem)
    try:
        granted._check()
    except _DAMAGED as error:
        raise ProtocolError(f"the seed granted an invalid certificate: {error}") from error
    identity = granted.identity
    if identity.peer_id != peer_id or identity.roles != frozenset(roles):
        raise ProtocolError(f"the seed granted a certificate of another peer or role: {identity.peer_id}")
    return granted


def authority_context(ca_pem: bytes, protocol: int = ssl.PROTOCOL_TLS_CLIENT) -> ssl.SSLContext:
    """Make a TLS 1.3 context that trusts only the CA in ``ca_pem`` and presents no certificate.

    Host names are not checked: a certificate names a peer id, which the handshake compares.
    """
    context = unverified_context(protocol)
    context.load_verify_locations(cadata=ca_pem.decode("ascii"))
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def unverified_context(protocol: int = ssl.PROTOCOL_TLS_CLIENT) -> ssl.SSLContext:
    """Make a TLS 1.3 context that accepts any peer: only to fetch the CA, which the ticket's pin verifies."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
