"""Chunked ring collectives as sans-IO schedules: what to send when, and where received elements go.

Theory of operation
-------------------
n members form a ring; rank r sends to r + 1 and receives from r - 1 only (mod n). The array is cut into n chunks of
nearly equal size; chunk c *belongs* to rank c. In round t every rank sends one chunk and receives the one before it::

    round t:   send chunk (r - 1 - t) mod n        receive chunk (r - 2 - t) mod n

* Rounds 0 .. n-2 are the *reduce-scatter*: a rank adds the received chunk to its own, and sends the sum in the next
  round. The last chunk that it receives is (r - 2 - (n - 2)) mod n = r: after n - 1 hops rank r holds the full sum of
  its own chunk.
* Rounds n-1 .. 2n-3 are the *all-gather*, by the same formula. The first chunk sent is chunk r. A received chunk is
  final and replaces the stale partial sum.

So an *all-reduce* is 2n - 2 rounds of one rule. Each rank sends and receives 2 (n-1)/n of the array, which is optimal
in bandwidth (Patarasu and Yuan, 2009). A *barrier* is an all-gather of one byte each: a member has every byte only
after every member has entered.

**Sub-chunks and their order.** A chunk travels as sub-chunks. The g-th sub-chunks of all chunks are *segment* g, an
all-reduce of its own. Sub-chunk (g, t), segment g in round t, is sent in the order of ``g + depth * t``. So ``depth``
segments are in transit at any time, and each is completed soon after its start, while it is still in the processor's
cache. The order is the same on every rank, and each send depends on a receive with a lesser place, so no order of
arrivals can deadlock the ring. All bounds follow from (n, numel, sub_chunk_numel, depth), and TCP keeps the order. So
both ends know what comes next, and a sub-chunk needs no header. Empty sub-chunks are left out.

**Memory.** At most ``SCRATCH_SLOTS`` receives are posted ahead. A sub-chunk to be reduced lands in a scratch slot; a
final one may land in its place. Sending borrows the array without a copy. A range is written after it was sent in one
case only: the final sum of a sub-chunk replaces the partial sum that was sent in the first pass. The final sum contains
this partial sum, so it cannot exist before the right neighbour has received every byte of the partial sum. This
requires equal cuts in both passes. At the end the shell flushes what is on its way out.

**Equal bits.** One rank, the owner, computes the final sum of an element; all others copy it. So all members end with
the same bits, though floating-point addition is not associative. A lossy codec keeps that: the owner encodes a final
sum once and uses the decoded values itself; the others pass the encoded bytes on unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from wire.transport import BULK_BUFFER_BYTES

LEAST_SUB_CHUNK_BYTES, MOST_SUB_CHUNK_BYTES = 64 << 10, 512 << 10
"""The range in which a session chooses. Measured on a loopback: below it the work per sub-chunk dominates; above it
sums leave a core's cache before they are sent."""
WINDOW_BYTES = BULK_BUFFER_BYTES // 2
"""Bytes that a member may send between receiving a sub-chunk and passing it on: half of what the kernel holds for a
connection. So the neighbour empties one half while this member fills the other, and neither goes to sleep."""
GROUPED_FROM = 64
"""Members from which on small arrays are gathered in groups. Below it, a second ring saves little time."""
SCRATCH_SLOTS = 2
"""Receives posted ahead. Two keep the socket busy: one fills while the other is added."""


@dataclass(frozen=True, slots=True)
class Send:
    """Elements [start, stop) to send to the right neighbour after ``after`` receives are handled.

    Attributes:
        after: 0: the elements are this member's contribution, which no receive has changed.
        relay: index of the receive whose bytes are passed on unchanged; None for this rank's own elements: its
            contribution, a partial sum, or the final sum of a chunk that it owns.
        final: the elements are a final sum that this rank owns.
    """

    start: int
    stop: int
    after: int = 0
    relay: int | None = None
    final: bool = False


@dataclass(frozen=True, slots=True)
class Receive:
    """One planned sub-chunk from the left: elements [start, stop), added or stored. ``relayed``: its bytes are passed
    on unchanged."""

    start: int
    stop: int
    reduce: bool
    relayed: bool = False


