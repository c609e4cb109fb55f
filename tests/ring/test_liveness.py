"""Silence, beats and patience, on virtual time: hours pass in milliseconds and every time is exact."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from p2ptrain.core.errors import ConnectionLost, DeadlineExceeded
from p2ptrain.lab.memory import MemoryNetwork, VirtualClockLoop, run_virtual
from ring.session import RingSession
from tests.ring.local import listening, local_ring
from tests.wire.doubles import on_virtual_time
from wire.emulate import EmulatedNetwork, preset_named


def now() -> float:
    return asyncio.get_running_loop().time()


@on_virtual_time
async def test_beats_keep_an_idle_ring_alive():
    async with local_ring(3, MemoryNetwork(), heartbeat_s=5.0, death_s=15.0) as members:
        await asyncio.sleep(3600)
        assert not any(member.session.broken.done() for member in members)
        await asyncio.gather(*(member.session.barrier() for member in members))


@on_virtual_time
async def test_a_pulled_cable_is_a_death_after_death_s_on_both_ends():
    network = MemoryNetwork()
    async with listening("abc", [network.at(name) for name in "abc"], hosts=True) as (members, view):
        await asyncio.gather(*(member.form(view, heartbeat_s=5.0, death_s=15.0) for member in members))
        await asyncio.sleep(12.5)  # the last beat that is heard goes out at 10 s
        formed_at = now() - 12.5
        network.silence("a", "b")
        ends = {}
        for member in members:
            member.session.broken.add_done_callback(lambda _, peer_id=member.peer_id: ends.setdefault(peer_id, now()))
        a, b, c = [await member.session.broken for member in members]
        assert ends["a"] == ends["b"] == pytest.approx(formed_at + 10.0 + 15.0, abs=0.01)
        assert (a.suspect, b.suspect) == ("b", "a")
        assert c.suspect in ("a", "b"), "c hears of it from whoever closes first"
        assert "sent nothing for 15.0 s" in a.cause.message
        network.mend("a", "b")


@on_virtual_time
async def test_all_round_the_ring_the_dead_one_is_named_as_fast_as_the_wires_are():
    """Eight members, 40 ms apart: the news goes both ways round, and nobody waits for any time to be up."""
    preset = preset_named("transcontinental")
    network = EmulatedNetwork(MemoryNetwork(), preset, seed=3)
    async with local_ring(8, network, heartbeat_s=5.0, death_s=15.0) as members:
        await asyncio.sleep(30)
        died_at, heard_at = now(), {}
        for member in members:
            member.session.broken.add_done_callback(
                lambda _, peer_id=member.peer_id: heard_at.setdefault(peer_id, now())
            )
        members[3].die()
        broken = {member.peer_id: await member.session.broken for member in members}
        for rank, peer_id in enumerate("abcdefgh"):
            hops = min((rank - 3) % 8, (3 - rank) % 8)
            if hops:
                assert broken[peer_id].suspect == "d", broken[peer_id].cause.message
                assert broken[peer_id].beside in ("c", "e")
                late_s = heard_at[peer_id] - died_at
                assert late_s <= hops * (preset.delay_s + preset.jitter_s) + 1e-3, (peer_id, late_s)


@on_virtual_time
async def test_a_member_that_was_asleep_itself_does_not_blame_its_neighbours():
    async with local_ring(3, MemoryNetwork(), heartbeat_s=5.0, death_s=15.0) as members:
        await asyncio.sleep(7)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualClockLoop)
        loop._now += 300.0  # the process was stopped: time went on, and nothing ran
        await asyncio.sleep(60)
        assert not any(member.session.broken.done() for member in members)


@on_virtual_time
async def test_no_progress_breaks_the_ring_and_names_the_neighbour():
    async with local_ring(3, MemoryNetwork()) as members:
        between = asyncio.create_task(members[1].session.barrier(patience_s=60))
        with pytest.raises(DeadlineExceeded, match="lost the left neighbour c: sent no part of the barrier for 30 s"):
            await members[0].session.barrier(patience_s=30)
        with pytest.raises(ConnectionLost, match="a lost c: sent no part"):
            await between
        assert (await members[1].session.broken).suspect == "c", "not a, who only told of it"
        assert (await members[2].session.broken).suspect in ("a", "b")


@on_virtual_time
async def test_who_waits_with_less_is_no_suspect_and_who_passes_nothing_on_is():
    """c takes part in the barrier and sends nothing. a, whose left neighbour it is, has the longest patience."""
    async with local_ring(3, MemoryNetwork()) as members:
        members[2].session._lanes[0]._send_ready = lambda: None
        waits = [member.session.barrier(patience_s=50 - 20 * rank) for rank, member in enumerate(members[:2])]
        withheld = asyncio.create_task(members[2].session.barrier(patience_s=3600))
        await asyncio.gather(*waits, withheld, return_exceptions=True)
        assert [(await member.session.broken).suspect for member in members[:2]] == ["c", "c"]


@on_virtual_time
async def test_progress_renews_the_patience():
    async with local_ring(2, MemoryNetwork()) as members:
        for number in range(1, 4):
            task = asyncio.create_task(members[0].session.barrier(patience_s=30))
            await asyncio.sleep(29)
            assert not task.done()
            assert members[0].session.waited_s == pytest.approx(29 * number, abs=0.01), "the wait under way counts"
            await members[1].session.barrier(patience_s=30)
            await task
            assert members[0].session.waited_s == pytest.approx(29 * number, abs=0.01)
            assert members[1].session.waited_s == pytest.approx(0, abs=0.01)


@on_virtual_time
async def test_a_neighbour_that_takes_no_bytes_breaks_the_ring():
    async with local_ring(2, MemoryNetwork()) as members:
        a, b = (member.session for member in members)
        b.links.neighbours[0].bulks[0]._transport.pause_reading()
        other = asyncio.create_task(b.all_gather(bytes(100), patience_s=3600))
        with pytest.raises(DeadlineExceeded, match="right neighbour b: took no part of the all-gather for 30 s"):
            await a.all_gather(bytes(100), patience_s=30)
        await asyncio.gather(other, return_exceptions=True)


@pytest.mark.parametrize("preset", ["wifi", "transcontinental", "lossy"])
def test_a_ring_over_a_bad_link_is_slow_and_right(preset):
    """Sends are on their way for long, and borrowed for as long: a buffer given back too early would show."""

    async def act(session: RingSession) -> list[bytes]:
        results = []
        for turn in range(3):
            buffer = np.random.default_rng([turn, session.rank]).standard_normal(20_000).astype(np.float32)
            await session.submit(buffer)
            results.append(buffer.tobytes())
            buffer[:] = np.nan
        return results

    async def main() -> None:
        network = EmulatedNetwork(MemoryNetwork(), preset_named(preset), seed=1)
        async with local_ring(3, network, sub_chunk_bytes=4096) as members:
            results = await asyncio.gather(*(act(member.session) for member in members))
            assert results[0] == results[1] == results[2]
            for turn, result in enumerate(results[0]):
                parts = [np.random.default_rng([turn, rank]).standard_normal(20_000) for rank in range(3)]
                assert np.allclose(np.frombuffer(result, np.float32), np.sum(parts, axis=0), atol=1e-5)

    run_virtual(main())
