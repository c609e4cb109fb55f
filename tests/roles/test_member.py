"""Verifiers and drafters as members of a cluster: they train nothing, find each other, and outlive their seed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import JobFailed, Refused, UserError
from roles.member import ServingMember, claim
from tests.roles.in_process import DEADLINE_S, HOST, Cluster, Peer
from tests.roles.test_cluster import done, small_profile
from wire.connection import Connection
from wire.handshake import dial, local_hello
from wire.messages import Hello, RefusalCode, Response
from wire.records import PeerInfo, ServingInfo
from wire.text_messages import DrafterAddress, DrafterFigures, Serving

SERVED = Serving("big", 50257, 1024, "ab12", "", 0)
DRAFTS = Serving("small", 50257, 0, "ab12", "", 0)


class Program:
    """What a member does in these tests.

    Attributes:
        runs: how often it was begun.
        heard: the drafters that a verifier was told of, by name, every time; ``news`` is set with each.
        callers: who was let in.
    """

    def __init__(self, role: str, *, loads: asyncio.Event | None = None, fails: Exception | None = None) -> None:
        self.role, self.served = role, SERVED if role == "verifier" else DRAFTS
        self.runs = 0
        self.heard: list[list[str]] = []
        self.news = asyncio.Event()
        self.callers: list[str] = []
        self.ended = self.waits = False
        self._loads, self._fails = loads, fails

    async def __call__(self, member: ServingMember) -> None:
        self.runs += 1
        self.member = member
        if self._loads is not None:
            await self._loads.wait()
        if self._fails is not None:
            raise self._fails
        member.answer("generate" if self.role == "verifier" else "draft", self._caller)
        member.serves(lambda: [self.served], is_waiting=lambda: self.waits)
        member.on_drafters(self._told)
        try:
            await asyncio.Event().wait()
        finally:
            self.ended = True

    def change(self, served: Serving) -> None:
        self.served = served

    def _told(self, drafters: tuple[DrafterAddress, ...]) -> None:
        self.heard.append([item.peer_id for item in drafters])
        self.news.set()

    async def told(self, *drafters: Peer) -> None:
        """Wait until these are the drafters that are there."""
        wanted = {peer.identity.peer_id for peer in drafters}
        async with asyncio.timeout(DEADLINE_S):
            while not self.heard or set(self.heard[-1]) != wanted:
                self.news.clear()
                await self.news.wait()

    async def _caller(self, connection: Connection, hello: Hello) -> None:
        self.callers.append(hello.peer_id)
        connection.send(Response(1, {"here": True}))
        await connection.flush(timeout_s=1)


async def listed(cluster: Cluster, fits: Callable[[list[ServingInfo]], bool]) -> list[ServingInfo]:
    """What is served, as soon as it fits."""
    known: dict[str, ServingInfo] = {}
    async with asyncio.timeout(DEADLINE_S), cluster.operator() as client:
        await client.request("subscribe")
        async for update in client.updates():
            for item in update.items:
                if update.topic == "serving":
                    known[item["id"]] = ServingInfo.from_map_untrusted(item)
                elif update.topic == "serving-gone":
                    known.pop(item["id"], None)
            if fits(list(known.values())):
                answer = await cluster.ask("serving.list")
                return [ServingInfo.from_map_untrusted(item) for item in answer["serving"]]
    raise AssertionError("the updates ended")


@asynccontextmanager
async def call(member: Peer, purpose: str, role: str, network: Any, peer_id: str) -> AsyncIterator[Connection]:
    hello = local_hello(peer_id=peer_id, name="caller", roles=[role], purpose=purpose)
    connection, _ = await dial(
        network, *member.address, hello, timeout_s=DEADLINE_S, expect_peer=member.identity.peer_id
    )
    try:
        yield connection
    finally:
        await connection.close()


# ------------------------------------------------------------------------------------------------------- as members


async def test_a_job_trains_on_the_worker_alone_while_the_others_are_listed(cluster: Cluster) -> None:
    verifier, drafter = Program("verifier"), Program("drafter")
    peers = [cluster.serve("verifier", verifier), cluster.serve("drafter", drafter)]
    await verifier.told(peers[1])
    job = await cluster.create(small_profile(job={"workers": 1}))
    worker = cluster.join()
    item = await cluster.job_until(job, done)
    assert item["members"] in ([], [worker.identity.peer_id])
    assert len(worker.engines) == 1
    infos = [PeerInfo.from_map_untrusted(each) for each in (await cluster.ask("peers.list"))["peers"]]
    found = {info.id: (info.roles, info.job, info.rank, info.model) for info in infos}
    assert found[peers[0].identity.peer_id] == (["verifier"], "", None, "big")
    assert found[peers[1].identity.peer_id] == (["drafter"], "", None, "small")
    assert found[worker.identity.peer_id][0] == ["worker"]
    views = await cluster.ask("jobs.views", job=job)
    named = {member for view in views["views"] for member in view["members"]}
    assert named == {worker.identity.peer_id}


async def test_verifier_that_lacks_workers_is_waiting(cluster: Cluster) -> None:
    verifier = Program("verifier")
    cluster.serve("verifier", verifier)
    await verifier.told()
    for verifier.waits, expected in ((True, "waiting"), (False, "idle")):
        async with asyncio.timeout(DEADLINE_S), cluster.operator() as client:
            await client.request("subscribe")
            async for update in client.updates():
                if update.topic == "peers" and any(item["state"] == expected for item in update.items):
                    break


async def test_verifiers_are_told_of_drafters_that_come_leave_and_die(cluster: Cluster) -> None:
    loads = asyncio.Event()
    verifier, drafters = Program("verifier"), [Program("drafter", loads=loads), Program("drafter"), Program("drafter")]
    cluster.serve("verifier", verifier)
    await verifier.told()
    one = cluster.serve("drafter", drafters[0])
    two = cluster.serve("drafter", drafters[1])
    await verifier.told(two)  # the first has said nothing yet
    loads.set()
    await verifier.told(one, two)
    late = Program("verifier")
    cluster.serve("verifier", late)
    await late.told(one, two)
    await one.leave()
    await verifier.told(two)
    await two.die()
    await verifier.told()
    await late.told()
    assert verifier.runs == 1
    assert verifier.member.drafters == ()


async def test_what_is_served_is_told_when_it_changes_and_gone_with_its_link(cluster: Cluster) -> None:
    verifier = Program("verifier")
    peer = cluster.serve("verifier", verifier)
    (info,) = await listed(cluster, lambda infos: len(infos) == 1)
    assert info == ServingInfo(
        "big",
        50257,
        1024,
        "ab12",
        id=f"{peer.identity.peer_id}/big",
        peer=peer.identity.peer_id,
        name=peer.identity.name,
        role="verifier",
        host=HOST,
        port=peer.address[1],
    )
    drafters = [DrafterFigures("d1", 0.75, 0.5)]
    busy = Serving("big", 50257, 1024, "ab12", "127.0.0.1:8000", 2, {"alpha": 0.75, "tokens_per_s": 31.5}, drafters)
    verifier.change(busy)
    (info,) = await listed(cluster, lambda infos: any(each.sessions for each in infos))
    assert (info.http, info.sessions, info.stats, info.drafters) == (busy.http, 2, busy.stats, drafters)
    (shown,) = (await cluster.ask("peers.list"))["peers"]
    assert (shown["model"], shown["sessions"], shown["roles"]) == ("big", 2, ["verifier"])
    await peer.leave()
    assert verifier.ended
    assert await listed(cluster, lambda infos: not infos) == []
    assert "left: its user stopped it" in str(await cluster.ask("events.list"))


async def test_they_work_on_without_their_seed_and_are_there_again_when_it_is_back(cluster: Cluster) -> None:
    verifier, drafter = Program("verifier"), Program("drafter")
    members = cluster.serve("verifier", verifier), cluster.serve("drafter", drafter)
    await verifier.told(members[1])
    await cluster.stop_seed()
    async with call(members[1], "draft", "verifier", cluster.network, "v") as connection:
        assert (await connection.expect(Response, timeout_s=DEADLINE_S)).result == {"here": True}
    assert verifier.member.drafters  # kept
    verifier.heard.clear()
    await cluster.start_seed(cluster.address[1])
    await verifier.told(members[1])
    assert len(await listed(cluster, lambda infos: len(infos) == 2)) == 2
    assert (verifier.runs, drafter.runs, verifier.ended) == (1, 1, False)
    assert [kind for _, kind, _ in members[0].told if kind in ("joined", "seed-lost")][:3] == [
        "joined",
        "seed-lost",
        "joined",
    ]


async def test_who_calls_is_let_in_when_the_model_is_there_and_for_one_purpose(cluster: Cluster) -> None:
    loads = asyncio.Event()
    drafter = Program("drafter", loads=loads)
    peer = cluster.serve("drafter", drafter)
    async with asyncio.timeout(DEADLINE_S):
        await peer.joined.wait()

    async def refused(purpose: str) -> Refused:
        with pytest.raises(Refused) as caught:
            async with call(peer, purpose, "verifier", cluster.network, "v"):
                pass
        assert caught.value.remedy
        return caught.value

    busy = await refused("draft")
    assert (busy.code, "loading its model" in busy.message) == (RefusalCode.BUSY, True)
    loads.set()
    await listed(cluster, lambda infos: len(infos) == 1)
    async with call(peer, "draft", "verifier", cluster.network, "v"):
        pass
    assert (await refused("generate")).code == RefusalCode.ROLE
    assert (await refused("ring")).code == RefusalCode.ROLE


async def test_a_program_that_cannot_go_on_ends_the_member_and_the_seed_hears_why(cluster: Cluster) -> None:
    peer = cluster.serve("drafter", Program("drafter", fails=JobFailed("the model is damaged")))
    with pytest.raises(JobFailed, match="the model is damaged"):
        await peer.task
    cluster.peers.remove(peer)
    peer.identity.release()
    assert "left: the model is damaged" in str(await cluster.ask("events.list"))


async def test_a_verifier_may_ask_who_is_there_and_nothing_more(cluster: Cluster) -> None:
    verifier, drafter = Program("verifier"), Program("drafter")
    members = cluster.serve("verifier", verifier), cluster.serve("drafter", drafter)
    await verifier.told(members[1])
    answer = await verifier.member.ask("peers.list", {})
    assert {item["id"] for item in answer["peers"]} == {peer.identity.peer_id for peer in members}
    assert len((await verifier.member.ask("serving.list", {}))["serving"]) == 2
    for member, method in ((verifier, "jobs.cancel"), (verifier, "peers.evict"), (drafter, "peers.list")):
        with pytest.raises(Refused) as caught:
            await member.member.ask(method, {})
        assert caught.value.code == "unknown-method"


# -------------------------------------------------------------------------------------------------------- encrypted


# --------------------------------------------------------------------------------------- slots of the state directory


def test_a_second_worker_takes_the_next_slot_and_a_restarted_one_its_own(tmp_path: Path) -> None:
    first = claim(RealDisk(), tmp_path, role="worker")
    second = claim(RealDisk(), tmp_path, role="worker", name="laptop")
    assert (first.directory.name, second.directory.name) == ("worker-1", "worker-2")
    assert first.peer_id != second.peer_id
    assert second.name == "laptop"
    first.release()
    again = claim(RealDisk(), tmp_path, role="worker")
    assert (again.peer_id, again.directory) == (first.peer_id, first.directory)
    for identity in (again, second):
        identity.release()


def test_a_slot_that_is_asked_for_and_in_use_is_refused(tmp_path: Path) -> None:
    holder = claim(RealDisk(), tmp_path, role="worker", slot=3)
    with pytest.raises(UserError, match=r"worker-3 .* is in use"):
        claim(RealDisk(), tmp_path, role="worker", slot=3)
    holder.release()


def test_a_damaged_peer_id_is_replaced(tmp_path: Path) -> None:
    first = claim(RealDisk(), tmp_path, role="worker")
    first.release()
    (first.directory / "peer-id").write_bytes(b"\xff\x00 not an id")
    again = claim(RealDisk(), tmp_path, role="worker")
    assert again.peer_id != first.peer_id
    again.release()
    once_more = claim(RealDisk(), tmp_path, role="worker")
    assert once_more.peer_id == again.peer_id
    once_more.release()


def test_a_lock_is_exclusive_and_ends_with_its_holder(tmp_path: Path) -> None:
    held = RealDisk().try_lock(tmp_path / "lock")
    assert held is not None
    assert RealDisk().try_lock(tmp_path / "lock") is None
    held.close()
    free = RealDisk().try_lock(tmp_path / "lock")
    assert free is not None
    free.close()
