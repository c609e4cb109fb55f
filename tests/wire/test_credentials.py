"""Certificates and requests there and back, whatever else a peer may send, and what lies on the disk."""

from __future__ import annotations

import os
import ssl
import stat
import time
from collections.abc import Collection
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import ProtocolError, StorageError
from tests.wire.doubles import credentials, run
from wire.credentials import (
    MAX_DER_BYTES,
    Credentials,
    authority_context,
    der_of,
    granted_untrusted,
    identity_of_untrusted,
    new_key_and_request,
    pem_of,
    request_of_untrusted,
    unverified_context,
)

DISK = RealDisk()
DER = serialization.Encoding.DER
KEY_PEM, CSR = new_key_and_request("p1")
MADE_AT = time.time()  # when the tests are collected: they may run much later
CERTIFICATE = run().sign(CSR, roles=("worker", "seed"))


def names(*uris: str) -> x509.SubjectAlternativeName:
    return x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri) for uri in uris])


def certificate_with(extension: x509.SubjectAlternativeName | None) -> bytes:
    """A certificate under the run's CA that only a careless authority would make."""
    key = serialization.load_pem_private_key(run().key_pem, password=None)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "p1")])
    inside = x509.load_der_x509_certificate(CERTIFICATE)
    builder = x509.CertificateBuilder(subject, inside.issuer, inside.public_key(), 1)
    builder = builder.not_valid_before(inside.not_valid_before_utc).not_valid_after(inside.not_valid_after_utc)
    if extension is not None:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(DER)


def request_with(key: object, extension: x509.SubjectAlternativeName | None) -> bytes:
    builder = x509.CertificateSigningRequestBuilder(x509.Name([]))
    if extension is not None:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(DER)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------- what they say


def test_a_certificate_names_the_peer_and_its_roles() -> None:
    identity = identity_of_untrusted(CERTIFICATE)
    assert (identity.peer_id, identity.roles) == ("p1", frozenset({"worker", "seed"}))
    assert identity.not_after == pytest.approx(MADE_AT + 3600, abs=60)
    assert identity.serial == x509.load_der_x509_certificate(CERTIFICATE).serial_number
    assert len(CERTIFICATE) < 600  # what a handshake frame and MAX_DER_BYTES are made for
    assert len(CSR) < 400


def test_a_request_names_the_peer_and_its_key() -> None:
    peer_id, key = request_of_untrusted(CSR)
    assert peer_id == "p1"
    assert key == x509.load_der_x509_certificate(CERTIFICATE).public_key()


