"""Emulated links over the in-memory network, on virtual time: every arrival is exact."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from p2ptrain.core.errors import Unreachable
from p2ptrain.lab.memory import MemoryNetwork, run_virtual
from tests.wire.doubles import Recorder, connect_hosts, on_virtual_time
from wire.emulate import PIECE_BYTES, PRESETS, SPARE_BYTES, EmulatedNetwork, LinkPreset

DELAY_S = 0.050
PLAIN = LinkPreset("plain", delay_s=0.05)
SLOW = replace(PLAIN, rate_bps=8e6)  # a byte a microsecond
SLOW_BUFFER_BYTES = 50_000 + SPARE_BYTES


def now() -> float:
    return asyncio.get_running_loop().time()


def exactly(seconds: float) -> object:
    return pytest.approx(seconds, abs=1e-9)


async def emulated_pair(preset: LinkPreset, seed: int = 0) -> tuple[Recorder, Recorder]:
    network = EmulatedNetwork(MemoryNetwork(), preset, seed)
    return await connect_hosts(network, network)


@on_virtual_time
async def test_both_ends_emulated_delay_each_direction_once() -> None:
    inner = MemoryNetwork()
    dialler, acceptor = await connect_hosts(EmulatedNetwork(inner, PLAIN, 1), EmulatedNetwork(inner, PLAIN, 2))
    for sender, receiver in ((dialler, acceptor), (acceptor, dialler)):
        sent_at = now()
        sender.transport.write(b"ping")
        await receiver.until_received(4)
        assert now() == exactly(sent_at + DELAY_S)


@on_virtual_time
async def test_a_link_may_be_another_one_for_each_peer() -> None:
    hub = MemoryNetwork()
    links = {"near": replace(PLAIN, delay_s=1e-3), "far": PLAIN, "here": LinkPreset("none", delay_s=0.0)}
    network = EmulatedNetwork(hub.at("here"), lambda host, port: links[host], 0)
    for host, delay_s in (("near", 0.001), ("far", 0.050)):
        there = EmulatedNetwork(hub.at(host), lambda caller, port, host=host: links[host], 0)
        acceptor, dialler = Recorder(), Recorder()
        listener = await there.listen("0.0.0.0", 0, lambda acceptor=acceptor: acceptor)
        began = now()
        await network.connect(host, listener.address[1], lambda dialler=dialler: dialler, timeout_s=5)
        assert now() == exactly(began + 2 * delay_s)
        await acceptor.until(lambda acceptor=acceptor: bool(acceptor.events))
        for sender, receiver in ((dialler, acceptor), (acceptor, dialler)):
            sent_at = now()
            sender.transport.write(b"ping")
            await receiver.until_received(4)
            assert now() == exactly(sent_at + delay_s)


@on_virtual_time
async def test_dialling_takes_a_round_trip_and_fails_when_that_is_too_long() -> None:
    network = EmulatedNetwork(MemoryNetwork(), PLAIN, 0)
    listener = await network.listen("host", 0, Recorder)
    await network.connect(*listener.address, Recorder, timeout_s=1)
    assert now() == exactly(2 * DELAY_S)
    begun_at = now()
    with pytest.raises(Unreachable, match=r"no answer within 0.08 s"):
        await network.connect(*listener.address, Recorder, timeout_s=0.08)
    assert now() == exactly(begun_at + 0.08)


@on_virtual_time
async def test_a_large_write_streams_at_the_rate() -> None:
    dialler, acceptor = await emulated_pair(SLOW)
    total, sent_at = 1 << 20, now()
    dialler.transport.write(bytes(total))
    await acceptor.until_received(total)
    assert acceptor.arrivals == [
        (exactly(sent_at + DELAY_S + done * 1e-6), done) for done in range(PIECE_BYTES, total + 1, PIECE_BYTES)
    ]


@on_virtual_time
async def test_what_was_written_is_the_writers_again() -> None:
    dialler, acceptor = await emulated_pair(SLOW)
    data = bytearray(b"x" * (SLOW_BUFFER_BYTES + PIECE_BYTES))
    dialler.transport.write(data)
    assert dialler.transport.get_write_buffer_size() == PIECE_BYTES
    data.clear()  # nothing holds it, else this would be a BufferError
    assert set(await acceptor.until_received(SLOW_BUFFER_BYTES + PIECE_BYTES)) == {ord("x")}


@on_virtual_time
async def test_writer_is_paused_until_the_links_buffer_has_all() -> None:
    dialler, acceptor = await emulated_pair(SLOW)
    sent_at = now()
    dialler.transport.write(bytes(SLOW_BUFFER_BYTES))
    assert dialler.events == ["made"]
    dialler.transport.write(bytes(4 * PIECE_BYTES))
    assert dialler.writing_paused
    assert dialler.transport.get_write_buffer_size() == 4 * PIECE_BYTES
    await dialler.until(lambda: not dialler.writing_paused)
    assert now() == exactly(sent_at + DELAY_S + 4 * PIECE_BYTES * 1e-6)
    await acceptor.until_received(SLOW_BUFFER_BYTES + 4 * PIECE_BYTES)
    assert dialler.events == ["made", "paused", "resumed"]


@on_virtual_time
async def test_close_sends_everything_first_and_arrives_after_the_delay() -> None:
    dialler, acceptor = await emulated_pair(SLOW)
    closed_at = now()
    dialler.transport.write(bytes(100_000))
    dialler.transport.close()
    dialler.transport.write(b"too late")
    assert await acceptor.until_lost() is None
    assert len(acceptor.received) == 100_000
    # The end arrives with the last byte; the acceptor's own close then takes the way back.
    assert now() == exactly(closed_at + DELAY_S + 0.1 + DELAY_S)
    assert await dialler.until_lost() is None


@on_virtual_time
async def test_a_peer_that_breaks_off_ends_the_emulated_side_at_once() -> None:
    inner = MemoryNetwork()
    dialler, acceptor = await connect_hosts(EmulatedNetwork(inner, SLOW, 1), inner)
    dialler.transport.write(bytes(1_000_000))
    await acceptor.until_received(1)
    broken_at = now()
    acceptor.transport.abort()
    assert isinstance(await dialler.until_lost(), ConnectionResetError)
    assert now() == exactly(broken_at)
    assert dialler.transport.get_write_buffer_size() == 0


@pytest.mark.parametrize("seed", [1, 2])
def test_equal_seeds_replay_equal_links_and_connections_differ(seed: int) -> None:
    rough = PRESETS["lossy"]

    async def main() -> list[list[tuple[float, int]]]:
        network = EmulatedNetwork(MemoryNetwork(), rough, seed)
        runs = []
        for _ in range(2):
            dialler, acceptor = await connect_hosts(network, network)
            opened_at = now()
            for _ in range(50):
                dialler.transport.write(bytes(2000))
                await asyncio.sleep(0.1)
            await acceptor.until_received(100_000)
            runs.append([(round(at - opened_at, 9), total) for at, total in acceptor.arrivals])
        return runs

    first, second = run_virtual(main()), run_virtual(main())
    assert first == second
    assert first[0] != first[1]
