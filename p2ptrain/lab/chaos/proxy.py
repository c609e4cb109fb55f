"""A TCP proxy in front of one peer's port. It cuts, slows and damages the peer's links from outside.

A *silent* link neither reads nor writes. Bytes wait in the senders' kernels, and neither side notices that the other
one ended. A pulled cable looks the same, except that TCP acknowledges the bytes that the proxy's own kernel received.
When the link is mended, the bytes continue in order, as after retransmission. A *reset* link closes its connections at
once, and each new connection as soon as it is made.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from asyncio import StreamReader, StreamWriter
from contextlib import suppress

from p2ptrain.core.background import Background

PIECE_BYTES = 64 << 10
"""Bytes that are forwarded at once. A slow link holds about this much of a connection before it stops reading."""


class Proxy:
    """A listening port of the loopback that leads to one port of a peer.

    Attributes:
        address: (host, port) that other peers dial.
        target: (host, port) where the peer listens now.
        damaged: number of bytes changed so far.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.address: tuple[str, int] = ("127.0.0.1", 0)
        self.damaged = 0
        self._is_reset = False
        self._speaks = asyncio.Event()  # not set while the link is silent
        self._speaks.set()
        self._mended = asyncio.Event()  # releases the bytes that wait on a slow link
        self._rate_bps = self._delay_s = 0.0
        self._skip_bytes: int | None = None
        self._ends: set[StreamWriter] = set()
        self._tasks = Background()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0, limit=PIECE_BYTES)
        self.address = ("127.0.0.1", int(self._server.sockets[0].getsockname()[1]))

    async def close(self) -> None:
        """End all connections and stop listening. May be called twice, and before ``start``."""
        if self._server is not None:
            self._server.close()
        self._reset(*self._ends)
        await self._tasks.stop()
        if self._server is not None:
            await self._server.wait_closed()

    def cut(self, *, silent: bool) -> None:
        if silent:
            self._speaks.clear()
        else:
            self._is_reset = True
            self._reset(*self._ends)

    def slow(self, rate_bps: float, delay_s: float) -> None:
        """Limit both directions of every connection to this rate, in bytes per second, and add this delay."""
        self._rate_bps, self._delay_s = rate_bps, delay_s

    def damage(self, skip_bytes: int) -> None:
        """Flip one bit of the byte that follows the next ``skip_bytes`` bytes, whatever their direction."""
        self._skip_bytes = skip_bytes

    def mend(self) -> None:
        """End all faults. Bytes that wait are delivered first."""
        self._is_reset, self._rate_bps, self._delay_s, self._skip_bytes = False, 0.0, 0.0, None
        self._speaks.set()
        mended, self._mended = self._mended, asyncio.Event()
        mended.set()

    def _accepted(self, reader: StreamReader, writer: StreamWriter) -> None:
        self._ends.add(writer)
        self._tasks.start(self._serve(reader, writer), "proxy")

    async def _serve(self, near: StreamReader, to_near: StreamWriter) -> None:
        ends = [to_near]
        try:
            if self._is_reset:
                raise ConnectionResetError
            async with asyncio.timeout(5.0):  # a peer on this machine accepts or refuses at once
                far, to_far = await asyncio.open_connection(*self.target, limit=PIECE_BYTES)
            ends.append(to_far)
            self._ends.add(to_far)
            if self._is_reset:
                raise ConnectionResetError
            for end in ends:
                end.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pumps = [asyncio.create_task(self._pump(near, to_far)), asyncio.create_task(self._pump(far, to_near))]
            try:
                await asyncio.gather(*pumps)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except OSError:  # TimeoutError is one
            await self._speaks.wait()  # a silent link does not pass on an end
            self._reset(*ends)
        finally:
            for end in ends:
                end.close()
                self._ends.discard(end)

    async def _pump(self, reader: StreamReader, writer: StreamWriter) -> None:
        while True:
            await self._speaks.wait()
            data = await reader.read(PIECE_BYTES)
            if data and (self._rate_bps or self._delay_s):
                mended, line_s = self._mended, len(data) / self._rate_bps if self._rate_bps else 0.0
                with suppress(TimeoutError):
                    async with asyncio.timeout(line_s + self._delay_s):
                        await mended.wait()
            await self._speaks.wait()
            if not data:
                if not writer.transport.is_closing():  # uvloop raises RuntimeError
                    writer.write_eof()
                return
            writer.write(self._changed(data))
            await writer.drain()

    def _changed(self, data: bytes) -> bytes:
        if self._skip_bytes is None or self._skip_bytes >= len(data):
            if self._skip_bytes is not None:
                self._skip_bytes -= len(data)
            return data
        hurt = bytearray(data)
        hurt[self._skip_bytes] ^= 1 << (self._skip_bytes % 8)
        self._skip_bytes = None
        self.damaged += 1
        return bytes(hurt)

    @staticmethod
    def _reset(*ends: StreamWriter) -> None:
        for end in ends:
            with suppress(OSError, ValueError):  # already closed; ValueError is uvloop's
                no_linger = struct.pack("ii", 1, 0)  # closing sends RST
                end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_linger)
            end.transport.abort()
