"""How a ring forms: late, absent, stale and wrong neighbours; connections that wait for their view."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from p2ptrain.core.errors import ConnectionLost, DeadlineExceeded, Refused
from p2ptrain.lab.memory import MemoryNetwork
from p2ptrain.lab.ring_member import HOST, local_view
from ring.links import Inbound, Topology
from ring.view import View
from tests.ring.local import RingMember, listening
from tests.wire.doubles import on_virtual_time
from wire.connection import Connection
from wire.handshake import dial, local_hello
from wire.messages import Hello, RefusalCode

AT_ONCE_S = 5.0  # generous for a slow machine, far below every deadline that could otherwise have ended a wait


def ring_hello(peer_id: str, channel: object = "bulk", *, job: str = "job", generation: int = 1) -> Hello:
    capabilities = {} if channel is None else {"channel": channel}
    return local_hello(
        peer_id=peer_id,
        name=peer_id,
        roles=["worker"],
        purpose="ring",
        capabilities=capabilities,
        job=job,
        generation=generation,
    )


async def dial_member(member: RingMember, hello: Hello) -> Connection:
    port = member.server.address[1]
    connection, _ = await dial(member.world.network, HOST, port, hello, timeout_s=AT_ONCE_S)
    return connection


# -------------------------------------------------------------------------------------------------------------- forming


@on_virtual_time
async def test_a_neighbour_that_hears_of_the_view_later_is_waited_for():
    async with listening("abc", MemoryNetwork()) as (members, view):
        early = [asyncio.create_task(member.form(view)) for member in members[:2]]
        await asyncio.sleep(9)
        assert not any(task.done() for task in early)
        await members[2].form(view)
        await asyncio.gather(*early)
        await asyncio.gather(*(member.session.barrier() for member in members))


@on_virtual_time
async def test_a_neighbour_that_is_too_busy_is_dialled_again():
    async with listening("ab", MemoryNetwork()) as (members, view):
        members[1].inbound = Inbound(max_held=1, hold_s=3)
        await members[1].server.close()
        await members[1].listen(port=view.members[1].port)
        stranger = await dial_member(members[1], ring_hello("x"))
        early = asyncio.create_task(members[0].form(view))
        await asyncio.sleep(2)
        assert [problem.code for problem in members[1].problems if isinstance(problem, Refused)]
        await asyncio.gather(early, members[1].form(view))
        await asyncio.sleep(1)
        assert stranger.closed.is_set()


@on_virtual_time
async def test_a_neighbour_that_never_dials_is_named():
    async with listening("ab", MemoryNetwork()) as (members, view):
        with pytest.raises(DeadlineExceeded, match="left neighbour b has not connected within 10 s"):
            await members[0].form(view)
        await asyncio.sleep(1)
        assert not members[1].inbound._held, "the connections of a ring that did not form were left open"


@on_virtual_time
async def test_another_peer_at_the_neighbours_address_is_not_taken_for_it():
    async with listening("ax", MemoryNetwork()) as (members, view):
        ports = [member.port for member in view.members]
        with pytest.raises(DeadlineExceeded, match="another peer, x, answers"):
            await members[0].form(local_view(dict(zip("ab", ports, strict=True))))


async def test_a_death_while_the_others_wait_for_a_member_is_noticed_at_once(network):
    async with listening("abc", network) as (members, view):
        # c has opened its connections to a and accepted those of b, and dies before it has formed.
        dialled = [await dial_member(members[0], ring_hello("c", channel)) for channel in ("bulk", "beat")]
        tasks = [asyncio.create_task(member.form(view, timeout_s=3600)) for member in members[:2]]
        async with asyncio.timeout(AT_ONCE_S):
            taken = [
                await members[2].inbound.take("job", 1, "b", channel, timeout_s=60) for channel in ("bulk", "beat")
            ]
            for _ in range(2):  # b sends its own byte, then that of a: both wait for c's
                arrived = asyncio.Event()
                taken[0].post(memoryview(bytearray(1)), generation=1, stream=1, done=arrived.set)
                await arrived.wait()
            for connection in dialled + taken:
                connection.abort()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end) for end in ends] == [ConnectionLost, ConnectionLost], ends


async def test_an_older_view_is_refused_and_a_newer_one_is_not(network):
    async with listening("ab", network) as (members, view):
        members[1].inbound.expect("job", 5)
        with pytest.raises(Refused, match="generation 4 is over, the job is at generation 5") as refusal:
            await members[0].form(replace(view, generation=4))
        assert refusal.value.code == RefusalCode.STALE_GENERATION
        await asyncio.gather(*(member.form(replace(view, generation=6)) for member in members))
        with pytest.raises(Refused, match="generation 5 is over, the job is at generation 6"):
            await dial_member(members[0], ring_hello("b", generation=5))


# -------------------------------------------------------------------------------------------------------------- inbound


@pytest.mark.parametrize(
    "hello",
    [
        ring_hello("a", None),
        ring_hello("a", "heal"),
        ring_hello("a", 7),
        ring_hello("a", job=""),
        ring_hello("a", generation=0),
    ],
)
def test_a_hello_that_names_no_place_in_a_ring_is_refused(hello):
    assert Inbound().decide(hello).code == RefusalCode.NOT_A_NEIGHBOUR


@on_virtual_time
async def test_a_connection_is_held_until_its_view_arrives_and_not_for_ever():
    member = RingMember("b", MemoryNetwork())
    member.inbound = Inbound(hold_s=30)
    await member.listen()
    first = await dial_member(member, ring_hello("a", generation=1))
    await asyncio.sleep(29)
    taken = await member.inbound.take("job", 1, "a", "bulk", timeout_s=1)
    second = await dial_member(member, ring_hello("a", generation=2))
    await asyncio.sleep(31)
    assert second.closed.is_set()
    assert not first.closed.is_set(), "what was taken is not the holder's to close"
    assert not taken.closed.is_set()
    first.abort()
    await member.stop()


@on_virtual_time
async def test_the_number_of_held_connections_is_bounded():
    member = RingMember("b", MemoryNetwork())
    member.inbound = Inbound(max_held=2)
    await member.listen()
    held = [await dial_member(member, ring_hello(peer_id)) for peer_id in "xy"]
    await asyncio.sleep(1)
    with pytest.raises(Refused, match="2 ring connections wait") as refusal:
        await dial_member(member, ring_hello("z"))
    assert refusal.value.code == RefusalCode.BUSY
    again = await dial_member(member, ring_hello("x"))  # who has a place may renew it
    await asyncio.sleep(1)
    assert [connection.closed.is_set() for connection in (*held, again)] == [True, False, False]
    waiting = asyncio.create_task(member.inbound.take("job", 1, "z", "bulk", timeout_s=60))
    await asyncio.sleep(1)
    expected = await dial_member(member, ring_hello("z"))  # and who is waited for needs none
    await waiting
    for connection in (held[1], again, expected):
        connection.abort()
    await member.stop()


# ---------------------------------------------------------------------------------------- who may take which place here


def ring_view(*peer_ids: str, generation: int = 1) -> View:
    return replace(local_view(dict.fromkeys(peer_ids, 1)), generation=generation)


def test_a_member_that_is_not_the_left_neighbour_is_refused_once_the_view_is_known():
    inbound = Inbound()
    inbound.announced(ring_view("a", "b", "c", generation=4), Topology.RING, "a")
    inbound.expect("job", 4)  # the same view, told by the session: what is known of it stays known
    assert inbound.decide(ring_hello("a", generation=4)) is None
    refusal = inbound.decide(ring_hello("c", generation=4))
    assert (refusal.code, "c is not the left neighbour" in refusal.message) == (RefusalCode.NOT_A_NEIGHBOUR, True)
    assert inbound.decide(ring_hello("c", generation=5)) is None, "where it stands in the next view is not known yet"
    inbound.announced(ring_view("c", "b", "a", generation=5), Topology.RING, "c")
    assert inbound.decide(ring_hello("c", generation=5)) is None
    assert inbound.decide(ring_hello("a", generation=5)).code == RefusalCode.NOT_A_NEIGHBOUR


def test_a_place_in_a_chain_is_judged_apart_from_the_one_in_the_ring():
    """Of one view; a channel's name says which is meant."""
    inbound, view = Inbound(), ring_view("a", "b", "c", generation=4)
    inbound.announced(view, Topology.RING, "a")
    assert inbound.decide(ring_hello("c", "chain-bulk", generation=4)) is None, "its chain is not known yet"
    inbound.announced(view, Topology.CHAIN, "c")
    assert inbound.decide(ring_hello("c", "chain-bulk", generation=4)) is None
    assert inbound.decide(ring_hello("a", "bulk", generation=4)) is None
    for peer_id, channel, wanted in (("a", "chain-bulk", "previous stage"), ("c", "bulk", "left neighbour")):
        refusal = inbound.decide(ring_hello(peer_id, channel, generation=4))
        assert refusal.code == RefusalCode.NOT_A_NEIGHBOUR
        assert f"{peer_id} is not the {wanted} here" in refusal.message
    inbound.announced(view, Topology.CHAIN, "")
    assert inbound.decide(ring_hello("c", "chain-beat", generation=4)) is not None, "nobody stands before the first"
    assert inbound.decide(ring_hello("c", "chain-beat", generation=5)) is None, "the next view is not known yet"
    inbound.announced(ring_view("a", "b", generation=3), Topology.CHAIN, "z")
    assert inbound.decide(ring_hello("c", "chain-beat", generation=4)) is not None, "an older view changes nothing"


@on_virtual_time
async def test_one_peer_holds_one_place_whatever_it_claims():
    member = RingMember("b", MemoryNetwork())
    member.inbound = Inbound(max_held=2)
    await member.listen()
    greedy = [
        await dial_member(member, ring_hello("x", channel, job=job, generation=generation))
        for job, generation in (("job", 1), ("job", 2), ("other", 1), ("third", 9))
        for channel in ("bulk", "bulk-1", "beat")
    ]
    await asyncio.sleep(1)
    assert [connection.closed.is_set() for connection in greedy] == [True] * 9 + [False] * 3
    honest = await dial_member(member, ring_hello("y"))
    for connection in (honest, *greedy):
        connection.abort()
    await member.stop()
