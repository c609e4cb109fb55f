"""How many strangers may stand in the doorway: connections that nobody has let in yet, in all and of one machine.

The numbers. A connection in the doorway costs a socket and a few KiB, so 256 in all cost about what one frame of a
large ring does. One machine may have a quarter of them: as many as it has worker slots (64), so that after a restart of
the seed all of its workers may come back at once, and four hostile machines are needed to keep the others waiting.
All of the loopback is one machine; an IPv6 host chooses its own lower 64 bits, so its network counts as one.
"""

from __future__ import annotations

import ipaddress
from collections import Counter

MAX_HALF_OPEN = 256
MAX_HALF_OPEN_PER_MACHINE = 64


class HalfOpen:
    """Counts who stands in the doorway.

    Args:
        limit: in all. ``limit_per_machine``: of those that share an address.
    """

    def __init__(self, limit: int = MAX_HALF_OPEN, limit_per_machine: int = MAX_HALF_OPEN_PER_MACHINE) -> None:
        self._limit = limit
        self._limit_per_machine = limit_per_machine
        self._by_machine: Counter[str] = Counter()

    def enter(self, host: str) -> str:
        """Take a place for ``host``, to be given back with ``leave``; or the reason why there is none."""
        machine = _machine(host)
        if self._by_machine[machine] >= self._limit_per_machine:
            return f"{self._by_machine[machine]} handshakes with {machine} are under way"
        if self._by_machine.total() >= self._limit:
            return f"{self._by_machine.total()} handshakes are under way"
        self._by_machine[machine] += 1
        return ""

    def leave(self, host: str) -> None:
        machine = _machine(host)
        self._by_machine[machine] -= 1
        if not self._by_machine[machine]:
            del self._by_machine[machine]

    def validate(self) -> None:
        """Invariants, for tests."""
        assert all(0 < count <= self._limit_per_machine for count in self._by_machine.values() if count)
        assert self._by_machine.total() <= self._limit


def _machine(host: str) -> str:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
    if address.is_loopback:
        return "this machine"
    if isinstance(address, ipaddress.IPv6Address) and not address.is_link_local:
        return str(ipaddress.IPv6Network((address, 64), strict=False))
    return str(address)
