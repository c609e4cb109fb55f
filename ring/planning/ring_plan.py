"""Plans a view's ring: the order of its members, streams, sub-chunks and codec, each with its reason. Pure.

What an order costs
-------------------
In an all-reduce of B bytes over n members every edge of the circle carries 2(n-1)/n B bytes, and every element makes
2(n-1) hops (``ring.collectives``). All edges work at the same time, and a piece is passed on as soon as it has arrived.
So only the slowest edge's transfer counts, while all hops count, one after the other::

    seconds = max over edges of 2(n-1)/n B / bandwidth   +   2(n-1)/n  sum over edges of latency

A step also makes ``SMALL_GATHERS`` all-gathers of little, n-1 hops each; ``docs/scaling.md`` has the sum beside the
simulator. ``all_reduce_s`` also knows pieces and buckets: with chunks of many pieces an edge is never idle, and all
hops but the last one cost nothing.

The order is a heuristic. It goes from each member to the nearest remaining one. Then it reverses stretches as long as
that makes the circle cheaper (2-opt; Croes 1958). ``serving`` orders the peers of a chain by the same two steps.

An edge that was measured in one direction counts in both. An edge that was never measured counts as the median of the
measured ones. An edge whose dialling failed (``apart``) is used only if every other order has one, too.

The slowest edge of the chosen order decides streams, sub-chunks and codec, unless the profile sets them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations

MOST_MEMBERS = 128
"""A larger ring keeps the order of joining: it has more than 16,000 pairs to measure."""
FEW_MEMBERS = 7
"""So many have 720 orders, which can all be tried."""
MARGIN = 0.05
"""Least relative gain of time for a new order: measurements repeat within about that."""
APART_S = 1e9
"""Cost of an impossible edge: more than any order costs, but finite, so that sums of it can be compared."""
STRIPES = 4
"""Bulk connections over a link with a long round trip: the window of one flow may not fill it."""
NEAR_RTT_S = 2e-3
"""Below this round trip one flow fills a link of gigabits: the bandwidth-delay product is within any window."""


SMALL_GATHERS = 2
"""All-gathers of a step: of what no codec encodes (norms, biases, losses), and of the members' tokens."""


@dataclass(frozen=True, slots=True)
class LinkQuality:
    """What was measured between two peers, in one direction.

    Attributes:
        latency_s: one way, half a round trip.
        bandwidth_bps: of one connection; None if there was no time to measure it.
    """

    latency_s: float
    bandwidth_bps: float | None = None


Edges = frozenset[tuple[str, str]]
"""(from, to), peer ids."""
Links = Mapping[tuple[str, str], LinkQuality]
"""(from, to), peer ids → measurement."""
Matrix = Sequence[Sequence[float]]


def known_link(links: Links, one: str, other: str) -> LinkQuality | None:
    """The measurement from ``one`` to ``other``; the opposite direction fills in what is missing."""
    there, back = links.get((one, other)), links.get((other, one))
    if there is None or back is None or there.bandwidth_bps is not None:
        return there or back
    return LinkQuality(there.latency_s, back.bandwidth_bps)


class LinkCosts:
    """(latency, transfer) seconds between any two of ``ids``. ``known``: any link between them was measured."""

    def __init__(self, links: Links, ids: Iterable[str]) -> None:
        among = list(ids)
        pairs = [(one, other) for one in among for other in among if one != other] if links else []
        self._links = {pair: link for pair in pairs if (link := known_link(links, *pair)) is not None}
        self.known = bool(self._links)
        rates = [link.bandwidth_bps for link in self._links.values() if link.bandwidth_bps]
        self._rate_bps = statistics.median(rates) if rates else None
        self._latency_s = statistics.median(link.latency_s for link in self._links.values()) if self.known else 0.0

    def between(self, one: str, other: str, size_bytes: float) -> tuple[float, float]:
        link = self._links.get((one, other))
        rate_bps = (link.bandwidth_bps if link else None) or self._rate_bps
        return (link.latency_s if link else self._latency_s), (8 * size_bytes / rate_bps if rate_bps else 0.0)


# -------------------------------------------------------------------------------------------------------- the heuristic


def steps(circle: Sequence[int]) -> Iterator[tuple[int, int]]:
    return zip(circle, (*circle[1:], circle[0]), strict=True)


def nearest_first(costs: Matrix) -> list[int]:
    circle, left = [0], list(range(1, len(costs)))
    while left:
        here = costs[circle[-1]]
        circle.append(min(left, key=here.__getitem__))
        left.remove(circle[-1])
    return circle


def turned_around(circle: Sequence[int], score: Callable[[Sequence[int]], float]) -> list[int]:
    """``circle`` after reversing stretches that lower ``score`` (2-opt). The first element stays the first."""
    best = list(circle)
    least, improved = score(best), True
    looks = 200_000  # limit of edges looked at: a tenth of a second
    while improved and looks > 0:
        improved = False
        for start, stop in combinations(range(1, len(best) + 1), 2):
            trial = best[:start] + best[start:stop][::-1] + best[stop:]
            looks -= len(best)
            if (value := score(trial)) < least:
                best, least, improved = trial, value, True
    return best


