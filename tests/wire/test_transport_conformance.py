"""Every network keeps the same promises: TCP and TLS on both event loops, memory, and emulated links over either."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import pytest

from p2ptrain.core.errors import Unreachable, UserError
from p2ptrain.core.world import Network
from tests.wire.doubles import HOST, Recorder, connected, on_all_transports


def noise(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


@on_all_transports
async def test_both_ends_know_each_other_by_the_same_names(network: Network) -> None:
    async with connected(network) as (dialler, acceptor, listener):
        near, far = dialler.transport, acceptor.transport
        assert near.get_extra_info("peername")[:2] == listener.address == far.get_extra_info("sockname")[:2]
        assert near.get_extra_info("sockname")[:2] == far.get_extra_info("peername")[:2]
        assert listener.address[1] > 0
        assert near.get_extra_info("no such thing", "default") == "default"


@pytest.mark.parametrize("seed", range(3))
@on_all_transports
async def test_bytes_arrive_in_order_and_whole_in_both_directions_at_once(network: Network, seed: int) -> None:
    rng = random.Random(seed)
    buffers = [{"buffer_bytes": rng.choice((97, 4096, 1 << 20))} for _ in range(2)]
    async with connected(network, dial=buffers[0], accept=buffers[1]) as (dialler, acceptor, _):
        texts = {dialler: noise(rng.randrange(1, 400_000), seed), acceptor: noise(rng.randrange(1, 400_000), seed + 9)}
        for end, text in texts.items():
            view = memoryview(text)
            while view:
                parts = [view[:0]]
                for _ in range(rng.randrange(1, 4)):
                    size = rng.choice((1, 20, 1448, 70_000))
                    parts.append(view[:size])
                    view = view[size:]
                if rng.random() < 0.5:
                    end.transport.writelines(parts)
                else:
                    for part in parts:
                        end.transport.write(part)
        assert await acceptor.until_received(len(texts[dialler])) == texts[dialler]
        assert await dialler.until_received(len(texts[acceptor])) == texts[acceptor]
    assert len(acceptor.received) == len(texts[dialler])


@on_all_transports
async def test_reader_that_pauses_holds_the_writer_and_bounds_memory(network: Network) -> None:
    total, chunk = 8 << 20, 64 << 10

    def sip(reader: Recorder) -> None:
        """Pause after every read, and resume one turn of the loop later."""
        reader.transport.pause_reading()
        asyncio.get_running_loop().call_soon(reader.transport.resume_reading)

    async with connected(network, accept={"on_bytes": sip}) as (dialler, acceptor, _):
        acceptor.transport.pause_reading()
        text = memoryview(noise(total))
        writing = asyncio.ensure_future(dialler.write_all(text, chunk_bytes=chunk, timeout_s=15))
        await dialler.until(lambda: dialler.writing_paused)
        assert not acceptor.received
        acceptor.transport.resume_reading()
        assert await acceptor.until_received(total, timeout_s=15) == text
        assert await writing <= chunk + (1 << 10)  # TLS adds a few bytes to each record
        await dialler.until(lambda: not dialler.writing_paused)
        assert dialler.transport.get_write_buffer_size() == 0


@on_all_transports
async def test_what_waits_in_the_network_is_bounded(network: Network) -> None:
    async with connected(network) as (dialler, acceptor, _):
        acceptor.transport.pause_reading()
        written_bytes = 0
        while written_bytes < 8 << 20 and not dialler.writing_paused:
            dialler.transport.write(bytes(16 << 10))
            written_bytes += 16 << 10
            await asyncio.sleep(0)
        assert written_bytes < 5 << 20
        dialler.transport.abort()
        acceptor.transport.abort()


@on_all_transports
async def test_a_reader_that_leaves_halfway_is_noticed(network: Network) -> None:
    total = 4 << 20

    def leave_halfway(reader: Recorder) -> None:
        if len(reader.received) > total // 2:
            reader.transport.close()

    async with connected(network, accept={"on_bytes": leave_halfway}) as (dialler, acceptor, _):
        text = noise(total)
        dialler.transport.write(text)
        assert await acceptor.until_lost() is None
        await dialler.until_lost()
        assert text.startswith(acceptor.received)
        assert len(acceptor.received) < total


@on_all_transports
async def test_close_sends_what_was_written_before(network: Network) -> None:
    async with connected(network) as (dialler, acceptor, _):
        text = noise(1 << 20)
        dialler.transport.write(text)
        dialler.transport.close()
        assert dialler.transport.is_closing()
        assert await acceptor.until_lost() is None
        assert acceptor.received == text
        assert acceptor.events[-2:] == ["eof", "lost"]
        assert await dialler.until_lost() is None


@on_all_transports
async def test_what_is_written_after_the_end_goes_nowhere(network: Network) -> None:
    async with connected(network) as (dialler, acceptor, _):
        dialler.transport.close()
        await dialler.until_lost()
        with contextlib.suppress(RuntimeError):  # uvloop's word for it; asyncio ignores it
            dialler.transport.write(b"too late")
        await acceptor.until_lost()
        assert not acceptor.received


@on_all_transports
async def test_a_closed_end_reads_no_more(network: Network) -> None:
    async with connected(network) as (dialler, acceptor, _):
        dialler.transport.close()
        assert not dialler.transport.is_reading()
        acceptor.transport.write(noise(100_000))
        await dialler.until_lost()
        await acceptor.until_lost()
        assert not dialler.received


@on_all_transports
async def test_abort_drops_and_is_seen_by_the_other_side(network: Network) -> None:
    async with connected(network) as (dialler, acceptor, _):
        text = noise(8 << 20)
        dialler.transport.write(text)
        dialler.transport.abort()
        assert dialler.transport.is_closing()
        await acceptor.until_lost()
        assert await dialler.until_lost() is None
        assert len(acceptor.received) < len(text)
        assert text.startswith(acceptor.received)


@on_all_transports
async def test_a_connection_is_lost_once_however_often_it_is_ended(network: Network) -> None:
    async with connected(network) as (dialler, acceptor, _):
        for end in (dialler, acceptor):
            end.transport.write(noise(300_000))
            end.transport.close()
            end.transport.close()
            end.transport.abort()
            end.transport.abort()
            end.transport.pause_reading()
            end.transport.resume_reading()
    assert dialler.events.count("eof") <= 1


@on_all_transports
async def test_half_a_connection_can_be_closed_except_over_tls(network: Network) -> None:
    async with connected(network, accept={"keep_open": True}) as (dialler, acceptor, _):
        if acceptor.transport.get_extra_info("ssl_object") is not None:
            return
        question, answer = noise(200_000, 1), noise(300_000, 2)
        dialler.transport.write(question)
        dialler.transport.write_eof()
        with pytest.raises(RuntimeError):
            dialler.transport.write(b"too late")
        await acceptor.until(lambda: "eof" in acceptor.events)
        assert acceptor.received == question
        acceptor.transport.write(answer)
        acceptor.transport.close()
        assert await dialler.until_lost() is None
        assert dialler.received == answer
    assert acceptor.events.count("eof") == 1


@on_all_transports
async def test_a_protocol_that_raises_ends_its_own_connection_only(network: Network) -> None:
    def stumble(reader: Recorder) -> None:
        if b"boom" in reader.received:
            raise ZeroDivisionError("on purpose")

    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: reported.append(context))
    async with (
        connected(network, accept={"on_bytes": stumble}) as (dialler, acceptor, _),
        connected(network) as (*bystanders, _),
    ):
        dialler.transport.write(b"boom")
        assert isinstance(await acceptor.until_lost(), ZeroDivisionError)
        await dialler.until_lost()
        assert [type(context["exception"]) for context in reported] == [ZeroDivisionError]
        assert [bystander.events for bystander in bystanders] == [["made"], ["made"]]


@on_all_transports
async def test_nobody_there_is_unreachable_and_says_what_to_do(network: Network) -> None:
    listener = await network.listen(HOST, 0, Recorder)
    await listener.close()
    host, port = listener.address
    with pytest.raises(Unreachable, match=f"{host}:{port}: connection refused") as caught:
        await network.connect(host, port, Recorder, timeout_s=5)
    assert "is p2ptrain running there" in caught.value.remedy


@on_all_transports
async def test_a_port_is_bound_once_and_free_after_close(network: Network) -> None:
    first = await network.listen(HOST, 0, Recorder)
    port = first.address[1]
    with pytest.raises(UserError, match=f"port {port} is in use") as caught:
        await network.listen(HOST, port, Recorder)
    assert "another port" in caught.value.remedy
    await first.close()
    await first.close()
    second = await network.listen(HOST, port, Recorder)
    assert second.address == first.address
    await first.close()  # which is not the second's business
    with pytest.raises(UserError):
        await network.listen(HOST, port, Recorder)
    await second.close()


@on_all_transports
async def test_a_listener_that_closes_leaves_its_connections_alive(network: Network) -> None:
    async with connected(network) as (dialler, acceptor, listener):
        await listener.close()
        acceptor.transport.write(b"still here")
        assert await dialler.until_received(10) == b"still here"


@pytest.mark.parametrize("port", [-1, 65536])
@on_all_transports
async def test_a_number_that_is_no_port_is_the_persons_error(network: Network, port: int) -> None:
    with pytest.raises(UserError, match="not a port"):
        await network.listen(HOST, port, Recorder)
    with pytest.raises(UserError, match="not a port"):
        await network.connect(HOST, port, Recorder, timeout_s=5)
