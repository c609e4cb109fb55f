"""Who sits beside whom: the circle of members in which an all-reduce takes least time. Pure.

What an order costs
-------------------
In an all-reduce of B bytes over n members every edge of the circle carries 2(n-1)/n B bytes, and every element goes
2(n-1) hops (``ring.collectives``). All edges work at the same time, and a piece is passed on as soon as it is there. So
of the transfers only that over the slowest edge counts, while of the hops all count, one after the other::

    seconds = max over edges of 2(n-1)/n B / bandwidth   +   2(n-1)/n  sum over edges of (latency + piece / bandwidth)

(Without pieces each of 2(n-1) rounds waits for its slowest edge: 2(n-1) (latency + B/n / bandwidth) of that edge, which
is the upper bound of this. Minimizing the first term alone is the bottleneck travelling salesman's problem, the second
alone is the plain one's; their sum is no easier.)

Search. Up to ``EXACT_MEMBERS`` the best order is found for sure: dynamic programming over (set of members visited, the
last of them) as Held and Karp (1962), which keeps of each state the pairs (slowest transfer, hops so far) of which
neither is better in both, and drops what cannot beat the best order that is known. Beyond, greedy circles are improved
by the classic moves (turn a part around, move a part elsewhere; Croes 1958, Or 1976) at the edges that cost most, until
no move helps or the budget of looked-at edges is used up: within a tenth of the best where links follow from places (a
test), seen up to twice it where they follow from nothing. Both are deterministic.

What is not known
-----------------
An edge that was measured in one direction only is taken to be alike in the other. An edge that never was is taken to be
as the median of those that were: a guess of better would send the ring over links nobody has tried, a guess of worse
would never try them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

EXACT_MEMBERS = 10
"""Seen to take 45 ms at most, its start included; with 11 members it was 85 ms, and each one more doubles it."""
MOST_MEMBERS = 128
"""A larger ring keeps the order that it has: so many members take 120 ms, and their pairs are 16,000 to measure."""
MARGIN = 0.05
"""Of an order's time: measurements repeat within about that. Nothing is turned over for less."""
LEAST_PIECE_BYTES, PIECES_A_CHUNK = 64 << 10, 4
"""How a session cuts what a member owns of the array, where it is left to itself."""

_APART_S = 1e9  # more than any order costs, and finite: sums of it can be compared
_GREEDY = 16  # circles that are begun at different members; the three best are improved
_BUDGET = 200_000  # edges looked at by the improvement; some 40 ms


@dataclass(frozen=True, slots=True)
class LinkQuality:
    """What was measured between two peers, in one direction.

    Attributes:
        latency_s: one way, half a round trip.
        bandwidth_bps: what one connection carried; None where there was no time to measure it.
        striped_bps: what ``STRIPES`` connections carried together; None where that was not tried.
    """

    latency_s: float
    bandwidth_bps: float | None = None
    striped_bps: float | None = None


STRIPES = 4
"""Connections that are tried together on a link whose round trip is long."""

Links = Mapping[tuple[str, str], LinkQuality]
"""(from, to), peer ids → what was measured."""


@dataclass(frozen=True, slots=True)
class Found:
    """An order and what is known of it. ``joined_s`` is what the order of joining would take."""

    order: tuple[str, ...]
    seconds: float
    joined_s: float
    exact: bool


class Costs:
    """What edges between ``members`` cost, by index.

    Args:
        members: peer ids; two at least. total_bytes: of the array that is reduced.
        apart: pairs that must not be neighbours.
    Raises: ``ValueError`` where no link between them is known.
    """

    def __init__(
        self, members: Sequence[str], links: Links, *, total_bytes: int, apart: Iterable[frozenset[str]] = ()
    ) -> None:
        self.size = len(members)
        each = 2 * (self.size - 1) / self.size
        known = {pair: link for pair in _pairs(members) if (link := known_link(links, *pair)) is not None}
        if not known:
            raise ValueError("no link between these members is known")
        latency_s = statistics.median(link.latency_s for link in known.values())
        rates = [link.bandwidth_bps for link in known.values() if link.bandwidth_bps]
        rate_bps = statistics.median(rates) if rates else None
        forbidden, chunk_bytes = set(apart), total_bytes / self.size
        piece_bytes = min(chunk_bytes, max(chunk_bytes / PIECES_A_CHUNK, LEAST_PIECE_BYTES))
        self.transfer_s = [[0.0] * self.size for _ in members]
        self.hop_s = [[0.0] * self.size for _ in members]
        for here, one in enumerate(members):
            for there, other in enumerate(members):
                link = known.get((one, other))
                byte_s = _byte_s((link and link.bandwidth_bps) or rate_bps)
                self.hop_s[here][there] = each * ((link.latency_s if link else latency_s) + piece_bytes * byte_s)
                too_bad = _APART_S if frozenset({one, other}) in forbidden else 0.0
                self.transfer_s[here][there] = each * total_bytes * byte_s + too_bad

    def seconds(self, circle: Sequence[int]) -> float:
        """What an all-reduce over the circle takes."""
        slowest_s = hops_s = 0.0
        here = circle[-1]
        for there in circle:
            slowest_s = max(slowest_s, self.transfer_s[here][there])
            hops_s += self.hop_s[here][there]
            here = there
        return slowest_s + hops_s


