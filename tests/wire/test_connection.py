"""Connections on every stage: frames both ways, buffers, back-pressure, and how they end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from unittest.mock import Mock

import numpy as np
import pytest

from p2ptrain.core.errors import ConnectionLost, DeadlineExceeded, P2PTrainError, ProtocolError, Refused
from p2ptrain.core.world import Network
from tests.wire.doubles import in_memory, on_every_stage
from wire.connection import INBOX_FRAMES, SEND_LIMIT_BYTES, Connection
from wire.frame import HEADER, encode_bulk_header
from wire.messages import PROTOCOL_VERSION, EventNotice, HeartbeatAck, Hello, Leave, Refuse, Welcome

MIB = 1 << 20


@asynccontextmanager
async def joined(network: Network, *, large: bool = True) -> AsyncIterator[tuple[Connection, Connection]]:
    """Both ends of a connection, dialler first; nobody listens any more. Both are closed with the block."""
    accepted: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
    listener = await network.listen("127.0.0.1", 0, lambda: Connection(accepted.set_result))
    near = Connection()
    await network.connect(*listener.address, lambda: near, timeout_s=5)
    far = await accepted
    await listener.close()
    if large:
        near.allow_large()
        far.allow_large()
    yield near, far
    for connection in (near, far):
        await connection.close()
        assert connection.closed.is_set()


def posted(
    connection: Connection, size: int, *, generation: int = 1, stream: int = 0
) -> tuple[bytearray, asyncio.Event]:
    into, done = bytearray(size), asyncio.Event()
    connection.post(memoryview(into), generation=generation, stream=stream, done=done.set)
    return into, done


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - real or virtual time, whichever it is
            await asyncio.sleep(0.001)


async def failure(of: Awaitable[object]) -> P2PTrainError:
    with pytest.raises(P2PTrainError) as caught:
        await of
    return caught.value


# -------------------------------------------------------------------------------------------------------------- memory


async def test_bulk_is_sent_from_and_received_into_the_callers_memory() -> None:
    near, far, transport = Connection(), Connection(), Mock(spec=asyncio.Transport)
    transport.get_extra_info.return_value = None
    for connection in (near, far):
        connection.connection_made(transport)
        connection.allow_large()
    source, target = np.arange(MIB, dtype=np.uint8), np.zeros(MIB, np.uint8)
    near.send_bulk(source.data, generation=1, stream=0)
    ((header, sent),) = transport.writelines.call_args.args
    assert np.shares_memory(np.frombuffer(sent, np.uint8), source)

    far.post(target.data, generation=1, stream=0, done=lambda: None)
    far.get_buffer(-1)[: len(header)] = header
    far.buffer_updated(len(header))
    assert np.shares_memory(np.frombuffer(far.get_buffer(-1), np.uint8), target)


# --------------------------------------------------------------------------------------------------------------- frames


@on_every_stage
async def test_control_frames_arrive_in_order_both_ways(network: Network) -> None:
    async with joined(network) as (near, far):
        count = 3 * INBOX_FRAMES
        for connection in (near, far):
            for seq in range(count):
                connection.send(HeartbeatAck(seq), generation=seq, stream=7)
        for connection in (near, far):
            for seq in range(count):
                received = await connection.receive(timeout_s=5)
                assert (received.message, received.generation, received.stream) == (HeartbeatAck(seq), seq, 7)
        assert near.bytes_out == far.bytes_in == far.bytes_out == near.bytes_in > 0
        assert near.ends.remote == far.ends.local
        assert near.ends.local == far.ends.remote


@on_every_stage
async def test_messages_and_bulk_keep_their_order(network: Network) -> None:
    async with joined(network) as (near, far):
        payloads = [noise(size, size) for size in (4, 0, MIB, 2048)]
        targets = [posted(far, len(payload), stream=4) for payload in payloads]
        for seq, payload in enumerate(payloads):
            near.send(HeartbeatAck(seq))
            near.send_bulk(memoryview(payload), generation=1, stream=4)
        near.send(HeartbeatAck(99))
        for seq, (payload, (into, done)) in enumerate(zip(payloads, targets, strict=True)):
            assert await far.expect(HeartbeatAck, timeout_s=5) == HeartbeatAck(seq)
            await done.wait()
            assert into == payload
        assert await far.expect(HeartbeatAck, timeout_s=5) == HeartbeatAck(99)
        await near.flush(timeout_s=5)
        assert near.bytes_out == far.bytes_in


@on_every_stage
async def test_sent_memory_may_change_after_flush(network: Network) -> None:
    async with joined(network) as (near, far):
        payload = bytearray(noise(4 * MIB))
        into, done = posted(far, len(payload))
        near.send_bulk(memoryview(payload), generation=1, stream=0)
        await near.flush(timeout_s=5)
        payload[:] = bytes(len(payload))
        await done.wait()
        assert into == noise(4 * MIB)


# -------------------------------------------------------------------------------------------------------- back-pressure


@on_every_stage
async def test_an_unposted_bulk_frame_holds_the_sender_back_until_it_is_posted(network: Network) -> None:
    async with joined(network) as (near, far):
        payload = noise(8 * MIB)
        near.send_bulk(memoryview(payload), generation=1, stream=0)
        near.send(Leave("behind"))
        assert isinstance(await failure(far.receive(timeout_s=0.1)), DeadlineExceeded)
        assert far.bytes_in == HEADER.size
        assert isinstance(await failure(near.flush(timeout_s=0.01)), DeadlineExceeded)
        into, done = posted(far, len(payload))
        await near.flush(timeout_s=5)
        assert await far.expect(Leave, timeout_s=5) == Leave("behind")
        assert done.is_set()
        assert into == payload


@in_memory
async def test_frames_that_nobody_receives_stop_at_the_inbox(network: Network) -> None:
    async with joined(network) as (near, far):
        for seq in range(10 * INBOX_FRAMES):
            near.send(HeartbeatAck(seq))
        frame_bytes = near.bytes_out // (10 * INBOX_FRAMES)
        await asyncio.sleep(1)  # virtual: everything that can happen has happened
        assert far.bytes_in <= (INBOX_FRAMES + 1) * (frame_bytes + 8)
        for seq in range(10 * INBOX_FRAMES):
            assert await far.expect(HeartbeatAck, timeout_s=5) == HeartbeatAck(seq)


@on_every_stage
async def test_a_peer_that_does_not_read_is_given_up(network: Network) -> None:
    async with joined(network) as (near, _):
        near.send_bulk(memoryview(bytes(8 * MIB)), generation=1, stream=0)  # not counted: its schedule bounds it
        notice = EventNotice("info", "test", "x" * 32_000)
        for _ in range(SEND_LIMIT_BYTES // 32_100):
            near.send(notice)
        with pytest.raises(ConnectionLost, match="does not read"):
            near.send(notice)
        assert isinstance(near.close_cause, DeadlineExceeded)
        with pytest.raises(ConnectionLost, match="does not read"):
            near.send(notice)
        await near.closed.wait()


# ------------------------------------------------------------------------------------------------- before the handshake


@on_every_stage
async def test_what_follows_the_last_handshake_frame_waits_for_the_handshakes_end(network: Network) -> None:
    """The other side may speak as soon as it let us in, before our task had its turn."""
    async with joined(network, large=False) as (near, far):
        near.send(Welcome(PROTOCOL_VERSION, "s", "a", "anna", 0.0, "c"))
        near.send(EventNotice("info", "test", "x" * 30_000))
        near.send_bulk(memoryview(b"payload"), generation=1, stream=0)
        await until(lambda: bool(far._incoming.frames))
        assert (await far.expect(Welcome, timeout_s=5)).name == "anna"
        far.allow_large()
        into, done = posted(far, 7)
        assert len((await far.expect(EventNotice, timeout_s=5)).text) == 30_000
        await done.wait()
        assert into == b"payload"


# ---------------------------------------------------------------------------------------------------------------- fence


@on_every_stage
async def test_the_fence_drops_what_is_old_and_frees_what_waits(network: Network) -> None:
    async with joined(network) as (near, far):
        old, old_done = posted(far, 5, generation=1, stream=3)
        near.send_bulk(memoryview(noise(MIB)), generation=1, stream=0)
        assert isinstance(await failure(far.receive(timeout_s=0.1)), DeadlineExceeded)
        far.raise_fence(2)
        far.raise_fence(1)
        assert far._incoming.decoder.fence == 2
        near.send_bulk(memoryview(b"stale"), generation=1, stream=3)
        near.send(Leave("stale"), generation=1)
        near.send(Leave("fresh"), generation=2)
        assert await far.expect(Leave, timeout_s=5) == Leave("fresh")
        assert not old_done.is_set()
        assert old == bytes(5)


# ----------------------------------------------------------------------------------------------------------------- ends


@on_every_stage
async def test_the_end_reaches_every_waiter_at_once(network: Network) -> None:
    async with joined(network) as (near, far):
        far.send_bulk(memoryview(bytes(8 * MIB)), generation=1, stream=0)
        waiters = [asyncio.ensure_future(wait) for wait in (far.receive(timeout_s=50), far.receive(timeout_s=50))]
        waiters.append(asyncio.ensure_future(far.flush(timeout_s=50)))
        _, done = posted(far, 5)
        await asyncio.sleep(0)
        near.abort()
        await asyncio.wait(waiters)
        assert {type(waiter.exception()) for waiter in waiters} == {ConnectionLost}
        await far.closed.wait()
        assert not done.is_set()


@on_every_stage
async def test_abort_gives_its_cause_to_the_own_waiters_and_drops_the_inbox(network: Network) -> None:
    async with joined(network) as (near, far):
        near.send(Leave("unread"))
        waiter = asyncio.ensure_future(near.receive(timeout_s=50))
        await until(lambda: far.bytes_in == near.bytes_out)
        cause = DeadlineExceeded("silent")
        near.abort(cause)
        assert await failure(waiter) is cause
        near.abort(ProtocolError("too late to matter"))
        assert near.close_cause is cause
        far.abort()
        assert isinstance(await failure(far.receive(timeout_s=5)), ConnectionLost)


@on_every_stage
async def test_nothing_works_on_a_closed_connection(network: Network) -> None:
    async with joined(network) as (near, _):
        waiter = asyncio.ensure_future(near.receive(timeout_s=50))
        await asyncio.sleep(0)
        await near.close()
        await near.close()
        for error in (
            await failure(waiter),
            await failure(near.receive(timeout_s=5)),
            await failure(near.flush(timeout_s=5)),
        ):
            assert isinstance(error, ConnectionLost)
        with pytest.raises(ConnectionLost):
            near.send(Leave(""))
        with pytest.raises(ConnectionLost):
            near.send_bulk(memoryview(b"x"), generation=1, stream=0)
        with pytest.raises(ConnectionLost):
            posted(near, 1)
        near.raise_fence(4)
        near.allow_large()
        near.abort()


@pytest.mark.parametrize("cut", [1, HEADER.size - 1, HEADER.size, HEADER.size + 3])
@on_every_stage
async def test_an_end_in_the_middle_of_a_frame_is_told_as_such(network: Network, cut: int) -> None:
    async with joined(network) as (near, far):
        posted(far, 5)
        near._transport.write((encode_bulk_header(5, generation=1, stream=0) + b"12345")[:cut])
        await near.close()
        error = await failure(far.receive(timeout_s=5))
        assert isinstance(error, ConnectionLost)
        assert "in the middle of a frame" in error.message


@on_every_stage
async def test_a_peer_at_fault_is_told_so(network: Network) -> None:
    async with joined(network) as (near, far):
        near.send(Leave("not what was expected"))
        error = await failure(far.expect(Hello, timeout_s=5))
        assert isinstance(error, ProtocolError)
        assert "sent Leave where Hello was due" in error.message
        await near.closed.wait()
        if isinstance(near.close_cause, Refused):  # a kernel took it in time; memory is dropped on abort
            assert near.close_cause.code == "protocol-error"
            assert "sent Leave where Hello was due" in near.close_cause.message
        else:
            assert type(network).__name__ != "TcpNetwork"


@on_every_stage
async def test_a_refusal_is_an_answer_and_the_cause_of_the_end(network: Network) -> None:
    async with joined(network) as (near, far):
        near.send(Refuse("full", "no room", "come back later"))
        error = await failure(far.expect(Welcome, timeout_s=5))
        await near.close()
        await far.closed.wait()
        for refused in (error, far.close_cause, await failure(far.receive(timeout_s=5))):
            assert isinstance(refused, Refused)
            assert (refused.code, refused.remedy) == ("full", "come back later")
            assert refused.message.endswith("refuses: no room")


@on_every_stage
async def test_a_cancelled_receiver_loses_no_frame(network: Network) -> None:
    async with joined(network) as (near, far):
        first, second = (asyncio.ensure_future(far.receive(timeout_s=50)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        near.send(Leave("for the other"))
        assert (await second).message == Leave("for the other")
