"""Sessions in one process, over memory and over real TCP: operations, deaths, leaving."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from p2ptrain.core.errors import ConnectionLost, ProtocolError
from p2ptrain.lab.memory import MemoryNetwork
from ring.codecs import CODECS, codec_named
from ring.neighbours import RingBroken
from ring.session import RingSession
from tests.ring.local import RingMember, local_ring
from tests.wire.doubles import on_virtual_time
from wire.job_messages import StepMetrics
from wire.transport import TcpNetwork

AT_ONCE_S = 5.0  # generous for a slow machine, far below every deadline that could otherwise have ended a wait


async def everyone(members: list[RingMember], act: Callable[[RingSession], Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run ``act`` on every member's session at once; results in rank order."""
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        tasks = [group.create_task(act(member.session)) for member in members]
    return [task.result() for task in tasks]


# ---------------------------------------------------------------------------------------------------------- operations


@pytest.mark.parametrize("count", [1, 2, 3, 4])
async def test_every_operation_on_every_size_of_ring(count, network):
    draw = np.random.default_rng(count)
    numels = [0, 1, count, 1000]
    before = {numel: [draw.standard_normal(numel).astype(np.float32) for _ in range(count)] for numel in numels}

    async def act(session: RingSession) -> dict[int, bytes]:
        results = {}
        for numel in numels:
            buffer = before[numel][session.rank].copy()
            await session.submit(buffer)
            results[numel] = buffer.tobytes()
        assert await session.all_gather(b"member %d" % session.rank) == [b"member %d" % rank for rank in range(count)]
        assert await session.all_gather(b"") == [b""] * count
        await session.barrier()
        return results

    async with local_ring(count, network) as members:
        results = await everyone(members, act)
        assert all(result == results[0] for result in results), "not the same bits"
        for numel in numels:
            total = np.frombuffer(results[0][numel], np.float32)
            assert np.allclose(total, np.sum(before[numel], axis=0), rtol=1e-5, atol=1e-5)
        assert [member.session.rank for member in members] == list(range(count))
        assert not any(member.session.broken.done() for member in members)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("each", [0, 5, 4000])  # 4000: more than a small operation, in many sub-chunks
async def test_operations_in_place_that_do_not_wait(count, each, network):
    draw = np.random.default_rng(count)
    sources = draw.integers(-9, 9, (count, count * each))

    async def act(session: RingSession) -> None:
        mine, rank = sources[session.rank].copy(), session.rank
        into, gathered, told = np.empty(each, mine.dtype), np.zeros((count, each), mine.dtype), mine.copy()
        largest, gathered[rank] = mine.copy(), mine[:each]
        await asyncio.gather(
            session.reduce_scatter(mine, into, reduction=np.minimum),
            session.gather(gathered.reshape(-1)),
            session.broadcast(told, count - 1),
            session.submit(largest, reduction=np.maximum),
        )
        assert np.array_equal(into, sources.min(0)[rank * each : (rank + 1) * each])
        assert np.array_equal(mine, sources[rank]), "the contribution stays as it is"
        assert np.array_equal(gathered, sources[:, :each])
        assert np.array_equal(told, sources[-1])
        assert np.array_equal(largest, sources.max(0))

    async with local_ring(count, network, sub_chunk_bytes=0) as members:
        await everyone(members, act)


async def test_a_root_may_leave_after_its_broadcast(network):
    async with local_ring(3, network, sub_chunk_bytes=0) as members:
        buffers = [np.full(100_000, member.session.rank) for member in members]
        first = members[0].session.broadcast(buffers[0], 0)
        second = members[1].session.broadcast(buffers[1], 0)
        await asyncio.sleep(0)
        assert not first.done()
        third = members[2].session.broadcast(buffers[2], 0)
        async with asyncio.timeout(AT_ONCE_S):
            await first
            members[0].session.close()
            await asyncio.gather(second, third)
        assert not any(buffer.any() for buffer in buffers)