def best_order(
    members: Sequence[str], links: Links, *, total_bytes: int, apart: Iterable[frozenset[str]] = ()
) -> Found | None:
    """The order in which an all-reduce of ``total_bytes`` is fastest; it begins with ``members[0]``.

    The order given is kept where no other is faster by more than ``MARGIN``. None where nothing is known of any link,
    or where no order keeps all pairs of ``apart`` from being neighbours.
    """
    size, forbidden = len(members), set(apart)
    if size < 2 or not any(known_link(links, *pair) for pair in _pairs(members)):
        return None
    costs = Costs(members, links, total_bytes=total_bytes, apart=forbidden)
    joined = list(range(size))
    joined_s = costs.seconds(joined)
    if size > MOST_MEMBERS:
        circle, exact = joined, False
    else:
        circle, exact = _improved(costs), size <= EXACT_MEMBERS
        if exact:
            circle = _exact(costs, circle)
        circle = _canonical(costs, circle)
    seconds = costs.seconds(circle)
    if joined_s <= seconds * (1 + MARGIN):
        circle, seconds = joined, joined_s
    if seconds >= _APART_S:
        return None
    return Found(tuple(members[index] for index in circle), seconds, joined_s, exact)


def known_link(links: Links, one: str, other: str) -> LinkQuality | None:
    """What was measured from ``one`` to ``other``; what that lacks is taken from the way back."""
    there, back = links.get((one, other)), links.get((other, one))
    if there is None or back is None or there.bandwidth_bps is not None:
        return there or back
    return LinkQuality(there.latency_s, back.bandwidth_bps, back.striped_bps)


def _pairs(members: Sequence[str]) -> Iterable[tuple[str, str]]:
    return ((one, other) for one in members for other in members if one != other)


def _byte_s(rate_bps: float | None) -> float:
    return 8 / rate_bps if rate_bps else 0.0


def _canonical(costs: Costs, circle: list[int]) -> list[int]:
    """The same circle from member 0 on; of the two ways round the one that costs less, then the one that is sorted."""
    start = circle.index(0)
    onward = circle[start:] + circle[:start]
    backward = onward[:1] + onward[:0:-1]
    return min(onward, backward, key=lambda way: (costs.seconds(way), way))


# ------------------------------------------------------------------------------------------------------ exact search


@dataclass(frozen=True, slots=True)
class _Path:
    """A path from member 0: its slowest transfer, its hops, where it ends, and the path before that."""

    slowest_s: float
    hops_s: float
    last: int
    before: _Path | None


def _exact(costs: Costs, known: list[int]) -> list[int]:
    """The circle that costs least; ``known`` where none costs less than that."""
    size, transfer_s, hop_s = costs.size, costs.transfer_s, costs.hop_s
    best_s, best = costs.seconds(known), None
    least_hop_s = [min(hop_s[one][other] for one in range(size) if one != other) for other in range(size)]
    least_transfer_s = [min(transfer_s[one][other] for one in range(size) if one != other) for other in range(size)]
    everybody = (1 << size) - 1
    level: dict[tuple[int, int], list[_Path]] = {(1, 0): [_Path(0.0, 0.0, 0, None)]}
    for _ in range(size - 1):
        following: dict[tuple[int, int], list[_Path]] = {}
        for (visited, here), paths in level.items():
            for there in range(size):
                if visited >> there & 1:
                    continue
                now_visited = visited | 1 << there
                left = [other for other in range(size) if not now_visited >> other & 1] + [0]
                rest_hops_s = sum(least_hop_s[other] for other in left)
                rest_slowest_s = max(least_transfer_s[other] for other in left)
                for path in paths:
                    slowest_s = max(path.slowest_s, transfer_s[here][there])
                    hops_s = path.hops_s + hop_s[here][there]
                    if max(slowest_s, rest_slowest_s) + hops_s + rest_hops_s < best_s * (1 - 1e-12):
                        _keep(following.setdefault((now_visited, there), []), _Path(slowest_s, hops_s, there, path))
        level = following
    for (visited, here), paths in level.items():
        assert visited == everybody
        for path in paths:
            seconds = max(path.slowest_s, transfer_s[here][0]) + path.hops_s + hop_s[here][0]
            if seconds < best_s:
                best_s, best = seconds, path
    return _walked(best) if best is not None else known


