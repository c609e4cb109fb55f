"""Which seed of a network a person gets, whatever its machines answer. Networks of namespaces: ``tests/e2e``."""

from __future__ import annotations

import asyncio
import socket

import pytest

from p2ptrain.cluster.discovery import FoundSeed, _answering_address, choose_seed, found_seed_untrusted
from p2ptrain.core.errors import ProtocolError, UserError
from wire.messages import PROTOCOL_VERSION

PIN = "ab" * 32
TXT: dict[bytes, bytes | None] = {b"name": b"studio", b"pin": PIN.encode(), b"version": b"%d" % PROTOCOL_VERSION}


def found(name: str = "studio", address: str = "192.168.1.20") -> FoundSeed:
    return FoundSeed(name, 7337, (address,), PIN, PROTOCOL_VERSION)


def test_an_answer_is_read() -> None:
    assert found_seed_untrusted(TXT, ["192.168.1.20"], 7337) == found()


@pytest.mark.parametrize(
    ("changes", "addresses", "port"),
    [
        ({b"name": b"a\x1b[2Jb"}, ["10.0.0.1"], 7337),
        ({b"name": "\u202eoidus".encode()}, ["10.0.0.1"], 7337),
        ({b"name": b"a\nb"}, ["10.0.0.1"], 7337),
        ({b"name": b"x" * 65}, ["10.0.0.1"], 7337),
        ({b"name": b""}, ["10.0.0.1"], 7337),
        ({b"name": None}, ["10.0.0.1"], 7337),
        ({b"name": b"\xff"}, ["10.0.0.1"], 7337),
        ({b"pin": b"zz"}, ["10.0.0.1"], 7337),
        ({b"version": b"9" * 5000}, ["10.0.0.1"], 7337),
        ({}, ["10.0.0.1"], 0),
        ({}, ["10.0.0.1"], None),
        ({}, [], 7337),
        ({}, ["127.0.0.1", "::1", "0.0.0.0", "224.0.0.1"], 7337),
        ({}, ["evil.example"], 7337),
        ({}, ["10.0.0.1;rm -rf"], 7337),
    ],
)
def test_a_hostile_answer_is_no_seed(changes: dict[bytes, bytes | None], addresses: list[str], port: int) -> None:
    with pytest.raises(ProtocolError):
        found_seed_untrusted(TXT | changes, addresses, port)


def test_one_seed_is_taken_and_several_are_listed() -> None:
    other, twin = found("attic", "192.168.1.30"), found(address="192.168.1.66")
    assert choose_seed([found()], "") == found()
    assert choose_seed([found(), other], "attic") == other
    with pytest.raises(UserError, match=r"2 seeds .*studio at 192\.168\.1\.20:7337.*attic at") as caught:
        choose_seed([found(), other], "")
    assert "p2ptrain join NAME" in caught.value.remedy
    with pytest.raises(UserError, match=r"2 seeds called studio .*192\.168\.1\.66"):
        choose_seed([found(), other, twin], "studio")
    with pytest.raises(UserError, match=r"no seeds called cellar .*: studio at 192"):
        choose_seed([found()], "cellar")
    with pytest.raises(UserError, match="no seed was found") as caught:
        choose_seed([], "")
    assert "p2ptrain seed --host 0.0.0.0" in caught.value.remedy


async def test_the_address_that_answers_is_used() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        seed = FoundSeed("studio", server.getsockname()[1], ("127.0.0.2", "127.0.0.1"), PIN, PROTOCOL_VERSION)
        assert await asyncio.wait_for(_answering_address(seed), 5) == "127.0.0.1"
    seed = FoundSeed("studio", seed.port, ("127.0.0.1", "127.0.0.2"), PIN, PROTOCOL_VERSION)
    assert await asyncio.wait_for(_answering_address(seed), 5) == "127.0.0.1", "what joins then reports the failure"