@pytest.mark.parametrize("count", [2, 3])
async def test_operations_follow_one_another_without_being_waited_for(count, network):
    """Each member submits at its own pace; the order is all that they share."""
    numels = [3000, 1, 700, 0, 5000]

    async def act(session: RingSession) -> list[float]:
        buffers = [np.full(numel, session.rank + turn, np.float64) for turn, numel in enumerate(numels)]
        futures = []
        for buffer in buffers:
            futures.append(session.submit(buffer))
            for _ in range(3 * session.rank):  # turns of the loop: the others are ahead
                await asyncio.sleep(0)
        tokens = await session.all_gather(bytes([session.rank]))
        assert tokens == [bytes([rank]) for rank in range(count)]
        assert all(future.done() for future in futures), "an operation overtook another"
        await asyncio.gather(*futures)
        return [float(buffer.min()) for buffer in buffers if buffer.size]

    async with local_ring(count, network) as members:
        ranks = sum(range(count))
        wanted = [float(ranks + count * turn) for turn, numel in enumerate(numels) if numel]
        assert await everyone(members, act) == [wanted] * count


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("codec", sorted(CODECS))
@pytest.mark.parametrize("count", [2, 3, 5])
async def test_every_codec_leaves_the_same_bits_everywhere_and_loses_nothing_for_ever(count, codec, streams):
    """What is in no member's result is in the members' residuals: together they are the sum, to rounding."""
    numel = 10_007
    before = [np.random.default_rng(rank).standard_normal(numel).astype(np.float32) for rank in range(count)]

    async def act(session: RingSession) -> tuple[bytes, np.ndarray]:
        buffer, coder = before[session.rank].copy(), codec_named(codec)
        residual = np.zeros(numel, np.float32) if coder.feedback else None
        await session.submit(buffer, codec=coder, residual=residual)
        return buffer.tobytes(), np.zeros(numel, np.float32) if residual is None else residual

    async with local_ring(count, MemoryNetwork(), sub_chunk_bytes=4096, streams=streams) as members:
        results = await everyone(members, act)
    assert all(result == results[0][0] for result, _ in results), "not the same bits"
    total = np.sum(before, axis=0, dtype=np.float64)
    error = np.frombuffer(results[0][0], np.float32) - total
    assert np.linalg.norm(error) < np.linalg.norm(total), "worse than nothing"
    if codec_named(codec).feedback:
        assert np.allclose(error + np.sum([kept for _, kept in results], axis=0), 0, atol=1e-4)


# -------------------------------------------------------------------------------------------------------------- deaths

OPERATIONS: dict[str, Callable[[RingSession], Awaitable[Any]]] = {
    "all-reduce": lambda session: session.submit(np.zeros(1000, np.float32), patience_s=3600),
    "all-gather": lambda session: session.all_gather(bytes(200), patience_s=3600),
    "barrier": lambda session: session.barrier(patience_s=3600),
}


@pytest.mark.parametrize("operation", list(OPERATIONS))
@pytest.mark.parametrize("count", [2, 3, 4])
async def test_a_death_in_an_operation_breaks_every_member_at_once(operation, count, network):
    victim = 0
    async with local_ring(count, network) as members:
        others = [member for rank, member in enumerate(members) if rank != victim]
        tasks = [asyncio.ensure_future(OPERATIONS[operation](member.session)) for member in others]
        for _ in range(3):
            await asyncio.sleep(0)  # let them begin
        members[victim].die()
        async with asyncio.timeout(AT_ONCE_S):
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            causes = [await member.session.broken for member in others]
        assert all(isinstance(end, ConnectionLost) for end in ends), ends
        assert causes[0].suspect == "a"  # its right neighbour
        assert causes[-1].suspect in ("a", others[-2].peer_id if count > 2 else "a")
        assert all(member.session.broken.result() is cause for member, cause in zip(others, causes, strict=True))


async def test_a_cancelled_operation_breaks_the_ring_and_leaves_the_memory_alone(network):
    async with local_ring(3, network) as members:
        buffer = np.zeros(1000)
        task = members[0].session.submit(buffer)
        others = [member.session.submit(np.ones(1000)) for member in members[1:2]]
        await asyncio.sleep(0)
        task.cancel()
        async with asyncio.timeout(AT_ONCE_S):
            with pytest.raises(asyncio.CancelledError):
                await task
            for other in others:
                with pytest.raises(ConnectionLost):
                    await other
            await members[2].session.broken
        assert members[0].session.broken.result().suspect == ""
        assert "cancelled an operation" in members[0].session.broken.result().cause.message


async def test_a_neighbour_that_speaks_nonsense_breaks_the_ring(network):
    async with local_ring(2, network) as members:
        members[0].session.links.neighbours[1].beat.send(StepMetrics("job", 1, 1, {}))
        async with asyncio.timeout(AT_ONCE_S):
            broken = await members[1].session.broken
        assert broken.suspect == "a"
        assert isinstance(broken.cause, ProtocolError)
        assert "StepMetrics, which is not allowed" in broken.cause.message