def _keep(paths: list[_Path], new: _Path) -> None:
    """Add ``new`` unless one is at least as good in both; drop those that it is as good as in both."""
    for path in paths:
        if path.slowest_s <= new.slowest_s and path.hops_s <= new.hops_s:
            return
    paths[:] = [path for path in paths if path.slowest_s < new.slowest_s or path.hops_s < new.hops_s]
    paths.append(new)


def _walked(path: _Path | None) -> list[int]:
    circle = []
    while path is not None:
        circle.append(path.last)
        path = path.before
    return circle[::-1]


# -------------------------------------------------------------------------------------------------------- improvement


def _improved(costs: Costs) -> list[int]:
    """The best of: the order given, and a few greedy circles, each after moves at its costliest edges."""
    begins = range(0, costs.size, -(-costs.size // _GREEDY))
    greedy = sorted((_greedy(costs, start) for start in begins), key=costs.seconds)
    starts = [list(range(costs.size)), *greedy[:3]]
    return min((_moved(costs, start, _BUDGET // len(starts)) for start in starts), key=costs.seconds)


def _greedy(costs: Costs, start: int) -> list[int]:
    """From each member on to the nearest that is left."""
    circle, left = [start], set(range(costs.size)) - {start}
    while left:
        here = circle[-1]
        there = min(left, key=lambda other: (costs.transfer_s[here][other] + costs.hop_s[here][other], other))
        circle.append(there)
        left.remove(there)
    return circle


def _moved(costs: Costs, circle: list[int], budget: int) -> list[int]:
    """``circle`` after the moves that make it cheaper. A little of each transfer counts beside the slowest one: where
    two edges are equally slow, to be rid of one of them is a way to be rid of both."""
    size, transfer_s = costs.size, costs.transfer_s

    def score(trial: list[int]) -> float:
        pairs = zip(trial[-1:] + trial[:-1], trial, strict=True)
        return costs.seconds(trial) + 1e-3 * sum(transfer_s[here][there] for here, there in pairs)

    now, looks_left = score(circle), budget // (2 * size)
    improved = True
    while improved and looks_left > 0:
        improved = False
        for rank in _costliest(costs, circle):
            for move in _moves(size, rank):
                looks_left -= 1
                trial = move(circle)
                if (value := score(trial)) < now * (1 - 1e-9):
                    circle, now, improved = trial, value, True
                    break
            if improved or looks_left <= 0:
                break
    return circle


def _costliest(costs: Costs, circle: list[int]) -> list[int]:
    """Ranks by what the edge to their right costs, most first."""
    size = len(circle)

    def cost_s(rank: int) -> float:
        here, there = circle[rank], circle[(rank + 1) % size]
        return costs.transfer_s[here][there] + costs.hop_s[here][there]

    return sorted(range(size), key=lambda rank: (-cost_s(rank), rank))


def _moves(size: int, rank: int) -> Iterable[Callable[[list[int]], list[int]]]:
    """Ways to be rid of the edge from ``rank`` to its right neighbour."""
    for length in range(2, size - 1):
        yield partial(_turned, first=rank + 1, length=length)
    for first, length in ((rank + 1, 1), (rank, 1), (rank + 1, 2), (rank - 1, 2), (rank + 1, 3), (rank - 2, 3)):
        for gap in range(1, size - length):
            yield partial(_put_elsewhere, first=first, length=length, gap=gap)


def _turned(circle: list[int], first: int, length: int) -> list[int]:
    """The part of ``length`` from rank ``first`` on, the other way round."""
    first %= len(circle)
    turned = circle[first:] + circle[:first]
    return turned[:length][::-1] + turned[length:]


def _put_elsewhere(circle: list[int], first: int, length: int, gap: int) -> list[int]:
    """The part of ``length`` from rank ``first`` on, ``gap`` members further."""
    first %= len(circle)
    turned = circle[first:] + circle[:first]
    part, rest = turned[:length], turned[length:]
    return rest[:gap] + part + rest[gap:]