class Schedule:
    """One member's side of one collective operation: cursors over a fixed plan of what this member sends and of what
    the left neighbour will send.

    The shell posts what ``next_receive`` returns, calls ``received`` when a sub-chunk was handled, and sends what
    ``next_send`` returns, each in order. It may call them at any time; None means: not yet, or no more.

    Attributes:
        held: nothing is sent until the owner sets it to False.
    """

    def __init__(self, sends: Sequence[Send], receives: Sequence[Receive]) -> None:
        self._sends = tuple(sends)
        self._receives = tuple(receives)
        self._sent = 0
        self.held = False
        self._posted = 0
        self._handled = 0

    @property
    def all_sent(self) -> bool:
        return self._sent == len(self._sends)

    @property
    def all_received(self) -> bool:
        return self._handled == len(self._receives)

    def next_receive(self) -> Receive | None:
        """The next sub-chunk to expect from the left. It counts as posted from now on."""
        if self._posted == len(self._receives):
            return None
        self._posted += 1
        return self._receives[self._posted - 1]

    def received(self) -> int:
        """Count the oldest posted sub-chunk as handled (added or stored). Returns its index."""
        self._handled += 1
        return self._handled - 1

    def next_send(self) -> Send | None:
        """The next sub-chunk to send, if what it depends on was received. It counts as sent from now on."""
        if self.all_sent or self.held or self._sends[self._sent].after > self._handled:
            return None
        self._sent += 1
        return self._sends[self._sent - 1]


def owned_range(rank: int, n: int, numel: int) -> tuple[int, int]:
    """Elements [start, stop) of the chunk that belongs to ``rank``, which holds its sum after a reduce-scatter.

    The ranges of ranks 0 .. n-1 cover ``range(numel)`` in order; their sizes differ by at most one.
    """
    return rank * numel // n, (rank + 1) * numel // n


def all_reduce(rank: int, n: int, numel: int, sub_chunk_numel: int, depth: int = 1) -> Schedule:
    """Every member gets the sum of all members' arrays of ``numel`` elements, in place."""
    return Schedule(*_plan(n, numel, sub_chunk_numel, depth, rank - 1, n - 1))


def reduce_scatter(rank: int, n: int, numel: int, sub_chunk_numel: int, depth: int = 1) -> Schedule:
    """Every member gets the sum of its chunk, ``owned_range(rank, n, numel)``; its other chunks hold partial sums."""
    return Schedule(*_plan(n, numel, sub_chunk_numel, depth, rank - 1, n - 1, gather=False))


def all_gather(rank: int, n: int, numel: int, sub_chunk_numel: int) -> Schedule:
    """Every member gets all members' chunks, in place; each contributes ``owned_range(rank, n, numel)``."""
    return Schedule(*_plan(n, numel, sub_chunk_numel, 1, rank, 0))


def group_count(n: int) -> int:
    """The number of groups in which n members gather small arrays; 1: they gather around the ring. A group has at least
    two members."""
    return round(math.sqrt(2 * n)) if n >= GROUPED_FROM else 1


