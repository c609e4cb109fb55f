"""Tickets on the command line: made, listed, given in place of an address, and found where a seed left them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2ptrain.cluster.access import Caller, open_operator, reach, read_target, shown_address
from p2ptrain.core.errors import Refused, UserError
from p2ptrain.core.world import ProtocolFactory
from roles.seed.authority import ROLES
from tests.roles.in_process import Cluster
from wire.address import Ticket, local_ticket_path
from wire.transport import TcpNetwork

from .conftest import Command

SAMPLE = Ticket("10.0.0.7", 7337, "worker", "00112233aabb", bytes(range(16)), bytes(range(32)))
RECORD = {"id": "00112233aabb", "role": "worker", "kind": "first", "host": "10.0.0.7", "created_at": 1.0,
          "expires_at": 2e9, "uses": None, "used": 3, "state": "open"}  # fmt: skip


# -------------------------------------------------------------------------------------------------------- the commands


def test_a_new_ticket_is_alone_on_standard_output(command: Command, fake_seed: Any) -> None:
    fake_seed.answers["tickets.new"] = {"ticket": RECORD, "text": str(SAMPLE)}
    how = ["--role", "operator", "--expires", "90m", "--uses", "2", "--host", "seed.example.org"]
    outcome = command("ticket", "new", *how)
    assert (outcome.code, outcome.out) == (0, f"{SAMPLE}\n")
    assert "keep it secret" in outcome.err
    params = {"role": "operator", "expires_s": 5400.0, "uses": 2, "host": "seed.example.org"}
    assert fake_seed.asked == [("tickets.new", params)]
    assert command("ticket", "new", "--json").json == {"ticket": RECORD, "text": str(SAMPLE)}
    assert fake_seed.asked[-1] == ("tickets.new", {"role": "worker", "expires_s": 604_800.0})


@pytest.mark.parametrize(
    ("option", "refusal"),
    [
        (("--role", "verifer"), "did you mean verifier? use worker, operator, seed, verifier, drafter"),
        (("--expires", "7"), "--expires '7' is not a duration"),
    ],
)
def test_invalid_option_is_refused_before_the_seed_is_asked(
    command: Command, fake_seed: Any, option: tuple[str, str], refusal: str
) -> None:
    outcome = command("ticket", "new", *option)
    assert (outcome.code, fake_seed.asked, refusal in outcome.err) == (2, [], True)


def test_the_list_shows_how_each_one_stands(command: Command, fake_seed: Any) -> None:
    fake_seed.answers["tickets.list"] = {"tickets": [RECORD, RECORD | {"expires_at": None, "uses": 5}]}
    out = command("ticket", "list").out
    assert "3 of any" in out
    assert "3 of 5" in out
    assert "never" in out
    assert command("ticket", "list", "--json").json == {"tickets": fake_seed.answers["tickets.list"]["tickets"]}


def test_revoke_rotate_and_evict_say_what_was_done(command: Command, fake_seed: Any) -> None:
    fake_seed.answers["tickets.revoke"] = {"ticket": RECORD | {"state": "revoked"}}
    fake_seed.answers["tickets.rotate"] = {"ticket": RECORD, "text": str(SAMPLE)}
    fake_seed.answers["peers.evict"] = {"evicted": "abc", "name": "laptop"}
    assert command("ticket", "revoke", "0011", "--yes").out == "ticket 00112233aabb is revoked\n"
    assert command("ticket", "rotate", "--yes").out == f"{SAMPLE}\n"
    assert command("peers", "evict", "laptop", "--yes").out == "laptop (abc) is evicted\n"
    assert [method for method, _ in fake_seed.asked] == ["tickets.revoke", "tickets.rotate", "peers.evict"]


# ------------------------------------------------------------------------------------------------- what a person gives


def test_what_a_person_gives_is_an_address_a_ticket_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text(f"{SAMPLE}\n")
    assert read_target("host:9") == ("host", 9)
    assert read_target(str(SAMPLE)) == read_target(f"@{path}") == SAMPLE
    assert shown_address(SAMPLE) == "10.0.0.7:7337"
    wrapped = f"{str(SAMPLE)[:40]}\n{str(SAMPLE)[40:]}"
    assert read_target(wrapped) == SAMPLE, "as a terminal breaks it"


BODY = str(SAMPLE).partition("/")[2]


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        ([f"10.0.0.7:7337{BODY}"], "no slash"),
        ([BODY], "no slash"),
        ([f"10.0.0.7:7337/{BODY[:50]}"], "50 characters follow the slash, expected 76"),
        ([f"10.0.0.7:7337/{BODY[:40]}", BODY[40:]], "too many arguments"),
        ([f"10.0.0.7:7337/{BODY[:40]}!{BODY[41:]}"], "invalid characters after the slash"),
        ([f"10.0.0.7:7337/{BODY[:40]},{BODY[41:]}"], "40 characters follow the slash"),
        ([f"10.0.0.7,{BODY}"], "no slash"),
        ([f"a b:c/{BODY}"], "the text before the slash is not an address"),
        ([f"@{SAMPLE}"], "leave the @ out"),
        (["--advertise", str(SAMPLE)], "is not an address"),
    ],
)
def test_a_garbled_ticket_is_refused_with_the_part_that_is_wrong_and_without_its_secret(
    command: Command, arguments: list[str], wrong: str
) -> None:
    outcome = command("join", *arguments)
    said = outcome.err + outcome.out
    assert outcome.code == 2
    assert wrong in said
    assert not [at for at in range(len(BODY) - 12) if BODY[at : at + 12] in said]


@pytest.mark.parametrize("code", ["ticket-expired", "ticket-revoked", "ticket-unknown", "ticket-used", "bad-proof"])
def test_a_ticket_that_the_seed_does_not_accept_is_a_wrong_argument(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str
) -> None:
    async def enrol(*_: Any, **__: Any) -> None:
        raise Refused(code, "no", remedy="r")

    monkeypatch.setattr("wire.enrol.enrol", enrol)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    outcome = command("jobs", "list", "--seed", str(dataclasses.replace(SAMPLE, role="operator")))
    assert (outcome.code, outcome.err) == (2, "error: no\n  → r\n")


def test_a_file_is_named_with_a_sign_before_it(command: Command, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(str(SAMPLE))
    outcome = command("peers", "list", "--seed", str(tmp_path / "t.txt"))
    assert (outcome.code, f"@{tmp_path / 't.txt'}" in outcome.err) == (2, True)


def test_a_file_that_is_none(command: Command, tmp_path: Path) -> None:
    for name, content in (("missing", None), ("binary", b"\xff\xfe\x00"), ("zeros", bytes(300)), ("nul\0", None)):
        if content:
            (tmp_path / name).write_bytes(content)
        outcome = command("peers", "list", "--seed", f"@{tmp_path / name}")
        says = "printable" if name == "zeros" else "cannot read"
        assert (outcome.code, says in outcome.err) == (2, True), outcome.err
    (tmp_path / "huge").write_text("a" * 5_000_000)
    outcome = command("peers", "list", "--seed", f"@{tmp_path / 'huge'}")
    assert (outcome.code, "longer than a ticket can be" in outcome.err) == (2, True)
    assert len(outcome.err) < 500 + len(str(tmp_path))


# ------------------------------------------------------------------------------------------------------ finding the way


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    made = Cluster(tmp_path / "state", TcpNetwork(), encrypted=True)
    await made.start_seed()
    yield made
    await made.close()


def caller(tmp_path: Path, role: str = "worker", *states: Path, peer_id: str = "") -> Caller:
    return Caller(role, tmp_path / "kept", states, peer_id)


async def test_on_the_seeds_machine_its_address_is_enough(cluster: Cluster, tmp_path: Path) -> None:
    for role in ("worker", "operator", "verifier", "drafter"):
        who = caller(tmp_path / role, role, tmp_path / "elsewhere", cluster.root)
        first = await reach(cluster.address, who, TcpNetwork())
        again = await reach(cluster.address, who, TcpNetwork())
        assert first.peer_id == again.peer_id != ""
        assert first.member is not None
        assert role in first.member.credentials.identity.roles
    assert cluster.address[0] == "127.0.0.1"


async def test_what_a_ticket_gave_is_found_by_the_address_and_by_the_ticket(cluster: Cluster, tmp_path: Path) -> None:
    ticket = Ticket.parse_untrusted((await cluster.ask("tickets.new", uses=1))["text"])
    who = caller(tmp_path, peer_id="p1")
    with pytest.raises(UserError, match="no saved access") as wanted:
        await reach(cluster.address, who, TcpNetwork())
    assert "p2ptrain ticket new` prints one" in wanted.value.remedy
    first = await reach(ticket, who, TcpNetwork())
    assert (await reach(ticket, who, TcpNetwork())).peer_id == first.peer_id == "p1"
    assert (await reach(cluster.address, who, TcpNetwork())).peer_id == "p1"
    with pytest.raises(UserError, match="no saved access"):
        await reach(cluster.address, caller(tmp_path, peer_id="p2"), TcpNetwork())
    with pytest.raises(Refused, match="is used up"):
        await reach(ticket, caller(tmp_path, peer_id="p2"), TcpNetwork())


async def test_what_a_ticket_gave_is_good_for_its_role_alone(cluster: Cluster, tmp_path: Path) -> None:
    tickets = {role: Ticket.parse_untrusted((await cluster.ask("tickets.new", role=role))["text"]) for role in ROLES}
    for role, ticket in tickets.items():
        access = await reach(ticket, caller(tmp_path / role, role), TcpNetwork())
        assert access.member is not None
        assert access.member.credentials.identity.roles == {role}
        assert (await reach(cluster.address, caller(tmp_path / role, role), TcpNetwork())).peer_id == access.peer_id
        for other in set(ROLES) - {role}:
            with pytest.raises(UserError, match="no saved access") as wanted:
                await reach(cluster.address, caller(tmp_path / role, other), TcpNetwork())
            with pytest.raises(UserError, match="only a ticket for") as refusal:
                await reach(ticket, caller(tmp_path / role, other), TcpNetwork())
            assert (f"add --role {role}" in refusal.value.remedy) == (
                other == "worker" and role in ("verifier", "drafter")
            )
            asked = "new`" if other == "worker" else f"--role {other}"
            assert asked in wanted.value.remedy
            assert asked in refusal.value.remedy


async def test_a_certificate_that_ends_soon_is_not_relied_on(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = Ticket.parse_untrusted((await cluster.ask("tickets.new"))["text"])
    await reach(ticket, caller(tmp_path), TcpNetwork())
    real = time.time
    monkeypatch.setattr("p2ptrain.cluster.access.time.time", lambda: real() + 23.5 * 3600)
    with pytest.raises(UserError, match="no saved access"):
        await reach(cluster.address, caller(tmp_path), TcpNetwork())
    monkeypatch.setattr("p2ptrain.cluster.access.time.time", lambda: real() + 25 * 3600)
    with pytest.raises(UserError, match="no saved access"):
        await reach(cluster.address, caller(tmp_path), TcpNetwork())
    assert not list((tmp_path / "kept").iterdir()), "and one that ended is not kept"


async def test_an_address_elsewhere_without_saved_access_is_not_dialled(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no saved access to 192\.0\.2\.9:7337") as caught:
        await reach(("192.0.2.9", 7337), caller(tmp_path), TcpNetwork())
    assert "check the address, or paste a ticket" in caught.value.remedy


async def test_a_plain_seed_is_found_plain_whatever_another_has_left(cluster: Cluster, tmp_path: Path) -> None:
    left = local_ticket_path(cluster.root, "worker").read_text()
    plain = Cluster(tmp_path / "plain", TcpNetwork())
    await plain.start_seed()
    stale = local_ticket_path(tmp_path / "plain", "worker")
    stale.parent.mkdir(parents=True)
    stale.write_text(left.replace(f":{cluster.address[1]}/", f":{plain.address[1]}/"))
    access = await reach(plain.address, caller(tmp_path, "worker", tmp_path / "plain"), TcpNetwork())
    assert (access.member, access.peer_id) == (None, "")
    await plain.close()


async def test_a_new_ticket_mends_what_a_revoked_one_left(cluster: Cluster, tmp_path: Path) -> None:
    first, second = [(await cluster.ask("tickets.new", role="operator"))["text"] for _ in range(2)]
    access, client = await open_operator(first, state=tmp_path / "me")
    await client.close()
    await cluster.ask("tickets.revoke", id=Ticket.parse_untrusted(first).id)
    for target in (first, cluster.address):
        with pytest.raises(Refused, match="was revoked"):
            await open_operator(target, state=tmp_path / "me")
    again, client = await open_operator(second, state=tmp_path / "me")
    await client.request("cluster.info")
    await client.close()
    assert again.peer_id != access.peer_id


class Rebound(TcpNetwork):
    """A name that leads to this machine when it is looked up, and elsewhere when it is dialled."""

    async def connect(self, host: str, port: int, factory: ProtocolFactory, *, timeout_s: float) -> None:
        await super().connect(host, port, lambda: Elsewhere(factory()), timeout_s=timeout_s)


class Elsewhere:
    """A protocol whose transport says that its other end is on another machine."""

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol

    def __getattr__(self, name: str) -> Any:
        return getattr(self._protocol, name)

    def connection_made(self, transport: Any) -> None:
        told = transport.get_extra_info
        transport = SimpleNamespace(**{name: getattr(transport, name) for name in dir(transport) if name[0] != "_"})
        transport.get_extra_info = lambda name, default=None: (
            ("192.0.2.9", 7337) if name == "peername" else told(name, default)
        )
        self._protocol.connection_made(transport)


async def test_nobody_elsewhere_is_trusted_without_encryption(cluster: Cluster, tmp_path: Path) -> None:
    plain = Cluster(tmp_path / "plain", TcpNetwork())
    await plain.start_seed()
    address = ("localhost", plain.address[1])
    access = await reach(address, caller(tmp_path), TcpNetwork())
    assert (access.member, access.host) == (None, "127.0.0.1"), "the name is not asked again"
    with pytest.raises(UserError, match="no saved access"):
        await reach(address, caller(tmp_path), Rebound())
    await plain.close()
