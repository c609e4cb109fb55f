"""How a view's ring is to run: order, streams, sub-chunks and codec, each with its reason in words. Pure.

The slowest edge of the order that was chosen decides the rest, because all members must agree and it is what the others
wait for. What the profile sets is taken as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ring.order import MOST_MEMBERS, STRIPES, Found, LinkQuality, Links, best_order, known_link
from ring.view import MAX_STREAMS

NEAR_RTT_S = 2e-3
"""Below this round trip one flow fills a link of gigabits: its bandwidth-delay product is within any window."""
FAR_SUB_CHUNK_BYTES = 256 << 10
"""Over a far link: long enough that its frame costs nothing, short enough that to store and forward it is no delay."""
STRIPING_GAIN = 1.25
"""Striping that carries less than that much more is not worth the connections: measurements differ by as much."""
UNKNOWN_BYTES = 4 << 20
"""What a step's exchange counts as where no worker has said: the order hardly depends on it."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """The ``[ring]`` table of a profile, as far as it concerns the plan (``configs.schema.Ring``)."""

    order: str = "auto"
    streams: int = 0
    sub_chunk_bytes: int = 0
    codec: str = "fp32"
    error_budget: float = 0.03


@dataclass(frozen=True, slots=True)
class Load:
    """What a step asks of the ring.

    Attributes:
        total_bytes: of the array that is reduced, as float32; 0 where it is not known.
        compute_s: of a step, during which it can be exchanged; 0 where it is not known.
    """

    total_bytes: int = 0
    compute_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Edge:
    """A measured edge of the ring, from ``left`` to its right neighbour."""

    left: str
    right: str
    link: LinkQuality


@dataclass(frozen=True, slots=True)
class RingPlan:
    """``order`` is of peer ids; the others are as in ``ring.view.View``.

    Attributes:
        slowest: the slowest measured edge of the order; None where none was measured.
        reason: why this order, and its slowest edge, for people; ``carriage_reason``: why these streams and this codec.
    """

    order: tuple[str, ...]
    streams: int
    sub_chunk_bytes: int
    codec: str
    slowest: Edge | None
    reason: str
    carriage_reason: str


def plan_ring(
    joined: Sequence[str],
    links: Links,
    wishes: Wishes,
    load: Load,
    *,
    apart: Iterable[frozenset[str]] = (),
    name: Callable[[str], str] = str,
) -> RingPlan:
    """The plan for a ring of ``joined``, which is in the order that it has without any measurement.

    Args:
        apart: pairs that cannot be neighbours; ``joined`` respects them as far as that is possible.
        name: of a peer, for the reason.
    """
    order, reason = _order(joined, links, wishes, load, set(apart))
    slowest = slowest_edge(order, links)
    if slowest is not None:
        reason += f"; slowest edge {name(slowest.left)} → {name(slowest.right)}: {described(slowest.link)}"
    streams, streams_reason = _streams(slowest, wishes)
    codec, codec_reason = _codec(slowest, wishes, load, len(order), streams)
    carriage_reason = f"{streams_reason}; {codec_reason}"
    far = slowest is not None and not _is_near(slowest.link)
    sub_chunk_bytes = wishes.sub_chunk_bytes or (FAR_SUB_CHUNK_BYTES if far else 0)
    return RingPlan(tuple(order), streams, sub_chunk_bytes, codec, slowest, reason, carriage_reason)


def slowest_edge(order: Sequence[str], links: Links) -> Edge | None:
    """Of the ring's edges that were measured, the one of least bandwidth, then of most latency; None where none was."""
    if len(order) < 2:
        return None
    pairs = zip(order, [*order[1:], order[0]], strict=True)
    edges = [Edge(left, right, link) for left, right in pairs if (link := known_link(links, left, right)) is not None]
    return min(edges, key=lambda edge: (edge.link.bandwidth_bps or math.inf, -edge.link.latency_s), default=None)


def described(link: LinkQuality) -> str:
    """The link in words, such as ``98 Mbit/s, 20.1 ms``."""
    latency = f"{link.latency_s * 1e3:.3g} ms"
    if link.bandwidth_bps is None:
        return latency
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if link.bandwidth_bps >= size:
            return f"{link.bandwidth_bps / size:.3g} {unit}, {latency}"
    return f"{link.bandwidth_bps / 1e3:.3g} kbit/s, {latency}"


def _order(
    joined: Sequence[str], links: Links, wishes: Wishes, load: Load, apart: set[frozenset[str]]
) -> tuple[Sequence[str], str]:
    if wishes.order == "joined":
        return joined, "order as they joined, as the profile says"
    if len(joined) < 3:
        return joined, "order as they joined: there is one circle only"
    if len(joined) > MOST_MEMBERS:  # not even looked at: all pairs are many
        return joined, f"order as they joined: more than {MOST_MEMBERS} are not searched"
    found: Found | None = best_order(joined, links, total_bytes=load.total_bytes or UNKNOWN_BYTES, apart=apart)
    if found is None:
        known = slowest_edge(joined, links) is not None
        why = "no other keeps apart those that cannot be neighbours" if known else "no link between them is measured"
        return joined, f"order as they joined: {why}"
    if found.order == tuple(joined):
        return joined, "order as they joined: none is known to be much faster"
    gain = found.joined_s / found.seconds
    return found.order, f"order from measured links, {gain:.2g} times as fast as the order of joining"


def _streams(slowest: Edge | None, wishes: Wishes) -> tuple[int, str]:
    if wishes.streams:
        return wishes.streams, f"{_counted(wishes.streams)}, as the profile says"
    if slowest is None:
        return 1, "1 stream: nothing is known of the links"
    link = slowest.link
    if _is_near(link):
        return 1, "1 stream: the members are near each other"
    if link.bandwidth_bps is None or link.striped_bps is None:
        return 1, "1 stream: what several carry was not measured"
    gain = link.striped_bps / link.bandwidth_bps
    if gain < STRIPING_GAIN:
        return 1, "1 stream: it fills the link"
    streams = min(math.ceil(gain), STRIPES)
    if gain >= 0.8 * STRIPES:  # nothing but the window of each flow held them back: there is room for more
        streams = min(2 * STRIPES, MAX_STREAMS)
    return streams, f"{_counted(streams)}: {STRIPES} carried {gain:.2g} times what one does"


def _is_near(link: LinkQuality) -> bool:
    return 2 * link.latency_s < NEAR_RTT_S


def _counted(streams: int) -> str:
    return "1 stream" if streams == 1 else f"{streams} streams"


def _codec(slowest: Edge | None, wishes: Wishes, load: Load, size: int, streams: int) -> tuple[str, str]:
    if wishes.codec != "auto":
        return wishes.codec, f"codec {wishes.codec}, as the profile says"
    if slowest is None or slowest.link.bandwidth_bps is None or not load.total_bytes:
        return "fp32", "codec fp32: nothing is known of the links, or of what a step sends"
    from ring.codecs.choice import choose_codec  # brings numpy, for which a seed has no other use

    striped_bps = slowest.link.striped_bps if streams > 1 else None
    codec, reason = choose_codec(
        edge_bps=striped_bps or slowest.link.bandwidth_bps,
        rtt_s=2 * (size - 1) * slowest.link.latency_s,
        total_bytes=round(2 * (size - 1) / size * load.total_bytes),
        compute_s=load.compute_s,
        error_budget=wishes.error_budget,
    )
    return codec, f"codec {codec}: {reason}"
