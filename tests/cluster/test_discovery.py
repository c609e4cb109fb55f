"""Which seed of a network a person gets, whatever its machines answer. Networks of namespaces: ``tests/e2e``."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

import pytest

from p2ptrain.cluster import discovery
from p2ptrain.cluster.access import Caller, is_own, reach_one, read_targets
from p2ptrain.cluster.console import Console
from p2ptrain.cluster.discovery import FoundSeed, choose_seed, found_seed_untrusted
from p2ptrain.core.errors import ProtocolError, Unreachable, UserError
from tests.roles.in_process import Cluster
from wire.messages import PROTOCOL_VERSION
from wire.transport import TcpNetwork

PIN = "ab" * 32
TXT: dict[bytes, bytes | None] = {b"name": b"studio", b"pin": PIN.encode(), b"version": b"%d" % PROTOCOL_VERSION}


def found(name: str = "studio", address: str = "192.168.1.20") -> FoundSeed:
    return FoundSeed(name, 7337, (address,), PIN, PROTOCOL_VERSION)


def test_an_answer_is_read() -> None:
    assert found_seed_untrusted(TXT, ["192.168.1.20"], 7337) == found()
    linked = found_seed_untrusted(TXT, ["169.254.1.2", "fe80::1", "fe80::2%3"], 7337)
    assert linked.addresses == ("169.254.1.2", "fe80::2%3")


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
        ({}, ["127.0.0.1", "::1", "0.0.0.0", "224.0.0.1", "fe80::1"], 7337),
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


async def test_the_addresses_that_answer_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(tmp_path / "seed", TcpNetwork())
    await cluster.start_seed()
    port = cluster.address[1]
    seed = FoundSeed("no-such-host", port, ("127.0.0.2", "127.0.0.1"), PIN, PROTOCOL_VERSION)

    async def find_seeds() -> list[FoundSeed]:
        return [seed]

    monkeypatch.setattr(discovery, "find_seeds", find_seeds)
    try:
        assert await discovery.discover(seed.name, Console()) == f"127.0.0.1:{port}"
    finally:
        await cluster.close()
    assert f"found no-such-host at 127.0.0.1:{port}" in capsys.readouterr().err
    targets = read_targets(await discovery.discover(seed.name, Console()) or "")
    assert targets == [("127.0.0.2", port), ("127.0.0.1", port)]
    with pytest.raises(Unreachable, match=r"127\.0\.0\.2"):
        await reach_one(targets, Caller("worker", tmp_path / "kept", []), TcpNetwork())


async def test_an_address_is_not_own_where_its_family_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_ipv6(family: int, kind: int) -> socket.socket:
        assert family == socket.AF_INET6
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr("p2ptrain.cluster.access.socket.socket", without_ipv6)
    assert not await is_own("2001:db8::1", 7337)