def gather_hops(n: int) -> int:
    """Hops until every member has what each member contributed to a small all-gather; of all numbers of groups,
    ``group_count`` has the fewest."""
    groups = group_count(n)
    return 2 * -(-n // groups) + groups - 2 if groups > 1 else n - 1


def group_of(rank: int, n: int, groups: int) -> tuple[int, int, int]:
    """The group of ``rank``, and its ranks: [start, stop). Its first rank leads it."""
    group = ((rank + 1) * groups - 1) // n
    return group, *owned_range(group, groups, n)


def collect(rank: int, n: int, groups: int) -> Schedule:
    """The leader of each group gets the elements of the group before it. Rank r contributes element r of n."""
    group, start, _ = group_of(rank, n, groups)
    first, stop = owned_range((group - 1) % groups, groups, n)
    leads = rank == start
    count = stop - first if leads else rank - start
    spans = [((rank - 1 - t) % n, (rank - 1 - t) % n + 1) for t in range(count)]
    receives = [Receive(*span, reduce=False, relayed=not leads) for span in spans]
    relays = [Send(*span, after=t + 1, relay=t) for t, span in enumerate(spans) if not leads]
    return Schedule([Send(rank, rank + 1), *relays], receives)


def exchange(group: int, n: int, groups: int) -> Schedule:
    """Every leader gets all n elements. Each contributes those of the group before it."""
    return all_gather(group - 1, groups, n, -(-n // groups))


def spread(rank: int, n: int, groups: int) -> Schedule:
    """The leader of each group passes all n elements on to its members."""
    _, start, stop = group_of(rank, n, groups)
    spans = [owned_range(group, groups, n) for group in range(groups)]
    return _pass_on(spans, first=rank == start, last=rank + 1 == stop)


def broadcast(rank: int, n: int, root: int, numel: int, sub_chunk_numel: int) -> Schedule:
    """Every member gets the array of ``root``, in place. Each passes it on to its right, but the last one."""
    starts = range(0, numel, sub_chunk_numel)
    spans = [(start, min(start + sub_chunk_numel, numel)) for start in starts]
    return _pass_on(spans, first=rank == root, last=(rank + 1) % n == root)


def _pass_on(spans: Sequence[tuple[int, int]], *, first: bool, last: bool) -> Schedule:
    """The first member of a row sends these elements; the others store them and pass them on, but the last one."""
    receives = [Receive(*span, reduce=False, relayed=not last) for span in spans if not first]
    sends = [Send(*span) if first else Send(*span, after=t + 1, relay=t) for t, span in enumerate(spans) if not last]
    return Schedule(sends, receives)


@lru_cache(maxsize=64)  # every training step needs the same few plans
def _plan(
    n: int, numel: int, sub_chunk_numel: int, depth: int, first_chunk: int, reduce_rounds: int, *, gather: bool = True
) -> tuple[tuple[Send, ...], tuple[Receive, ...]]:
    """Send ``first_chunk``, receive those before it: first reduce, then store. Pass on all but the last chunk."""
    rounds = reduce_rounds + (n - 1 if gather else 0)
    segments = -(-max(stop - start for start, stop in (owned_range(c, n, numel) for c in range(n))) // sub_chunk_numel)
    places = tuple(_places(segments, rounds, depth))

    def span(chunk: int, segment: int) -> tuple[int, int]:
        start, stop = owned_range(chunk % n, n, numel)
        start += segment * sub_chunk_numel
        return start, min(start + sub_chunk_numel, stop)

    receives: list[Receive] = []
    came: dict[tuple[int, int], int] = {}  # (segment, round) → index of the receive
    for segment, t in places:
        start, stop = span(first_chunk - 1 - t, segment)
        if start < stop:
            came[segment, t] = len(receives)
            relayed = reduce_rounds <= t < rounds - 1
            receives.append(Receive(start, stop, reduce=t < reduce_rounds, relayed=relayed))
    sends: list[Send] = []
    for segment, t in places:
        start, stop = span(first_chunk - t, segment)
        if start < stop:
            cause = came[segment, t - 1] if t else -1
            relay = cause if t > reduce_rounds else None
            sends.append(Send(start, stop, cause + 1, relay, final=t == reduce_rounds))
    return tuple(sends), tuple(receives)


def _places(segments: int, rounds: int, depth: int) -> Iterable[tuple[int, int]]:
    """Every (segment, round) in the order of ``segment + depth * round``; for equal places the earlier round first."""
    for place in range(segments + depth * (rounds - 1)):
        for t in range(max(0, -(-(place - segments + 1) // depth)), min(rounds, place // depth + 1)):
            yield place - depth * t, t


class Stripe(NamedTuple):
    """The part of an array that one lane reduces: elements [start, stop). ``depth``: segments in transit at a time."""

    start: int
    stop: int
    sub_chunk_numel: int
    depth: int


def plan_stripes(
    numel: int, itemsize: int, *, members: int, lanes: int, sub_chunk_bytes: int = 0, block_numel: int = 1
) -> list[Stripe]:
    """Cut an array of ``numel`` elements for an all-reduce into stripes, one per lane, and those into sub-chunks.

    A pure function of sizes that all members share, so all members cut alike. A given ``sub_chunk_bytes`` means a far
    link: then a whole chunk may be in transit, so that a member has enough to send however long a hop takes.

    Args:
        lanes: the most lanes to use. Each chunk of each stripe must fill at least one sub-chunk. Without a lane there
            is no stripe.
        block_numel: a codec's block; sub-chunks are multiples of it.
    """
    count = min(lanes, max(1, numel * itemsize // (members * (sub_chunk_bytes or LEAST_SUB_CHUNK_BYTES))))
    most_bytes = MOST_SUB_CHUNK_BYTES // (1 if block_numel == 1 else 2)  # a codec's scratch needs cache, too
    most_bytes = max(most_bytes // max(count, 1), LEAST_SUB_CHUNK_BYTES)
    stripes = []
    for lane in range(count):
        start, stop = owned_range(lane, count, numel)
        chunk_bytes = -(-(stop - start) // members) * itemsize
        # At least four sub-chunks per chunk, so that adding one overlaps with receiving the next.
        fitting_bytes = min(max(chunk_bytes // 4, LEAST_SUB_CHUNK_BYTES), most_bytes)
        sub_chunk_numel = max((sub_chunk_bytes or fitting_bytes) // itemsize // block_numel, 1) * block_numel
        segments = max(-(-chunk_bytes // (sub_chunk_numel * itemsize)), 1)
        segment_bytes = (2 * members - 2) * sub_chunk_numel * itemsize
        depth = segments if sub_chunk_bytes else min(-(-WINDOW_BYTES // max(segment_bytes, 1)), segments)
        stripes.append(Stripe(start, stop, sub_chunk_numel, depth))
    return stripes