# ------------------------------------------------------------------------------------------------------ order of a ring


class RingCosts:
    """Costs of the edges between two or more ``members`` (peer ids), by index. ``total_bytes``: size of the reduced
    array. ``apart``: edges that could not be dialled; their other direction is likely to fail, too."""

    def __init__(
        self, members: Sequence[str], ways: LinkCosts, *, total_bytes: int, apart: Edges = frozenset()
    ) -> None:
        size = len(members)
        each = 2 * (size - 1) / size
        self.transfer_s = [[0.0] * size for _ in members]
        self.hop_s = [[0.0] * size for _ in members]
        for here, one in enumerate(members):
            for there, other in enumerate(members):
                latency_s, self.transfer_s[here][there] = ways.between(one, other, each * total_bytes)
                unlikely_s = APART_S / 1e3 if (other, one) in apart else each * latency_s
                self.hop_s[here][there] = APART_S if (one, other) in apart else unlikely_s

    def seconds(self, circle: Sequence[int]) -> float:
        edges = list(steps(circle))
        slowest_s = max(self.transfer_s[here][there] for here, there in edges)
        return slowest_s + sum(self.hop_s[here][there] for here, there in edges)

    def score(self, circle: Sequence[int]) -> float:
        """``seconds`` plus a little of each transfer, so that removing one of two equally slow edges counts as a
        gain."""
        return self.seconds(circle) + 1e-3 * sum(self.transfer_s[here][there] for here, there in steps(circle))


def best_order(
    members: Sequence[str], links: Links, *, total_bytes: int, apart: Edges = frozenset()
) -> tuple[tuple[str, ...], float, float] | None:
    """A fast order for an all-reduce of ``total_bytes``, its seconds, and the seconds of the given order.

    It begins with ``members[0]``. The given order is kept unless the other is faster by more than ``MARGIN``. Returns
    None if nothing is known of any link. ``APART_S`` or more seconds: the order has an edge of ``apart``.
    """
    ways = LinkCosts(links, members)
    if len(members) < 2 or not (ways.known or apart):
        return None
    costs = RingCosts(members, ways, total_bytes=total_bytes, apart=apart)
    joined = list(range(len(members)))
    joined_s = costs.seconds(joined)
    edge_s = [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(costs.transfer_s, costs.hop_s, strict=True)]
    if apart and len(members) <= FEW_MEMBERS:
        tried = ([0, *rest] for rest in permutations(joined[1:]))  # a reversal would turn other edges round, too
    else:
        tried = (turned_around(start, costs.score) for start in (nearest_first(edge_s), joined))
    both_ways = (way for circle in tried for way in (circle, circle[:1] + circle[:0:-1]))
    circle = min(both_ways, key=lambda way: (costs.seconds(way), way))
    seconds = costs.seconds(circle)
    if joined_s <= seconds * (1 + MARGIN):
        circle, seconds = joined, joined_s
    return tuple(members[index] for index in circle), seconds, joined_s


def all_reduce_s(
    members: int, latency_s: float, *, chunk_s: float, piece_s: float = math.inf, buckets: int = 1
) -> float:
    """Seconds of ``buckets`` all-reduces, one after the other.

    A member sends 2(n-1) chunks for each. It may begin to send the next chunk when the first piece of it has arrived,
    and when it has sent the chunk before. The next all-reduce follows the last chunk at once.

    Args:
        chunk_s, piece_s: to send 1/n of an array, and a sub-chunk, which is at most that.
    """
    rounds = 2 * (members - 1)
    if not rounds:
        return 0.0
    each_s = (rounds - 1) * max(chunk_s, min(piece_s, chunk_s) + latency_s) + chunk_s
    return buckets * each_s + latency_s


# ----------------------------------------------------------------------------------------------- plan of a whole ring


@dataclass(frozen=True, slots=True)
class RingOptions:
    """The settings of the ``[ring]`` table of a profile that the plan uses (``configs.schema.Ring``)."""

    order: str = "auto"
    streams: int = 0
    sub_chunk_bytes: int = 0
    codec: str = "fp32"
    error_budget: float = 0.03


@dataclass(frozen=True, slots=True)
class RingPlan:
    """How a ring runs. ``order`` has peer ids; the others are as in ``ring.view.View``.

    Attributes:
        measured: any edge of the order was measured.
        reason: of the order, with its slowest edge, for messages. transport_reason: of streams and codec.
    """

    order: tuple[str, ...]
    streams: int
    sub_chunk_bytes: int
    codec: str
    measured: bool
    reason: str
    transport_reason: str


