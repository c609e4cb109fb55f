"""An encrypted cluster in one process, over real TLS on the loopback: who is let in, who is not, and who is let go."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import wire.enrol
from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import ConnectionLost, Refused
from p2ptrain.core.world import LoopClock
from p2ptrain.lab.stand_in import StandInEngine
from roles.seed.authority import ROLES
from tests.roles.in_process import DEADLINE_S, Cluster, Peer
from tests.roles.test_cluster import at, done, small_profile, state_of
from tests.wire.doubles import Owner
from wire.address import Ticket
from wire.client import SeedClient
from wire.connection import Connection
from wire.credentials import CERTIFICATE_LIFETIME_S
from wire.enrol import RunMembership, enrol
from wire.handshake import dial, local_hello, local_welcome
from wire.messages import (
    EnrolGranted,
    EnrolOffer,
    EnrolRequest,
    EventNotice,
    RefusalCode,
    Request,
    Response,
)
from wire.transport import TcpNetwork


@pytest.fixture
async def secure(tmp_path: Path) -> AsyncIterator[Cluster]:
    """An encrypted cluster whose seed runs."""
    made = Cluster(tmp_path, TcpNetwork(), encrypted=True)
    await made.start_seed()
    yield made
    await made.close()


async def refusal(of: Awaitable[object]) -> str:
    """The code of the refusal, which names cause and remedy."""
    with pytest.raises(Refused) as caught:
        await of
    assert caught.value.message
    assert caught.value.remedy
    return caught.value.code


async def control(cluster: Cluster, member: RunMembership) -> SeedClient:
    return await SeedClient.connect(member.network, *cluster.address, name="x", peer_id=member.peer_id)


async def event_log(cluster: Cluster) -> list[str]:
    return [f"{event['kind']}: {event['text']}" for event in (await cluster.ask("events.list"))["events"]]


async def until(true: Callable[[], bool]) -> None:
    """For what another task of this process does next: no time is waited for, only its turn."""
    async with asyncio.timeout(DEADLINE_S):
        while not true():  # noqa: ASYNC110 - it is told nowhere
            await asyncio.sleep(0.01)


async def new_ticket(cluster: Cluster, **params: Any) -> Ticket:
    return Ticket.parse_untrusted((await cluster.ask("tickets.new", **params))["text"])


# ------------------------------------------------------------------------------------------------------------ training


async def test_an_encrypted_ring_trains(secure: Cluster) -> None:
    job = await secure.create(small_profile())
    peers = [secure.join() for _ in range(3)]
    await secure.job_until(job, done)
    assert len({state_of(peer) for peer in peers}) == 1


async def test_an_evicted_worker_goes_and_the_job_goes_on_without_it(secure: Cluster) -> None:
    gate = asyncio.Event()
    loop = asyncio.get_running_loop()

    def slowly(step: int, index: int) -> None:
        if step >= 3:
            asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(DEADLINE_S)

    def build(profile: Any) -> StandInEngine:
        return StandInEngine(profile, on_micro_batch=slowly)

    job = await secure.create(small_profile(job={"steps": 12, "workers": 3}))
    peers = [secure.join(build) for _ in range(3)]
    await secure.job_until(job, at(3))
    victim = peers[1]
    assert (await secure.ask("peers.evict", peer=victim.identity.name))["evicted"] == victim.identity.peer_id
    with pytest.raises(Refused, match="was evicted"):
        await asyncio.wait_for(asyncio.shield(victim.task), DEADLINE_S)
    secure.peers.remove(victim)
    victim.identity.release()
    states = {peer["id"]: peer["state"] for peer in (await secure.ask("peers.list"))["peers"]}
    assert states[victim.identity.peer_id] == "evicted"
    gate.set()
    await secure.job_until(job, done)
    assert [12 in peer.steps for peer in (peers[0], victim, peers[2])] == [True, False, True]
    assert state_of(peers[0]) == state_of(peers[2])
    assert any("evicted: an operator evicted" in line for line in await event_log(secure))
    await secure.restart_seed()
    again = secure.join(slot=2)  # the same worker with its local ticket: it stays out after a restart, too
    assert again.identity.peer_id == victim.identity.peer_id
    assert await refusal(again.task) == "evicted"
    secure.peers.remove(again)
    again.identity.release()


# ----------------------------------------------------------------------------------------------------------- enrolment


async def test_nobody_takes_the_name_of_another(secure: Cluster) -> None:
    ticket = await new_ticket(secure)
    await secure.member(ticket, "victim")
    directory = secure.root / "thief"
    stolen = enrol(secure.network, ticket, peer_id="victim", directory=directory, disk=RealDisk(), timeout_s=DEADLINE_S)
    assert await refusal(stolen) == "duplicate-peer"
    honest = await secure.member(ticket, "honest")
    hello = local_hello(peer_id="victim", name="x", roles=["worker"], purpose="peer", port=1)
    answer = dial(honest.network, *secure.address, hello, timeout_s=DEADLINE_S)
    assert await refusal(answer) == RefusalCode.IDENTITY
    seed_id = (await secure.ask("cluster.info"))["cluster"]["cluster_id"]
    assert await refusal(secure.member(ticket, seed_id)) == "duplicate-peer"


async def test_a_proof_serves_once(secure: Cluster) -> None:
    """A proof that was overheard is for another nonce."""
    from wire.address import proof
    from wire.credentials import authority_context, new_key_and_request
    from wire.tls import TlsDialler

    ticket = await new_ticket(secure)
    member = await secure.member(ticket)
    dialler = TlsDialler(secure.network, authority_context(member.credentials.ca_pem))
    _, csr = new_key_and_request("p9")
    hello = local_hello(peer_id="p9", name="p9", roles=["worker"], purpose="enrol")
    nonces = []
    for attempt in range(2):
        connection, _ = await dial(dialler, *secure.address, hello, timeout_s=DEADLINE_S)
        nonces.append((await connection.expect(EnrolOffer, timeout_s=DEADLINE_S)).nonce)
        if attempt == 1:
            connection.send(EnrolRequest(ticket.id, csr, proof(ticket.secret, nonces[0], csr)))
            with pytest.raises(Refused, match="the secret does not match"):
                await connection.expect(EnrolGranted, timeout_s=DEADLINE_S)
        await connection.close()
    assert nonces[0] != nonces[1]


async def test_a_ticket_for_a_plain_seed_and_a_plain_call_to_an_encrypted_one(tmp_path: Path, secure: Cluster) -> None:
    plain = Cluster(tmp_path / "plain", TcpNetwork())
    await plain.start_seed()
    misdirected = dataclasses.replace(await new_ticket(secure), port=plain.address[1])
    assert await refusal(secure.member(misdirected)) == RefusalCode.NOT_ENCRYPTED
    call = SeedClient.connect(TcpNetwork(), *secure.address, name="x")
    assert await refusal(call) == RefusalCode.TLS_REQUIRED
    for method in ("tickets.new", "tickets.list", "tickets.revoke", "tickets.rotate"):
        assert await refusal(plain.ask(method, id="a")) == RefusalCode.NOT_ENCRYPTED
    await plain.close()


# ------------------------------------------------------------------------------------------------- what may whom


async def test_a_worker_that_asks_like_an_operator_gets_nothing(secure: Cluster) -> None:
    """On the control link that it has, without asking for another purpose; and its certificate is of no use stolen."""
    worker, victim = await secure.member(secure.ticket("worker")), await secure.member(secure.ticket("worker"))
    connection = await as_worker(worker, secure)
    await connection.expect(EventNotice, timeout_s=DEADLINE_S)  # why it does not train
    methods = ["jobs.list", "jobs.cancel", "tickets.new", "tickets.list", "peers.evict", "subscribe", "links.measure"]
    for number, method in enumerate(methods, 1):
        connection.send(Request(number, method, {"id": "a", "peer": victim.peer_id, "role": "operator"}))
        answer = await connection.expect(Response, timeout_s=DEADLINE_S)
        assert (answer.id, answer.error_code, answer.result) == (number, "unknown-method", {})
    await secure.ask("peers.evict", peer=worker.peer_id)
    with pytest.raises(Refused, match="was evicted"):
        await connection.expect(Response, timeout_s=DEADLINE_S)
    await connection.close()
    assert await refusal(as_worker(worker, secure)) == "evicted"
    again = secure.member(secure.ticket("worker"), worker.peer_id)
    assert await refusal(again) == "evicted"


async def as_worker(member: RunMembership, cluster: Cluster) -> Connection:
    """A control link, from somebody who answers when he is dialled back."""
    async with Owner(local_welcome(peer_id=member.peer_id, name="x", wall=0.0)).listening(member.network) as owner:
        port = owner.address[1]
        hello = local_hello(peer_id=member.peer_id, name="x", roles=["worker"], purpose="peer", port=port)
        connection, _ = await dial(member.network, *cluster.address, hello, timeout_s=DEADLINE_S, expect_role="seed")
        return connection


async def test_a_revoked_ticket_ends_what_came_of_it_and_nothing_else(secure: Cluster) -> None:
    ticket = await new_ticket(secure, role="operator")
    mine, other = await secure.member(ticket), await secure.member(secure.ticket("operator"))
    client, stays = await control(secure, mine), await control(secure, other)
    await secure.ask("tickets.revoke", id=ticket.id[:6])
    with pytest.raises(ConnectionLost, match="was revoked"):
        await anext(client.updates())
    assert await refusal(control(secure, mine)) == "ticket-revoked"
    await stays.request("cluster.info")
    await stays.close()
    await client.close()


async def test_rotated_tickets_let_nobody_new_in_and_members_stay(secure: Cluster) -> None:
    old = secure.tickets[-1]
    member, operator = await secure.member(old), await secure.member(secure.ticket("operator"))
    answer = await secure.ask("tickets.rotate")
    assert await refusal(secure.member(old)) == "ticket-revoked"
    client = await control(secure, operator)
    await client.close()
    await secure.member(Ticket.parse_untrusted(answer["text"]))
    await secure.member(secure.ticket("worker"))  # this machine's own was replaced with the others
    assert member.peer_id in json.loads((secure.root / "seed/authority/tickets.json").read_text())["members"]


# ------------------------------------------------------------------------------------------------- neighbours, renewal


class Ahead(LoopClock):
    """A wall clock that is ahead of the machine's."""

    def __init__(self, by_s: float) -> None:
        self._by_s = by_s

    def wall(self) -> float:
        return super().wall() + self._by_s


