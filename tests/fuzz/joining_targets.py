"""What machines nearby answer to a newcomer: that they are seeds, and shares of a code."""

from __future__ import annotations

import ipaddress
from functools import cache

from hypothesis import strategies as st

from p2ptrain.cluster.discovery import MAX_ADDRESSES, MAX_NAME_CHARS, found_seed_untrusted
from wire.address import parse_address
from wire.join_code import CodeAgreement

from .engine import target
from .strategies import TEXT, WHOLE, mostly, mutated

_NAMES = mutated(st.sampled_from([b"studio", "Anna’s größter".encode(), b"a" * 64, b"\x1b[2J", "\u202egnp".encode()]))
_TXT = st.fixed_dictionaries(
    {},
    optional={
        b"name": mostly(_NAMES, st.none()),
        b"pin": mostly(mutated(st.just(b"0a" * 32), most=1), st.none()),
        b"version": mostly(st.just(b"19"), mutated(st.just(b"19"))),
        b"more": st.binary(max_size=255),
    },
)
_ADDRESS = st.sampled_from(["192.168.1.20", "fd00::1", "fe80::1%3", "127.0.0.1", "224.0.0.251", "::", "0.0.0.0"])
_ADDRESSES = st.lists(mostly(_ADDRESS, TEXT), max_size=3) | st.lists(st.just("10.0.0.1"), max_size=1000)


@target(
    "found-seeds",
    st.tuples(_TXT, _ADDRESSES, mostly(st.just(7337), WHOLE | st.none())),
    "p2ptrain.cluster.discovery.found_seed_untrusted",
)
def _check_found(case: tuple[dict[bytes, bytes | None], list[str], int | None]) -> None:
    found = found_seed_untrusted(*case)
    assert 1 <= len(found.name) <= MAX_NAME_CHARS
    assert str(found).isprintable()
    assert 1 <= len(found.addresses) <= MAX_ADDRESSES
    for address in map(ipaddress.ip_address, found.addresses):
        assert not address.is_loopback
        assert not address.is_multicast
    if not found.addresses[0].startswith("fe80::"):
        host = f"[{found.addresses[0]}]" if ":" in found.addresses[0] else found.addresses[0]
        assert parse_address(f"{host}:{found.port}") == (found.addresses[0], found.port)


@cache
def _shares() -> list[bytes]:
    return [CodeAgreement("123456", bytes(32), newcomer=newcomer).share for newcomer in (True, False)]


@target(
    "code-shares",
    st.deferred(lambda: mutated(st.sampled_from(_shares()), most=2)) | st.binary(min_size=33, max_size=33),
    "wire.join_code.CodeAgreement.finish_untrusted",
    weight=20,
)
def _check_share(case: bytes) -> None:
    agreement = CodeAgreement("123456", bytes(32), newcomer=False)
    agreement.finish_untrusted(case)
    assert len(agreement.newcomer_proof) == 32