def test_a_serial_that_no_authority_gives_is_refused_without_a_warning() -> None:
    serial = identity_of_untrusted(CERTIFICATE).serial
    positive = serial.to_bytes(serial.bit_length() // 8 + 1, "big").lstrip(b"\0")
    assert CERTIFICATE.count(positive) == 1
    negative = bytes([positive[0] | 0x80]) + positive[1:]
    with pytest.raises(ProtocolError, match="not a certificate"):
        identity_of_untrusted(CERTIFICATE.replace(positive, negative))


def test_the_authority_signs_peers_and_nothing_else() -> None:
    authority = x509.load_der_x509_certificate(der_of(run().ca_pem))
    constraints = authority.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert (constraints.value.ca, constraints.value.path_length) == (True, 0)
    peer = x509.load_der_x509_certificate(CERTIFICATE)
    assert not peer.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not peer.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign


@pytest.mark.parametrize(
    "extension",
    [
        None,
        names("p2ptrain:role:worker"),
        names("p2ptrain:peer:a", "p2ptrain:peer:b"),
        names("p2ptrain:peer:a", "https://example.org"),
        names("p2ptrain:peer:"),
        names("p2ptrain:peer:../../etc"),
        names("p2ptrain:peer:a", "p2ptrain:role:Worker"),
        names("p2ptrain:peer:a", *(f"p2ptrain:role:r{index}" for index in range(9))),
        x509.SubjectAlternativeName([x509.DNSName("p2ptrain.example")]),
        x509.SubjectAlternativeName([]),
    ],
)
def test_a_certificate_that_does_not_name_one_peer_names_nobody(
    extension: x509.SubjectAlternativeName | None,
) -> None:
    with pytest.raises(ProtocolError):
        identity_of_untrusted(certificate_with(extension))


def test_requests_that_get_no_signature() -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    peer = names("p2ptrain:peer:a")
    request_of_untrusted(request_with(key, peer))
    with pytest.raises(ProtocolError, match="not a P-256 key"):
        request_of_untrusted(request_with(ec.generate_private_key(ec.SECP384R1()), peer))
    with pytest.raises(ProtocolError, match="not a P-256 key"):
        request_of_untrusted(request_with(rsa.generate_private_key(65537, 1024), peer))
    with pytest.raises(ProtocolError):
        request_of_untrusted(request_with(key, None))
    with pytest.raises(ProtocolError, match="one peer"):
        request_of_untrusted(request_with(key, names("p2ptrain:peer:a", "p2ptrain:role:operator")))
    with pytest.raises(ProtocolError, match="is not signed with its own key"):
        request_of_untrusted(CSR[:-1] + bytes([CSR[-1] ^ 1]))
    with pytest.raises(ProtocolError, match=f"{MAX_DER_BYTES} are allowed"):
        request_of_untrusted(bytes(MAX_DER_BYTES + 1))
    with pytest.raises(ProtocolError, match=f"{MAX_DER_BYTES} are allowed"):
        identity_of_untrusted(bytes(MAX_DER_BYTES + 1))


# ----------------------------------------------------------------------------------------------------- what is stored


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    held = credentials("p1")
    stored = Credentials(tmp_path / "here", held.ca_pem, held.certificate_pem, held.key_pem)
    stored.save(DISK)
    loaded = Credentials.load(DISK, tmp_path / "here")
    assert loaded == stored
    assert loaded.identity.peer_id == "p1"
    assert os.listdir(tmp_path / "here") == ["credentials.pem"]


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX")
def test_only_their_owner_reads_them(tmp_path: Path) -> None:
    directory = tmp_path / "here"
    directory.mkdir(mode=0o755)
    held = credentials("p1")
    for _ in range(2):
        Credentials(directory, held.ca_pem, held.certificate_pem, held.key_pem).save(DISK)
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert stat.S_IMODE((directory / "credentials.pem").stat().st_mode) == 0o600


@pytest.mark.parametrize("damage", ["cut", "emptied", "another key", "another authority", "garbage", "no peer"])
def test_damaged_credentials_are_told_with_what_to_do(tmp_path: Path, damage: str) -> None:
    held = credentials("p1")
    ca_pem, certificate_pem, key_pem = held.ca_pem, held.certificate_pem, held.key_pem
    if damage == "another key":
        key_pem = credentials("p2").key_pem
    elif damage == "another authority":
        ca_pem = run("another").ca_pem
    elif damage == "no peer":
        certificate_pem = pem_of(certificate_with(None))
    Credentials(tmp_path, ca_pem, certificate_pem, key_pem).save(DISK)
    path = tmp_path / "credentials.pem"
    if damage in ("cut", "emptied"):
        path.write_bytes(path.read_bytes()[: 900 if damage == "cut" else 0])
    elif damage == "garbage":
        path.write_bytes(os.urandom(500))
    with pytest.raises(StorageError, match=r"credentials\.pem is damaged") as caught:
        Credentials.load(DISK, tmp_path)
    assert "ticket" in caught.value.remedy


# --------------------------------------------------------------------------------------------------- what is granted


def test_a_granted_certificate_is_checked(tmp_path: Path) -> None:
    def granted(
        der: bytes, *, peer_id: str = "p1", roles: Collection[str] = ("worker",), key_pem: bytes = KEY_PEM
    ) -> Credentials:
        ca_pem = run().ca_pem
        return granted_untrusted(der, peer_id=peer_id, roles=roles, key_pem=key_pem, ca_pem=ca_pem, directory=tmp_path)

    good = run().sign(CSR, roles=("worker",))
    assert granted(good).identity.peer_id == "p1"
    for wrong in (
        {"peer_id": "p2"},
        {"roles": {"operator"}},
        {"roles": {"worker", "operator"}},
        {"roles": set()},
        {"key_pem": new_key_and_request("p1")[0]},
    ):
        with pytest.raises(ProtocolError, match="the seed granted"):
            granted(good, **wrong)
    with pytest.raises(ProtocolError, match="granted an invalid certificate"):
        granted(run("another").sign(CSR, roles=("worker",)))
    with pytest.raises(ProtocolError):
        granted(b"nonsense")


# -------------------------------------------------------------------------------------------------------- the contexts


def test_contexts_trust_the_run_alone_and_speak_the_newest_only() -> None:
    held = credentials("p1")
    client, server = held.client_context(), held.server_context()
    for context in (client, server, authority_context(held.ca_pem)):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_3
        assert context.verify_mode == ssl.CERT_REQUIRED
        serials = [int(str(each["serialNumber"]), 16) for each in context.get_ca_certs()]
        assert serials == [x509.load_pem_x509_certificate(held.ca_pem).serial_number]
    assert server.num_tickets == 0
    assert held.server_context(require_client_certificate=False).verify_mode == ssl.CERT_OPTIONAL
    assert unverified_context().verify_mode == ssl.CERT_NONE
