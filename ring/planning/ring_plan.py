"""Plans a view's ring: the order of its members, streams, sub-chunks and codec, each with its reason. Pure.

An order costs what an all-reduce in it takes (``measurements.all_reduce_s``). A step also makes ``SMALL_GATHERS``
all-gathers of little (``gather_hops``); ``docs/scaling.md`` has the sum beside the simulator.

The order is a heuristic. It goes from each member to the nearest remaining one. Then it reverses stretches as long as
that makes the circle cheaper (2-opt; Croes 1958). ``cuts`` orders the workers of a chain by the same two steps.

An edge whose dialling failed (``apart``) is used only if every other order has one, too. The slowest edge of the chosen
order decides streams, sub-chunks and codec, unless the profile sets them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations

from p2ptrain.core.texts import human_duration
from ring.planning.measurements import (
    Edges,
    LinkQuality,
    Links,
    LinkTimes,
    all_reduce_s,
    circle_edges,
    known_link,
)

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

CANDIDATES = ("fp32", "bf16", "int8", "int4", "topk")
"""The least lossy first. Without fp16: at the size of bf16 it loses small gradients entirely. A profile may set it."""
STATED_ERROR = {
    "fp32": 1e-7,
    "bf16": 0.004,
    "fp16": 0.0005,
    "int8": 0.025,
    "int4": 0.25,
    "topk": 1.0,
}
"""Upper bound of the relative error of one exchange of 8 members without feedback; a test checks it. The error grows
with the root of the number of members, since each hop encodes a partial sum again."""
NEARLY_BEST = 1.1
"""A less lossy codec is preferred if it takes at most a tenth longer than the fastest."""

Matrix = Sequence[Sequence[float]]


# ------------------------------------------------------------------------------------------------------ order of a ring


def visit_nearest_first(costs: Matrix) -> list[int]:
    circle, left = [0], list(range(1, len(costs)))
    while left:
        here = costs[circle[-1]]
        circle.append(min(left, key=here.__getitem__))
        left.remove(circle[-1])
    return circle


def reverse_stretches(circle: Sequence[int], score: Callable[[Sequence[int]], float]) -> list[int]:
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


class RingCosts:
    """Costs of the orders of two or more ``members`` (peer ids), by index. ``total_bytes``: size of the reduced array.
    ``apart``: edges that could not be dialled; their other direction is likely to fail, too."""

    def __init__(
        self, members: Sequence[str], times: LinkTimes, *, total_bytes: int, apart: Edges = frozenset()
    ) -> None:
        edges = [[times.between(sender, receiver, total_bytes) for receiver in members] for sender in members]
        self.transfer_s = [[transfer_s for _, transfer_s in row] for row in edges]
        self.latency_s = [[latency_s for latency_s, _ in row] for row in edges]
        for here, sender in enumerate(members):
            for there, receiver in enumerate(members):
                if (sender, receiver) in apart:
                    self.latency_s[here][there] = APART_S
                elif (receiver, sender) in apart:
                    self.latency_s[here][there] = APART_S / 1e3

    def seconds(self, circle: Sequence[int]) -> float:
        edges, members = circle_edges(circle), len(circle)
        latency_s = sum(self.latency_s[here][there] for here, there in edges) / members
        slowest_s = max(self.transfer_s[here][there] for here, there in edges)
        return all_reduce_s(members, latency_s, chunk_s=slowest_s / members)

    def score(self, circle: Sequence[int]) -> float:
        """``seconds`` plus a little of each transfer, so that removing one of two equally slow edges counts as a
        gain."""
        sent_s = sum(self.transfer_s[here][there] for here, there in circle_edges(circle))
        return self.seconds(circle) + 1e-3 * all_reduce_s(len(circle), 0.0, chunk_s=sent_s / len(circle))


def find_best_order(
    members: Sequence[str], links: Links, *, total_bytes: int, apart: Edges = frozenset()
) -> tuple[tuple[str, ...], float, float] | None:
    """A fast order for an all-reduce of ``total_bytes``, its seconds, and the seconds of the given order.

    It begins with ``members[0]``. The given order is kept unless the other is faster by more than ``MARGIN``. Returns
    None if nothing is known of any link. ``APART_S`` or more seconds: the order has an edge of ``apart``.
    """
    times = LinkTimes(links, members)
    if len(members) < 2 or not (times.known or apart):
        return None
    costs = RingCosts(members, times, total_bytes=total_bytes, apart=apart)
    joined = list(range(len(members)))
    joined_s = costs.seconds(joined)
    if apart and len(members) <= FEW_MEMBERS:
        tried = ([0, *rest] for rest in permutations(joined[1:]))  # a reversal would turn other edges round, too
    else:
        rows = zip(costs.transfer_s, costs.latency_s, strict=True)
        near = visit_nearest_first([[a + b for a, b in zip(*row, strict=True)] for row in rows])
        tried = (reverse_stretches(start, costs.score) for start in (near, joined))
    both_ways = (way for circle in tried for way in (circle, circle[:1] + circle[:0:-1]))
    seconds, circle = min((costs.seconds(way), way) for way in both_ways)
    if joined_s <= seconds * (1 + MARGIN):
        circle, seconds = joined, joined_s
    return tuple(members[index] for index in circle), seconds, joined_s


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
    left, right, slowest = find_slowest_edge(order, links)
    near, streams, streams_reason = True, 1, " (none is measured)"
    if slowest is not None:
        reason += f"; slowest edge {name(left)} → {name(right)}: {slowest}"
        near = 2 * slowest.latency_s < NEAR_RTT_S
        streams, streams_reason = 1 if near else STRIPES, f" (round trip {2e3 * slowest.latency_s:.3g} ms)"
    if ring_options.streams:
        streams, streams_reason = ring_options.streams, ", as ring.streams says"
    codec, codec_reason = choose_codec(slowest, ring_options, total_bytes, compute_s, len(order))
    transport_reason = f"{streams} connection{'s' * (streams != 1)} per link{streams_reason}; {codec_reason}"
    # On a far link a frame of 256 KiB has little overhead, and store-and-forward adds little delay.
    sub_chunk_bytes = ring_options.sub_chunk_bytes or (0 if near else 256 << 10)
    return RingPlan(tuple(order), streams, sub_chunk_bytes, codec, slowest is not None, reason, transport_reason)


def find_slowest_edge(order: Sequence[str], links: Links) -> tuple[str, str, LinkQuality | None]:
    """(from, to, measurement) of the measured edge with the least bandwidth, then the most latency; None if none is
    measured."""
    pairs = circle_edges(order) if len(order) > 1 else ()
    edges = [(left, right, link) for left, right in pairs if (link := known_link(links, left, right)) is not None]
    if not edges:
        return "", "", None
    return min(edges, key=lambda edge: (edge[2].bandwidth_bps or math.inf, -edge[2].latency_s))


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
    found = find_best_order(joined, links, total_bytes=total_bytes or 4 << 20, apart=apart)
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


def choose_codec(
    slowest: LinkQuality | None, ring_options: RingOptions, total_bytes: int, compute_s: float, members: int
) -> tuple[str, str]:
    """Choose the codec for a ring by its slowest edge. Returns its name and the reason.

    It is the least lossy codec whose exchange takes at most ``compute_s``, behind which it is hidden, or is within a
    tenth of the fastest. A codec whose ``STATED_ERROR`` is above the budget is never chosen, except fp32. Arguments are
    as in ``plan_ring``.
    """
    if ring_options.codec != "auto":
        return ring_options.codec, f"codec {ring_options.codec}, as the profile says"
    if slowest is None or slowest.bandwidth_bps is None or not total_bytes:
        return "fp32", "codec fp32: the links' bandwidth or the bytes of a step are not known"
    from ring.codecs import codec_named  # imports numpy, which a seed needs for nothing else

    needed_s = {}
    for name in CANDIDATES:
        if name == "fp32" or STATED_ERROR[name] <= ring_options.error_budget:
            encoded_bytes = total_bytes * codec_named(name).encoded_bytes(1 << 20) / (4 << 20)
            chunk_s = 8 * encoded_bytes / members / slowest.bandwidth_bps
            needed_s[name] = all_reduce_s(members, slowest.latency_s, chunk_s=chunk_s)
    limit_s = max(compute_s, NEARLY_BEST * min(needed_s.values()))
    codec = next(name for name, each_s in needed_s.items() if each_s <= limit_s)
    rate = f"{slowest.bandwidth_bps / 1e6:,.{0 if slowest.bandwidth_bps >= 1e7 else 2}f} Mbit/s"
    text = f"{codec} takes {human_duration(needed_s[codec])} at {rate}, computing takes {human_duration(compute_s)}"
    return codec, f"codec {codec}: {text}"