@on_virtual_time
async def test_invalid_bytes_name_their_sender_before_they_are_passed_on():
    """c's bytes are invalid: a has them first, and says so of c; b never gets them."""

    def check(part):
        if part == b"c":
            raise ProtocolError("c is no letter")

    async with local_ring(3, MemoryNetwork()) as members:
        parts = [member.session.all_gather(member.peer_id.encode(), check=check) for member in members]
        ends = await asyncio.gather(*parts, return_exceptions=True)
        assert [type(end) for end in ends[:2]] == [ProtocolError, ConnectionLost]
        assert {(await member.session.broken).suspect for member in members[:2]} == {"c"}
        assert (await members[1].session.broken).beside == "a"


# ------------------------------------------------------------------------------------------------------------- leaving


async def test_leaving_breaks_the_others_at_once_and_says_why(network):
    async with local_ring(3, network) as members:
        members[0].session.close("a new view was announced")
        async with asyncio.timeout(AT_ONCE_S):
            broken = [await member.session.broken for member in members]
            await members[0].session.links.wait_closed()
        assert broken[0].suspect == ""
        assert broken[0].cause.message == "this member left the ring: a new view was announced"
        assert broken[1].suspect == "a"
        with pytest.raises(ConnectionLost, match="left the ring"):
            await members[0].session.barrier()
        members[0].session.close()  # twice is no harm


@pytest.mark.parametrize("count", [2, 3, 4])
async def test_who_leaves_after_the_last_operation_does_not_spoil_it_for_the_others(count, network):
    """Everyone closes the moment its own part is done; still everyone gets its result, time after time."""
    for _ in range(5):
        async with local_ring(count, network) as members:

            async def act(session: RingSession) -> list[bytes]:
                tokens = await session.all_gather(bytes([session.rank]) * 64)
                session.close("done")
                return tokens

            results = await everyone(members, act)
            assert results == [[bytes([rank]) * 64 for rank in range(count)]] * count


async def test_who_has_left_is_not_missed_while_its_last_bytes_are_still_to_be_read():
    async with local_ring(2, TcpNetwork()) as members:
        a, b = (member.session for member in members)
        left = b.links.neighbours[0]
        left.bulks[0]._transport.pause_reading()  # b is slow to read what a has sent
        unfinished = asyncio.create_task(b.all_gather(b"b"))
        async with asyncio.timeout(AT_ONCE_S):
            assert await a.all_gather(b"a") == [b"a", b"b"]
            a.close("done")
            await left.beat.closed.wait()
            assert not b.broken.done()
            left.bulks[0]._transport.resume_reading()
            assert await unfinished == [b"a", b"b"]
            broken = await b.broken
        assert broken.suspect == "a"
        assert broken.cause.message.endswith("it left the ring")


async def test_memory_is_given_back_the_moment_an_operation_is_broken_off():
    """What its owner writes there afterwards must never reach a neighbour as if it were the operation's."""
    async with local_ring(2, MemoryNetwork()) as members:
        a, b = (member.session for member in members)
        bulk = b.links.neighbours[0].bulks[0]
        bulk._transport.pause_reading()
        sent, received = np.zeros(1000), np.zeros(1000)
        tasks = [session.submit(buffer) for session, buffer in ((a, sent), (b, received))]
        await asyncio.sleep(0)  # let them begin
        assert a.links.neighbours[1].bulks[0]._transport.get_write_buffer_size(), "nothing of the buffer is on its way"
        a.close()
        sent[:] = 666.0
        bulk._transport.resume_reading()
        async with asyncio.timeout(AT_ONCE_S):
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end) for end in ends] == [ConnectionLost, ConnectionLost]
        assert not received.any()


async def test_a_ring_that_ends_with_another_one_names_who_was_lost_there():
    """Members of a split model are in two rings: whoever leaves this one because of the other is not to blame."""
    async with local_ring(4, TcpNetwork()) as members:
        elsewhere = RingBroken("c", ConnectionLost("lost c"), "a")  # neighbours in the other ring, not in this one
        assert members[0].session.links.follow_loss(elsewhere)
        async with asyncio.timeout(AT_ONCE_S):
            broken = [await members[rank].session.broken for rank in (0, 1, 3)]
        assert [(item.suspect, item.beside) for item in broken] == [("c", "a")] * 3
        assert not members[0].session.links.follow_loss(RingBroken("z", ConnectionLost("lost z"), "a"))
