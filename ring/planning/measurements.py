"""What is measured of a cluster, workers and links between them, and how long bytes take over the links. Pure.

A link that was measured in one direction counts in both. One that was never measured counts as the median of the
measured ones.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from wire.emulate import LinkPreset

Element = TypeVar("Element")


@dataclass(frozen=True, slots=True)
class CandidateWorker:
    """A worker that may hold a part of a model.

    Attributes:
        memory_bytes: that it offers; infinite if unknown.
        flops: measured multiplications and additions per second; 0: unknown.
        on_host: it computes on a CPU.
        host, host_flops: workers of one host share its cores, which achieve so much together; 0: they do not.
        byte_s: seconds to stream one byte of weights while a token is decoded.
    """

    id: str
    name: str
    memory_bytes: float = math.inf
    flops: float = 0.0
    on_host: bool = True
    host: str = ""
    host_flops: float = 0.0
    byte_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LinkQuality:
    """What was measured between two peers, in one direction.

    Attributes:
        latency_s: one way, half a round trip.
        bandwidth_bps: of one connection; None if there was no time to measure it.
    """

    latency_s: float
    bandwidth_bps: float | None = None

    @classmethod
    def of_preset(cls, preset: LinkPreset) -> LinkQuality:
        """An emulated link as it is on average. Of pieces in order the latest counts, so jitter adds most of itself,
        and the last of the segments of 1448 bytes that are lost on the way adds its round trip."""
        lost = preset.loss * preset.rate_bps * preset.rtt_s / (8 * 1448)
        latency_s = preset.delay_s + 0.75 * preset.jitter_s + preset.rtt_s * lost / (lost + 1)
        return cls(latency_s, preset.rate_bps or None)

    def __str__(self) -> str:
        latency = f"{self.latency_s * 1e3:.3g} ms"
        if self.bandwidth_bps is None:
            return latency
        for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
            if self.bandwidth_bps >= size:
                return f"{self.bandwidth_bps / size:.3g} {unit}, {latency}"
        return f"{self.bandwidth_bps / 1e3:.3g} kbit/s, {latency}"


Edges = frozenset[tuple[str, str]]
"""(from, to), peer ids."""
Links = Mapping[tuple[str, str], LinkQuality]
"""(from, to), peer ids → measurement."""


@dataclass(frozen=True, slots=True)
class DescribedCluster:
    """Members in the order of joining, and links between them.

    Attributes:
        emulated: each connection has a link's rate for itself. burst_bytes: then leave at once after a pause.
    """

    members: tuple[CandidateWorker, ...]
    links: Links
    emulated: bool = False
    burst_bytes: int = 0


def known_link(links: Links, sender: str, receiver: str) -> LinkQuality | None:
    """The measurement from ``sender`` to ``receiver``; the opposite direction fills in what is missing."""
    there, back = links.get((sender, receiver)), links.get((receiver, sender))
    if there is None or back is None or there.bandwidth_bps is not None:
        return there or back
    return LinkQuality(there.latency_s, back.bandwidth_bps)


def both_ways(links: Links) -> Iterable[tuple[str, str]]:
    """The measured pairs and their opposite directions: of a thousand workers few pairs are measured."""
    return dict.fromkeys(pair for sender, receiver in links for pair in ((sender, receiver), (receiver, sender)))


class LinkTimes:
    """Times of bytes over the links between any two of ``ids``. ``known``: any of these links was measured."""

    def __init__(self, links: Links, ids: Iterable[str]) -> None:
        among = frozenset(ids)
        pairs = (pair for pair in both_ways(links) if among.issuperset(pair))
        self._links = {pair: link for pair in pairs if (link := known_link(links, *pair)) is not None}
        self.known = bool(self._links)
        rates = [link.bandwidth_bps for link in self._links.values() if link.bandwidth_bps]
        self._rate_bps = statistics.median(rates) if rates else None
        self._latency_s = statistics.median(link.latency_s for link in self._links.values()) if self.known else 0.0

    def between(self, sender: str, receiver: str, size_bytes: float) -> tuple[float, float]:
        """Seconds of latency, and of the transfer, which occupies the link."""
        link = self._links.get((sender, receiver))
        rate_bps = (link.bandwidth_bps if link else None) or self._rate_bps
        return (link.latency_s if link else self._latency_s), (8 * size_bytes / rate_bps if rate_bps else 0.0)

    def slowest(self, pairs: Iterable[tuple[str, str]], size_bytes: float) -> tuple[float, float]:
        """The longest latency and the longest transfer of several pairs that send at the same time."""
        latencies_s, transfers_s = zip(*(self.between(*pair, size_bytes) for pair in pairs), strict=True)
        return max(latencies_s), max(transfers_s)

    def around(self, circle: Sequence[str], size_bytes: float) -> tuple[float, float]:
        """The mean latency and the longest transfer of the edges of a ring, as for ``all_reduce_s``."""
        edges = [self.between(sender, receiver, size_bytes) for sender, receiver in circle_edges(circle)]
        return sum(latency_s for latency_s, _ in edges) / len(edges), max(transfer_s for _, transfer_s in edges)

    def all_reduce_s(self, circle: Sequence[str], size_bytes: float) -> float:
        """Seconds of an all-reduce of an array of that size in a ring, with whole chunks."""
        latency_s, transfer_s = self.around(circle, size_bytes)
        return all_reduce_s(len(circle), latency_s, chunk_s=transfer_s / len(circle))


def circle_edges(circle: Sequence[Element]) -> list[tuple[Element, Element]]:
    return list(zip(circle, [*circle[1:], *circle[:1]], strict=True))


def all_reduce_s(
    members: int, latency_s: float, *, chunk_s: float, piece_s: float = math.inf, buckets: int = 1
) -> float:
    """Seconds of ``buckets`` all-reduces, one after the other (``ring.collectives``).

    A member sends 2(n-1) chunks for each, all edges at the same time. So only the slowest edge's transfer counts, while
    all hops count. A member may begin to send the next chunk when the first piece of it has arrived, and when it has
    sent the chunk before. The next all-reduce follows the last chunk at once. With whole chunks that is::

        seconds = 2(n-1) (chunk_s + latency_s)

    Args:
        latency_s: of an edge, on average.
        chunk_s, piece_s: to send 1/n of an array over the slowest edge, and a sub-chunk, which is at most that.
    """
    rounds = 2 * (members - 1)
    if not rounds:
        return 0.0
    each_s = (rounds - 1) * max(chunk_s, min(piece_s, chunk_s) + latency_s) + chunk_s
    return buckets * each_s + latency_s
