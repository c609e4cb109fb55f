"""What only the in-memory network has: names of hosts, and faults as data."""

from __future__ import annotations

import asyncio

import pytest

from p2ptrain.core.errors import Unreachable, UserError
from p2ptrain.core.world import Network
from p2ptrain.lab.memory import MemoryNetwork
from tests.wire.doubles import Recorder, connect_hosts, on_virtual_time


async def unreachable(network: Network, host: str, port: int, *, timeout_s: float = 5.0) -> str:
    with pytest.raises(Unreachable) as caught:
        await network.connect(host, port, Recorder, timeout_s=timeout_s)
    return caught.value.message


@on_virtual_time
async def test_hosts_are_told_apart_by_name() -> None:
    a, b = (hub := MemoryNetwork()).at("a"), hub.at("b")
    dialler, acceptor = await connect_hosts(a, b)
    assert dialler.transport.get_extra_info("sockname")[0] == "a"
    assert acceptor.transport.get_extra_info("peername")[0] == "a"
    assert dialler.transport.get_extra_info("peername")[0] == "b"
    for host in ("0.0.0.0", "127.0.0.1", "localhost"):
        listener = await b.listen(host, 0, Recorder)
        port = listener.address[1]
        assert listener.address[0] == host
        await b.connect("127.0.0.1", port, Recorder, timeout_s=5)
        assert "refused" in await unreachable(a, "127.0.0.1", port)
    await a.listen("a", 7337, Recorder)
    await b.listen("b", 7337, Recorder)
    with pytest.raises(UserError, match="7337 is in use"):
        await b.listen("0.0.0.0", 7337, Recorder)


@on_virtual_time
async def test_the_default_host_is_found_under_any_name() -> None:
    network = MemoryNetwork()
    await connect_hosts(network, network, host="whatever")
    listener = await network.listen("seed.example", 1, Recorder)
    await network.connect("seed.example", 1, Recorder, timeout_s=5)
    assert "refused" in await unreachable(network, "other.example", 1)
    await listener.close()
    assert "refused" in await unreachable(network, "seed.example", 1)


@on_virtual_time
async def test_a_cut_resets_both_ends_and_refuses_until_mended() -> None:
    hub = MemoryNetwork()
    a, b, c = hub.at("a"), hub.at("b"), hub.at("c")
    dialler, acceptor = await connect_hosts(a, b)
    bystander, _ = await connect_hosts(c, b)
    await b.listen("b", 1, Recorder)
    dialler.transport.write(bytes(1000))
    hub.cut("b", "a")
    assert isinstance(await dialler.until_lost(), ConnectionResetError)
    assert isinstance(await acceptor.until_lost(), ConnectionResetError)
    assert not acceptor.received
    assert bystander.events == ["made"]
    assert "refused" in await unreachable(a, "b", 1)
    hub.mend("a", "b")
    await a.connect("b", 1, Recorder, timeout_s=5)


@on_virtual_time
async def test_silence_holds_everything_back_until_mended() -> None:
    loop = asyncio.get_running_loop()
    hub = MemoryNetwork()
    a, b = hub.at("a"), hub.at("b")
    listener = await b.listen("b", 1, Recorder)
    talker, listener_end = await connect_hosts(a, b)
    leaver, left = await connect_hosts(a, b)
    breaker, broken = await connect_hosts(a, b)
    hub.silence("a", "b")
    talker.transport.write(b"anyone?")
    leaver.transport.close()
    breaker.transport.abort()
    assert await unreachable(a, *listener.address, timeout_s=3) == "cannot reach b:1: no answer within 3 s"
    assert loop.time() == pytest.approx(3)
    assert await leaver.until_lost() is None  # a kernel would do the same: closing is a local affair
    assert listener_end.events == left.events == broken.events == ["made"]
    assert not listener_end.received
    late = Recorder()
    dialling = asyncio.ensure_future(a.connect(*listener.address, lambda: late, timeout_s=60))
    await asyncio.sleep(10)
    hub.mend("a", "b")
    await dialling
    assert await listener_end.until_received(7) == b"anyone?"
    assert await left.until_lost() is None
    assert isinstance(await broken.until_lost(), ConnectionResetError)
    assert loop.time() == pytest.approx(13)


@on_virtual_time
async def test_a_reset_is_noticed_by_who_reads_or_writes_only() -> None:
    network = MemoryNetwork()
    aborted, asleep = await connect_hosts(network, network)
    asleep.transport.pause_reading()
    aborted.transport.abort()
    await asyncio.sleep(10)
    assert asleep.events == ["made"]
    asleep.transport.write(b"hello?")
    assert isinstance(await asleep.until_lost(), ConnectionResetError)