def plan_ring(
    joined: Sequence[str],
    links: Links,
    ring_options: RingOptions,
    total_bytes: int = 0,
    compute_s: float = 0.0,
    *,
    apart: Edges = frozenset(),
    name: Callable[[str], str] = str,
) -> RingPlan:
    """Plan a ring of ``joined``, which has the order to use without measurements.

    Args:
        total_bytes: of the array that a step reduces, as float32; 0: unknown.
        compute_s: seconds of a step during which the exchange may run; 0: unknown.
        apart: edges that could not be dialled.
    """
    order, reason = _order(joined, links, ring_options, total_bytes, apart)
    left, right, slowest = slowest_edge(order, links)
    if slowest is not None:
        reason += f"; slowest edge {name(left)} → {name(right)}: {described(slowest)}"
    streams, streams_reason = _streams(slowest, ring_options)
    codec, codec_reason = _codec(slowest, ring_options, total_bytes, compute_s, len(order))
    transport_reason = f"{streams_reason}; {codec_reason}"
    # On a far link a frame of 256 KiB has little overhead, and store-and-forward adds little delay.
    far = slowest is not None and not _is_near(slowest)
    sub_chunk_bytes = ring_options.sub_chunk_bytes or (256 << 10 if far else 0)
    return RingPlan(tuple(order), streams, sub_chunk_bytes, codec, slowest is not None, reason, transport_reason)


def slowest_edge(order: Sequence[str], links: Links) -> tuple[str, str, LinkQuality | None]:
    """(from, to, measurement) of the measured edge with the least bandwidth, then the most latency; None if none is
    measured."""
    pairs = zip(order, [*order[1:], *order[:1]], strict=True) if len(order) > 1 else ()
    edges = [(left, right, link) for left, right in pairs if (link := known_link(links, left, right)) is not None]
    if not edges:
        return "", "", None
    return min(edges, key=lambda edge: (edge[2].bandwidth_bps or math.inf, -edge[2].latency_s))


def described(link: LinkQuality) -> str:
    latency = f"{link.latency_s * 1e3:.3g} ms"
    if link.bandwidth_bps is None:
        return latency
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if link.bandwidth_bps >= size:
            return f"{link.bandwidth_bps / size:.3g} {unit}, {latency}"
    return f"{link.bandwidth_bps / 1e3:.3g} kbit/s, {latency}"


def _order(
    joined: Sequence[str], links: Links, ring_options: RingOptions, total_bytes: int, apart: Edges
) -> tuple[Sequence[str], str]:
    if ring_options.order == "joined":
        links = {}
        if not apart:
            return joined, "order as they joined, as the profile says"
    if len(joined) < 3:
        return joined, "order as they joined: fewer than 3 members have only one order"
    if len(joined) > MOST_MEMBERS:
        return joined, f"order as they joined: only up to {MOST_MEMBERS} members are reordered"
    # The size hardly changes the order: 4 MiB if no worker has reported it.
    found = best_order(joined, links, total_bytes=total_bytes or 4 << 20, apart=apart)
    if found is None:
        return joined, "order as they joined: no link between them is measured"
    order, seconds, joined_s = found
    if seconds >= APART_S:
        return joined, "order as they joined: each order tried has a member that could not reach the next one"
    if joined_s >= APART_S / 1e3 and order != tuple(joined):
        return order, "not the order as they joined, in which two neighbours may not reach each other"
    if order == tuple(joined):
        return joined, "order as they joined: no other order is known to be much faster"
    return order, f"order from measured links, {joined_s / seconds:.2g} times as fast as the order of joining"


def _streams(link: LinkQuality | None, ring_options: RingOptions) -> tuple[int, str]:
    if count := ring_options.streams:
        return count, f"{count} connection{'s' * (count != 1)} per link, as ring.streams says"
    if link is None:
        return 1, "1 connection per link (none is measured)"
    count, round_trip_ms = 1 if _is_near(link) else STRIPES, 2e3 * link.latency_s
    return count, f"{count} connection{'s' * (count != 1)} per link (round trip {round_trip_ms:.3g} ms)"


def _is_near(link: LinkQuality) -> bool:
    return 2 * link.latency_s < NEAR_RTT_S


def _codec(
    slowest: LinkQuality | None, ring_options: RingOptions, total_bytes: int, compute_s: float, size: int
) -> tuple[str, str]:
    if ring_options.codec != "auto":
        return ring_options.codec, f"codec {ring_options.codec}, as the profile says"
    if slowest is None or slowest.bandwidth_bps is None or not total_bytes:
        return "fp32", "codec fp32: the links' bandwidth or the bytes of a step are not known"
    from ring.planning.codec import choose_codec  # imports numpy, which a seed needs for nothing else

    codec, reason = choose_codec(
        edge_bps=slowest.bandwidth_bps,
        rtt_s=2 * (size - 1) * slowest.latency_s,
        total_bytes=round(2 * (size - 1) / size * total_bytes),
        compute_s=compute_s,
        error_budget=ring_options.error_budget,
    )
    return codec, f"codec {codec}: {reason}"
