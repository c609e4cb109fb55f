"""The proxy of ``p2ptrain chaos`` over real sockets: bytes pass, stop, wait, change and end as they are told to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from p2ptrain.lab.chaos.proxy import Proxy

DEADLINE_S = 10.0
QUIET_S = 0.2
"""That nothing comes is believed after so long: a loopback takes less than a thousandth of it."""


class Echo:
    """A server that keeps what it gets and sends it back."""

    def __init__(self) -> None:
        self.got = bytearray()
        self.ended: list[str] = []
        self.news = asyncio.Event()
        self.address = ("127.0.0.1", 0)
        self.writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = self._server.sockets[0].getsockname()[:2]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        self.news.set()
        try:
            while data := await reader.read(1 << 16):
                self.got += data
                self.news.set()
                writer.write(data)
                await writer.drain()
            self.ended.append("closed")
        except ConnectionError:
            self.ended.append("reset")
        finally:
            writer.close()
            self.news.set()

    async def until(self, what: object) -> None:
        assert callable(what)
        async with asyncio.timeout(DEADLINE_S):
            while not what():
                self.news.clear()
                await self.news.wait()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self.writers:
            writer.transport.abort()
        await self._server.wait_closed()


@pytest.fixture
async def echo() -> AsyncIterator[Echo]:
    made = Echo()
    await made.start()
    yield made
    await made.close()


@pytest.fixture
async def proxy(echo: Echo) -> AsyncIterator[Proxy]:
    made = Proxy(echo.address)
    await made.start()
    yield made
    await made.close()


class Caller:
    """One connection through the proxy."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def dial(cls, proxy: Proxy) -> Caller:
        return cls(*await asyncio.open_connection(*proxy.address))

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def get(self, size_bytes: int) -> bytes:
        async with asyncio.timeout(DEADLINE_S):
            return await self.reader.readexactly(size_bytes)

    async def silent(self) -> bool:
        try:
            async with asyncio.timeout(QUIET_S):
                await self.reader.read(1)
        except TimeoutError:
            return True
        return False

    async def end(self) -> str:
        try:
            async with asyncio.timeout(DEADLINE_S):
                return "closed" if not await self.reader.read() else "data"
        except ConnectionError:
            return "reset"

    async def close(self) -> None:
        self.writer.transport.abort()


@pytest.fixture
async def caller(proxy: Proxy) -> AsyncIterator[Caller]:
    made = await Caller.dial(proxy)
    yield made
    await made.close()


async def test_everything_passes_both_ways_as_it_is(echo: Echo, proxy: Proxy, caller: Caller) -> None:
    sent = bytes(range(256)) * 20_000
    caller.send(sent)
    assert await caller.get(len(sent)) == sent
    assert bytes(echo.got) == sent
    assert proxy.damaged == 0


async def test_a_reset_link_ends_all_connections_and_takes_no_new_one(echo: Echo, proxy: Proxy, caller: Caller) -> None:
    caller.send(b"before")
    assert await caller.get(6) == b"before"
    proxy.cut(silent=False)
    assert await caller.end() == "reset"
    await echo.until(lambda: echo.ended == ["reset"])
    again = await Caller.dial(proxy)
    again.send(b"x")
    assert await again.end() == "reset"
    await again.close()
    proxy.mend()
    after = await Caller.dial(proxy)
    after.send(b"after")
    assert await after.get(5) == b"after"
    await after.close()


async def test_a_silent_link_swallows_nothing_and_says_nothing(echo: Echo, proxy: Proxy, caller: Caller) -> None:
    caller.send(b"one")
    assert await caller.get(3) == b"one"
    proxy.cut(silent=True)
    caller.send(b"two")
    assert await caller.silent()
    late = await Caller.dial(proxy)
    late.send(b"three")
    assert await late.silent()
    assert bytes(echo.got) == b"one"
    proxy.mend()
    assert await caller.get(3) == b"two"
    assert await late.get(5) == b"three"
    await late.close()


async def test_a_slow_link_takes_its_time_and_keeps_the_order(proxy: Proxy, caller: Caller) -> None:
    proxy.slow(rate_bps=500_000, delay_s=0.05)
    sent = bytes(range(250)) * 400  # 0.2 s on the line, each way
    began = time.monotonic()
    caller.send(sent)
    assert await caller.get(len(sent)) == sent
    assert time.monotonic() - began >= 0.3  # both ways overlap but for the first piece, and each is 0.05 s later


async def test_what_waits_on_a_slow_link_goes_at_once_when_it_is_mended(proxy: Proxy, caller: Caller) -> None:
    proxy.slow(rate_bps=10, delay_s=0.0)
    sent = bytes(1000)  # it would take 100 s
    caller.send(sent)
    assert await caller.silent()
    proxy.mend()
    assert await caller.get(1000) == sent


async def test_a_slow_link_holds_a_bounded_number_of_bytes(echo: Echo, proxy: Proxy, caller: Caller) -> None:
    proxy.slow(rate_bps=1.0, delay_s=0.0)
    caller.send(bytes(64 << 20))
    assert await caller.silent()
    taken = (64 << 20) - caller.writer.transport.get_write_buffer_size()
    assert taken < 32 << 20, "the rest waits at the sender"


async def test_one_bit_of_the_chosen_byte_changes(echo: Echo, proxy: Proxy, caller: Caller) -> None:
    proxy.damage(skip_bytes=20)
    caller.send(bytes(8))
    assert await caller.get(8) == bytes(8)  # 16 passed, both ways
    caller.send(bytes(8))
    got = await caller.get(8)
    assert [bin(byte).count("1") for byte in got] == [0, 0, 0, 0, 1, 0, 0, 0]
    assert echo.got[8:] == got
    caller.send(bytes(1000))
    assert await caller.get(1000) == bytes(1000), "one is enough"
    assert proxy.damaged == 1


async def test_the_end_of_either_side_passes_after_its_last_byte(echo: Echo, proxy: Proxy, caller: Caller) -> None:
    caller.send(bytes(1 << 20))
    caller.writer.write_eof()
    assert await caller.get(1 << 20) == bytes(1 << 20), "what comes back still passes"
    assert await caller.end() == "closed"
    assert (len(echo.got), echo.ended) == (1 << 20, ["closed"])


async def test_a_peer_that_moved_is_found_at_its_new_port(echo: Echo, free_port: int) -> None:
    proxy = Proxy(("127.0.0.1", free_port))
    await proxy.start()
    proxy.target = echo.address
    caller = await Caller.dial(proxy)
    caller.send(b"here")
    assert await caller.get(4) == b"here"
    await caller.close()
    await proxy.close()
