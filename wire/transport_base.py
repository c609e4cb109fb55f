"""What the transports share: views instead of copies, flow control, and the words for what goes wrong."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
from typing import TypeAlias

from p2ptrain.core.errors import Unreachable, UserError

WriteData: TypeAlias = bytes | bytearray | memoryview
Address: TypeAlias = tuple[str, int]


def format_address(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only the same machine reaches ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def told_of(address: tuple[str, int], text: str) -> str:
    """``text`` about the peer at ``address``, which is named once."""
    named = format_address(*address)
    return text if named in text else f"{named}: {text}"


def bytes_view(data: WriteData) -> memoryview:
    """``data`` as a flat view of bytes, not copied. Raises ``TypeError`` where it is not one contiguous buffer."""
    view = memoryview(data)
    if not view.c_contiguous:
        raise TypeError("only a contiguous buffer can be written without a copy")
    return view if (view.format == "B" and view.ndim == 1) or not view.nbytes else view.cast("B")


def check_port(port: int, *, least: int) -> None:
    if not least <= port <= 65535:
        raise UserError(f"{port} is not a port", remedy=f"choose one from {max(least, 1)} to 65535")


def unreachable(host: str, port: int, error: Exception, timeout_s: float) -> Unreachable:
    """What is said, and advised, when dialling ``host:port`` failed with ``error``."""
    cause, remedy = str(getattr(error, "strerror", None) or error), ""
    code = getattr(error, "errno", None)
    if isinstance(error, (socket.gaierror, UnicodeError)):
        cause, remedy = "the host name is not known", "check the name, or use the machine's IP address"
    elif isinstance(error, ConnectionRefusedError):
        cause, remedy = "connection refused", "is the seed running there, and on this port?"
    elif isinstance(error, TimeoutError):
        cause = f"no answer within {timeout_s:g} s"
        remedy = "is the machine up, and does its firewall let this port in?"
    elif code in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        cause, remedy = "no route to it", "are both machines on the same network or VPN?"
    return Unreachable(f"cannot reach {format_address(host, port)}: {cause}", remedy=remedy)


def cannot_listen(host: str, port: int, error: Exception, *, option: str = "--port") -> UserError:
    cause, remedy = str(getattr(error, "strerror", None) or error), ""
    code = getattr(error, "errno", None)
    if isinstance(error, (socket.gaierror, UnicodeError)):
        cause, remedy = "the host name is not known", "use 0.0.0.0 for every interface, or an address of this machine"
    elif code == errno.EADDRINUSE:
        cause, remedy = f"port {port} is in use", f"stop the program that has it, or choose another port with {option}"
    elif code == errno.EACCES:
        cause, remedy = f"port {port} is not permitted", f"choose a port above 1023 with {option}"
    elif code == errno.EADDRNOTAVAIL:
        cause = "it is not an address of this machine"
        remedy = "use 0.0.0.0 for every interface, or an address of this machine"
    return UserError(f"cannot listen on {format_address(host, port)}: {cause}", remedy=remedy)


class FlowControl(asyncio.Transport):
    """The writing side's back-pressure, with the rules of asyncio's own transports.

    A subclass implements ``get_write_buffer_size``, and calls ``_maybe_pause`` when it grew, ``_maybe_resume`` when it
    shrank.
    """

    def __init__(self, protocol: asyncio.BufferedProtocol, *, high_bytes: int, low_bytes: int | None = None) -> None:
        super().__init__()
        self._protocol = protocol
        self._writing_paused = False
        self._high_bytes = high_bytes
        self._low_bytes = high_bytes // 4 if low_bytes is None else low_bytes

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if high is None:
            high = 64 << 10 if low is None else 4 * low
        low = high // 4 if low is None else low
        if not high >= low >= 0:
            raise ValueError(f"high ({high}) must be at least low ({low}), and low at least 0")
        self._high_bytes, self._low_bytes = high, low
        self._maybe_pause()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """(low, high) in bytes, in asyncio's order."""
        return self._low_bytes, self._high_bytes

    def _maybe_pause(self) -> None:
        if not self._writing_paused and self.get_write_buffer_size() > self._high_bytes:
            self._writing_paused = True
            self._protocol.pause_writing()

    def _maybe_resume(self) -> None:
        if self._writing_paused and self.get_write_buffer_size() <= self._low_bytes:
            self._writing_paused = False
            self._protocol.resume_writing()