async def test_a_worker_renews_at_half_life_and_the_next_connection_has_the_new_one(
    secure: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewed: list[RunMembership] = []
    serials: list[int] = []
    real = RunMembership.renew

    async def renew(self: RunMembership, ask: Any) -> None:
        monkeypatch.setattr(wire.enrol, "HALF_LIFE_S", CERTIFICATE_LIFETIME_S / 2)  # this once
        serials.append(self.credentials.identity.serial)
        await real(self, ask)
        renewed.append(self)

    monkeypatch.setattr(wire.enrol, "HALF_LIFE_S", 0.0)
    monkeypatch.setattr(RunMembership, "renew", renew)
    first = secure.join()
    await until(lambda: bool(renewed))
    old = secure.root / "members" / first.identity.peer_id
    member = renewed[0]
    assert member.credentials.directory == old
    other = await secure.member(secure.ticket("worker"))
    async with Owner(local_welcome(peer_id=other.peer_id, name="other", wall=0.0)).listening(other.network) as owner:
        hello = local_hello(peer_id=member.peer_id, name="x", roles=["worker"], purpose="ring")
        connection, _ = await dial(member.network, *owner.address, hello, timeout_s=5, expect_peer=other.peer_id)
        identity = owner.served[0].ends.identity
        assert identity is not None
        assert identity.serial == member.credentials.identity.serial
        assert len(serials) == 1
        assert serials[0] != identity.serial
        await connection.close()
    assert not first.task.done(), "the link that is up lives on"


async def test_clocks_may_be_an_hour_off(secure: Cluster) -> None:
    member = await secure.member(secure.ticket("worker"))
    for by_s, due in ((-3600.0, False), (3600.0, False), (13 * 3600.0, True)):
        again = RunMembership(secure.network, member.credentials, RealDisk(), Ahead(by_s))
        assert again.due is due


# ----------------------------------------------------------------------------------------------------------- no secrets


async def test_no_secret_is_in_any_event_record_or_file_but_the_tickets(secure: Cluster, tmp_path: Path) -> None:
    peers: list[Peer] = [secure.join()]
    made = [await new_ticket(secure), await new_ticket(secure, role="operator", uses=1)]
    await secure.member(made[0])
    await refusal(secure.member(dataclasses.replace(made[0], pin=bytes(32))))
    listed = json.dumps(await secure.ask("tickets.list")) + json.dumps(await secure.ask("events.list"))
    await secure.ask("tickets.revoke", id=made[1].id)
    told = "".join(map(str, peers[0].told)) + listed + "".join(await event_log(secure))
    await secure.stop_seed()
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}  # noqa: ASYNC240
    allowed = {"tickets.json", *(f"local-{role}.ticket" for role in ROLES)}
    everything = told.encode() + b"".join(data for path, data in files.items() if path.name not in allowed)
    tickets = [*made, *secure.tickets, *map(secure.ticket, ROLES)]
    for ticket in tickets:
        for form in forms_of(ticket):
            assert form not in everything
    assert any(form in files[tmp_path / "seed/authority/tickets.json"] for form in forms_of(made[0])), "it can fail"


def forms_of(ticket: Ticket) -> list[bytes]:
    import base64

    secret = ticket.secret
    shown = str(ticket).partition("/")[2]
    return [
        secret,
        secret.hex().encode(),
        base64.b64encode(secret)[:20],
        base64.urlsafe_b64encode(secret)[:20],
        shown[12:30].encode(),
        repr(secret).encode(),
    ]
