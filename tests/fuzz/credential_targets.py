"""Certificates and requests: real ones, odd ones that cryptography itself makes, and both with bytes changed."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtensionOID, NameOID, ObjectIdentifier
from hypothesis import strategies as st

from p2ptrain.core.errors import ProtocolError, Refused
from p2ptrain.core.ids import is_id
from roles.seed.authority import ticket_of
from tests.wire.doubles import Run, credentials, run
from wire.credentials import (
    MAX_DER_BYTES,
    der_of,
    granted_untrusted,
    identity_of_untrusted,
    new_key_and_request,
    request_of_untrusted,
)
from wire.enrol import _certificate_untrusted

from .engine import target
from .strategies import FREE, mutated

_DER = serialization.Encoding.DER


def _uris(*texts: str) -> list[x509.GeneralName]:
    return [x509.UniformResourceIdentifier(text) for text in texts]


def _alternatives() -> Iterator[list[x509.GeneralName]]:
    """Names that a certificate may carry, of peers and of nobody."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a1")])
    yield _uris("p2ptrain:peer:a1", "p2ptrain:role:worker")
    yield _uris("p2ptrain:peer:a1", "p2ptrain:peer:b2")
    yield _uris("p2ptrain:peer:A/../B", "p2ptrain:role:")
    yield _uris("p2ptrain:peer:a1", *(f"p2ptrain:role:r{index}" for index in range(9)))
    yield _uris("https://seed.example")
    yield [x509.DNSName("a1"), *_uris("p2ptrain:peer:a1")]
    yield [x509.DirectoryName(name), x509.RegisteredID(ObjectIdentifier("1.2.3"))]
    yield [x509.OtherName(ObjectIdentifier("1.2.3"), b"\x05\x00")]
    yield [x509.RFC822Name("a@b.c")]


@cache
def _certificates() -> tuple[bytes, ...]:
    made = [der_of(credentials().certificate_pem), der_of(run().ca_pem)]
    for names in _alternatives():
        made.extend(_signed(key, x509.SubjectAlternativeName(names)) for key in _keys())
    made.append(_signed(_keys()[0], None))
    return tuple(made)


@cache
def _keys() -> tuple[Any, ...]:
    return ec.generate_private_key(ec.SECP256R1()), ed25519.Ed25519PrivateKey.generate()


def _signed(key: Any, names: x509.ExtensionType | None) -> bytes:
    """A certificate that signs itself."""
    subject, now = x509.Name([]), datetime.now(UTC)
    builder = x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now).not_valid_after(now + timedelta(days=1))
    if names is not None:
        builder = builder.add_extension(names, critical=False)
    return builder.sign(key, _hash_for(key)).public_bytes(_DER)


def _hash_for(key: Any) -> hashes.HashAlgorithm | None:
    return None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()


@cache
def _requests() -> tuple[bytes, ...]:
    made = [new_key_and_request("peer")[1], new_key_and_request("peer")[1]]
    others = (ec.generate_private_key(ec.SECP384R1()), rsa.generate_private_key(65537, 2048), *_keys())
    for key in others:
        for names in _alternatives():
            builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
            made.append(builder.sign(key, _hash_for(key)).public_bytes(_DER))
    return tuple(made)


@cache
def certificates() -> st.SearchStrategy[bytes]:
    return mutated(st.sampled_from(_certificates())) | st.binary(max_size=40) | st.just(bytes(MAX_DER_BYTES + 1))


@cache
def requests() -> st.SearchStrategy[bytes]:
    return mutated(st.sampled_from(_requests())) | st.binary(max_size=40) | st.just(bytes(MAX_DER_BYTES + 1))


@cache
def _raw_alternatives() -> tuple[bytes, ...]:
    """Values of the extension, and one of a name (an X.400 address) that cryptography knows of and does not read."""
    made = [x509.SubjectAlternativeName(names).public_bytes() for names in _alternatives()]
    return (*made, b"\x30\x04\xa3\x02\x05\x00", b"\x30\x00")


@dataclass(frozen=True)
class Named:
    """Names of which every byte may be wrong, where the signature is right: only who has a key can make these."""

    raw: bytes

    @property
    def extension(self) -> x509.UnrecognizedExtension:
        return x509.UnrecognizedExtension(ExtensionOID.SUBJECT_ALTERNATIVE_NAME, self.raw)

    def certificate(self) -> bytes:
        return _signed(_keys()[0], self.extension)

    def request(self) -> bytes:
        builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
        return (
            builder.add_extension(self.extension, critical=False).sign(_keys()[0], hashes.SHA256()).public_bytes(_DER)
        )


def _named() -> st.SearchStrategy[Named]:
    return mutated(st.deferred(lambda: st.sampled_from(_raw_alternatives()))).map(Named)


@target(
    "certificates",
    st.deferred(lambda: certificates()) | _named(),
    "wire.credentials.identity_of_untrusted",
    "wire.credentials.certificate_of_untrusted",
)
def _check_certificate(case: bytes | Named) -> None:
    identity = identity_of_untrusted(case.certificate() if isinstance(case, Named) else case)
    assert is_id(identity.peer_id)
    assert all(map(is_id, identity.roles))
    assert len(identity.roles) <= 8
    assert identity.not_after < datetime.max.replace(tzinfo=UTC).timestamp()
    try:
        assert len(ticket_of(identity)) == 12
    except Refused:
        return


@target("certificate-requests", st.deferred(lambda: requests()) | _named(), "wire.credentials.request_of_untrusted")
def _check_request(case: bytes | Named) -> None:
    peer_id, key = request_of_untrusted(case.request() if isinstance(case, Named) else case)
    assert is_id(peer_id)
    assert isinstance(key.curve, ec.SECP256R1)


@cache
def _granted() -> tuple[Run, bytes, bytes, bytes]:
    """A run, a key, a certificate of it for peer ``a1``, and one for another key."""
    made = run("grants")
    key_pem, csr_der = new_key_and_request("a1")
    other = new_key_and_request("a1")[1]
    return made, key_pem, made.sign(csr_der, roles=("worker",)), made.sign(other, roles=("worker",))


_ANSWERS = st.dictionaries(st.just("certificate"), FREE | st.binary().map(lambda raw: base64.b64encode(raw).decode()))


@target(
    "grants",
    st.tuples(st.deferred(lambda: mutated(st.sampled_from(_granted()[2:]), most=2) | certificates()), _ANSWERS),
    "wire.credentials.granted_untrusted",
    "wire.enrol._certificate_untrusted",
)
def _check_granted(case: tuple[bytes, dict[str, Any]]) -> None:
    der, answer = case
    made, key_pem, _, _ = _granted()
    try:
        found = granted_untrusted(
            der, peer_id="a1", roles={"worker"}, key_pem=key_pem, ca_pem=made.ca_pem, directory=Path("nowhere")
        )
    except ProtocolError:
        pass
    else:
        assert found.identity.peer_id == "a1"
        assert found.identity.not_after > time.time()
    assert isinstance(_certificate_untrusted(answer), bytes)
