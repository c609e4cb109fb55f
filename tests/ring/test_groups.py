"""Rings that gather small arrays in groups: the right bytes for all, and the right suspect when somebody is lost."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.core.errors import ProtocolError
from p2ptrain.core.world import Network
from p2ptrain.lab.memory import MemoryNetwork, run_virtual
from ring import collectives
from ring.collectives import gather_hops, owned_range
from tests.ring.local import RingMember, local_ring
from tests.ring.test_collectives import Member, play
from tests.sim.votes import view_and_vote_s
from tests.wire.doubles import on_virtual_time
from wire.emulate import LinkPreset

COUNT = 11  # 5 groups, of 2 and 3 members


@pytest.fixture(autouse=True)
def small_rings_have_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "GROUPED_FROM", 8)


def leaders_of(n: int, groups: int) -> list[int]:
    return [owned_range(group, groups, n)[0] for group in range(groups)]


@given(st.integers(2, 80).flatmap(lambda n: st.tuples(st.just(n), st.integers(2, n))), st.integers(0, 2**32))
def test_every_member_gets_every_element_in_any_order_of_arrivals(size: tuple[int, int], seed: int) -> None:
    (n, groups), chance = size, random.Random(seed)
    arrays = [np.full(n, -1) for _ in range(n)]
    for rank, array in enumerate(arrays):
        array[rank] = rank
    play([Member(array, collectives.collect(rank, n, groups)) for rank, array in enumerate(arrays)], chance)
    leading = [arrays[rank] for rank in leaders_of(n, groups)]
    play([Member(array, collectives.exchange(group, n, groups)) for group, array in enumerate(leading)], chance)
    play([Member(array, collectives.spread(rank, n, groups)) for rank, array in enumerate(arrays)], chance)
    assert all((array == np.arange(n)).all() for array in arrays)


@pytest.mark.parametrize("count", [7, 8, 9, COUNT])
async def test_every_operation_gives_every_member_the_same(count: int, network: Network) -> None:
    async with local_ring(count, network, sub_chunk_bytes=0) as members:

        async def act(member: RingMember) -> None:
            session = member.session
            tokens = [bytes([rank]) * 100 for rank in range(count)]
            total, mine = np.full(3, 2.0**session.rank), np.zeros(count, np.int64)
            mine[session.rank] = session.rank
            # Several at once, small ones and a large one.
            large = np.ones(1 << 16)
            pending = [session.submit(total), session.submit(large), session.gather(mine)]
            assert await session.all_gather(tokens[session.rank]) == tokens
            await asyncio.gather(*pending)
            assert total.tolist() == [2.0**count - 1] * 3
            assert (large == count).all()
            assert mine.tolist() == list(range(count))
            root = np.array([float(session.rank)])
            await session.broadcast(root, 3)
            assert root[0] == 3
            await session.barrier()

        await asyncio.gather(*(act(member) for member in members))
        leaders = sum(member.session._leaders is not None for member in members)
        assert leaders == (members[0].session.view.groups if count >= 8 else 0)


def die(member: RingMember) -> None:
    member.die()
    leaders = member.session._leaders
    for neighbour in leaders.links.neighbours if leaders is not None else ():
        neighbour.abort()


@pytest.mark.parametrize("victim", range(COUNT))
@on_virtual_time
async def test_all_name_the_dead_member(victim: int) -> None:
    async with local_ring(COUNT, MemoryNetwork(delay_s=lambda *_: 0.02), sub_chunk_bytes=0) as members:
        others = [member for rank, member in enumerate(members) if rank != victim]
        tasks = [asyncio.ensure_future(member.session.all_gather(bytes(100))) for member in others]
        await asyncio.sleep(1)
        die(members[victim])
        async with asyncio.timeout(10):
            await asyncio.gather(*tasks, return_exceptions=True)
            causes = [await member.session.broken for member in others]
        assert {cause.suspect for cause in causes} == {members[victim].peer_id}


@pytest.mark.parametrize("victim", range(COUNT))
@on_virtual_time
async def test_all_name_the_hop_at_which_nothing_comes(victim: int) -> None:
    network = MemoryNetwork(delay_s=lambda *_: 0.02)
    async with local_ring(COUNT, network, sub_chunk_bytes=0, heartbeat_s=0.5, death_s=2.0) as members:
        others = [member for rank, member in enumerate(members) if rank != victim]
        await asyncio.gather(
            *(member.session.all_gather(bytes(100), patience_s=30) for member in others), return_exceptions=True
        )
        causes = [await member.session.broken for member in others]
        assert all(members[victim].peer_id in (cause.suspect, cause.beside) for cause in causes)
        assert asyncio.get_running_loop().time() < 32


@on_virtual_time
async def test_who_leaves_after_the_last_operation_spoils_it_for_nobody() -> None:
    """Each member closes at the moment when its own part is done."""
    for _ in range(5):
        network = MemoryNetwork(delay_s=lambda *_: random.Random(1).random())
        async with local_ring(COUNT, network, sub_chunk_bytes=0) as members:

            async def act(member: RingMember) -> list[bytes]:
                tokens = await member.session.all_gather(bytes([member.session.rank]) * 64)
                member.session.close("done")
                return tokens

            results = await asyncio.gather(*(act(member) for member in members))
            assert results == [[bytes([rank]) * 64 for rank in range(COUNT)]] * COUNT


@pytest.mark.parametrize("liar", [0, 1, 2])
@on_virtual_time
async def test_invalid_bytes_name_their_sender(liar: int) -> None:
    def check(data: bytes) -> None:
        if data == b"lie!":
            raise ProtocolError("a lie")

    async with local_ring(COUNT, MemoryNetwork(), sub_chunk_bytes=0) as members:

        def gather(rank: int, member: RingMember) -> Any:
            data = b"lie!" if rank == liar else b"true"
            return member.session.all_gather(data, check=check if rank != liar else None)

        await asyncio.gather(*(gather(*item) for item in enumerate(members)), return_exceptions=True)
        assert (await members[liar + 1].session.broken).suspect == members[liar].peer_id


def test_a_vote_of_many_takes_the_hops_of_its_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    hop_s, count = 0.1, 72
    monkeypatch.setattr(collectives, "GROUPED_FROM", 64)
    _, vote_s = run_virtual(view_and_vote_s(count, LinkPreset("far", hop_s)))
    assert vote_s == pytest.approx(gather_hops(count) * hop_s, rel=0.02)
    assert gather_hops(count) == 6 + 11 + 5
