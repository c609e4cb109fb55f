"""Chunked ring collectives as sans-IO schedules: who sends which elements when, and where received ones go.

Theory of operation
-------------------
n members in a ring; rank r sends to r + 1 and receives from r - 1 only (mod n). The array is cut into n chunks, as
even as whole elements allow; chunk c *belongs* to rank c. In round t every rank sends one chunk and receives the one
before it::

    round t:   send chunk (r - 1 - t) mod n        receive chunk (r - 2 - t) mod n

* Rounds 0 .. n-2 are the *reduce-scatter*: the received chunk is added to one's own, and the sum goes on in the next
  round. The last one received is (r - 2 - (n - 2)) mod n = r: after n - 1 hops rank r holds the full sum of its own
  chunk.
* Rounds n-1 .. 2n-3 are the *all-gather*, and the formula just goes on: what is sent first is chunk r, what is received
  is final and replaces the stale partial sum.

So an *all-reduce* is 2n - 2 rounds of one rule, and each rank sends and receives 2 (n-1)/n of the array, which is
optimal in bandwidth (Patarasu and Yuan, 2009). A *broadcast* is a chain that starts at the root. A *barrier* is an
all-gather of one byte each: nobody has every byte before everybody has entered.

**Sub-chunks and their order.** A chunk travels as sub-chunks. The g-th sub-chunk of every chunk together are *segment*
g, an all-reduce of its own; sub-chunk (g, t), segment g in round t, is sent in the order of ``g + depth * t``. So
``depth`` segments are on their way at any time, and each is done with soon after it was begun, while a processor's
cache still holds it: a sum goes on hot from the addition, not after the whole chunk. What a rank passes on it received
``depth`` places earlier, so a hop may take as long as ``depth * (2n - 2)`` sub-chunks take to send before the wire
falls idle. The order is the same on every rank, and each send depends on a receive with a lesser place, so no order of
arrivals can lock the ring. Bounds follow from (n, numel, sub_chunk_numel, depth) alone and TCP keeps order: both ends
know what comes next, a sub-chunk needs no header. An empty one is left out.

**Memory.** At most ``SCRATCH_SLOTS`` receives are posted ahead. A sub-chunk to be reduced lands in a scratch slot (one
is added while the next arrives); a final one may land in its place.

**Sent memory.** Sending borrows the array, it copies nothing, so a range must not change while its bytes are on their
way out. Nothing here waits for that, because cause and effect do. A range is written after it was sent in one case
only: the final sum of a sub-chunk replaces the partial sum that went out in the first pass. That final sum contains
the partial sum: it cannot exist, let alone arrive, before the right neighbour had received every byte of it.
Sub-chunks must be cut equally in both passes for this to hold, and they are. What is still on its way out when all
has been received is flushed by the shell before the caller gets the array back.

**Equal bits.** One rank, the owner, computes the final sum of an element; all others copy it. So all members end with
the same bits, though floating-point addition is not associative. A lossy codec keeps that: a final sum is encoded once,
by its owner, who takes the decoded values for its own; the others pass the encoded bytes on as they came.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

LEAST_SUB_CHUNK_BYTES, MOST_SUB_CHUNK_BYTES = 64 << 10, 512 << 10
"""Between these a session chooses by itself. Measured on a loopback: below, the work per sub-chunk counts; above, sums
leave a core's cache before they are sent on."""
WINDOW_BYTES = 1 << 20
"""What a member may have sent between a sub-chunk's arrival and its being passed on. More leaves the cache; less has
neighbours wait for one another. Less than the kernel's buffers, so that sending seldom has to wait for them."""
SCRATCH_SLOTS = 2
"""Receives posted ahead. Two keep the socket busy: one is being filled while the other is added."""


@dataclass(frozen=True, slots=True)
class Send:
    """Elements [start, stop) go to the right neighbour once ``after`` receives are handled.

    Attributes:
        relay: index of the receive whose bytes go on as they came; None where the elements are this rank's own: its
            contribution, a partial sum, or the final sum of a chunk that it owns.
        final: they are the final sum, and this rank owns it.
    """

    start: int
    stop: int
    after: int = 0
    relay: int | None = None
    final: bool = False


@dataclass(frozen=True, slots=True)
class Receive:
    """One planned sub-chunk from the left: elements [start, stop), added or stored.

    Attributes:
        relayed: whether its bytes are sent on as they came.
    """

    start: int
    stop: int
    reduce: bool
    relayed: bool = False


class Schedule:
    """One member's side of one collective operation, as cursors over a fixed plan. The shell pulls.

    It posts what ``next_receive`` gives, in order; handles what arrived, in order, and says so with ``received``; sends
    what ``next_send`` gives, in order. All may be called at any time; None means: not yet, or no more.

    Args:
        sends: what this member sends, in order.
        receives: every sub-chunk that the left neighbour will send, in order.
    """

    def __init__(self, sends: Sequence[Send], receives: Sequence[Receive]) -> None:
        self._sends = tuple(sends)
        self._receives = tuple(receives)
        self._sent = 0
        self._posted = 0
        self._handled = 0

    @property
    def all_sent(self) -> bool:
        return self._sent == len(self._sends)

    @property
    def all_posted(self) -> bool:
        return self._posted == len(self._receives)

    @property
    def all_received(self) -> bool:
        return self._handled == len(self._receives)

    def next_receive(self) -> Receive | None:
        """The next sub-chunk to expect from the left; it counts as posted from now on."""
        if self.all_posted:
            return None
        self._posted += 1
        return self._receives[self._posted - 1]

    def received(self) -> int:
        """The oldest posted sub-chunk has arrived and was added or stored; its index.

        Raises:
            ValueError: nothing is posted.
        """
        if self._handled == self._posted:
            raise ValueError(f"a sub-chunk arrived, all of {self._posted} posted are handled")
        self._handled += 1
        return self._handled - 1

    def next_send(self) -> Send | None:
        """The next sub-chunk to send, where its time has come; it counts as sent from now on."""
        if self.all_sent or self._sends[self._sent].after > self._handled:
            return None
        self._sent += 1
        return self._sends[self._sent - 1]

    def validate(self) -> None:
        assert 0 <= self._handled <= self._posted <= len(self._receives)
        assert 0 <= self._sent <= len(self._sends)
        spans: list[Send | Receive] = [*self._sends, *self._receives]
        assert all(0 <= span.start < span.stop for span in spans), "an empty sub-chunk"
        assert all(send.after <= len(self._receives) for send in self._sends), "a send that waits for ever"
        relays = [send.relay for send in self._sends if send.relay is not None]
        assert relays == [index for index, item in enumerate(self._receives) if item.relayed], "a relay is lost"


def owned_range(rank: int, n: int, numel: int) -> tuple[int, int]:
    """Elements [start, stop) of the chunk that belongs to ``rank``: fully reduced there after a reduce-scatter.

    The ranges of ranks 0 .. n-1 cover ``range(numel)`` in order; their sizes differ by one at most.
    """
    return rank * numel // n, (rank + 1) * numel // n


def all_reduce(rank: int, n: int, numel: int, sub_chunk_numel: int, depth: int = 1) -> Schedule:
    """Every member ends with the sum of all members' arrays of ``numel`` elements, in place."""
    return _ring(rank, n, numel, sub_chunk_numel, depth, first_chunk=rank - 1, reduce_rounds=n - 1, store_rounds=n - 1)


def all_gather(rank: int, n: int, numel: int, sub_chunk_numel: int, depth: int = 1) -> Schedule:
    """Every member ends with all members' chunks; each brings ``owned_range(rank, n, numel)``, in place."""
    return _ring(rank, n, numel, sub_chunk_numel, depth, first_chunk=rank, reduce_rounds=0, store_rounds=n - 1)


def barrier(rank: int, n: int) -> Schedule:
    return all_gather(rank, n, n, 1)


def broadcast(rank: int, n: int, numel: int, sub_chunk_numel: int, *, root: int) -> Schedule:
    """Every member ends with the root's array. Raises ``ValueError`` where ``root`` is no rank."""
    if not 0 <= root < n:
        raise ValueError(f"root {root} is no rank of a ring of {n}")
    _check(rank, n, numel, sub_chunk_numel, 1)
    spans = [(start, min(start + sub_chunk_numel, numel)) for start in range(0, numel, sub_chunk_numel) if n > 1]
    if rank == root:
        return Schedule([Send(*span) for span in spans], ())
    forward = (rank + 1) % n != root
    receives = [Receive(*span, reduce=False, relayed=forward) for span in spans]
    return Schedule([Send(*span, after=i + 1, relay=i) for i, span in enumerate(spans) if forward], receives)


def _ring(
    rank: int,
    n: int,
    numel: int,
    sub_chunk_numel: int,
    depth: int,
    *,
    first_chunk: int,
    reduce_rounds: int,
    store_rounds: int,
) -> Schedule:
    _check(rank, n, numel, sub_chunk_numel, depth)
    return Schedule(*_plan(n, numel, sub_chunk_numel, depth, first_chunk, reduce_rounds, store_rounds))


@lru_cache(maxsize=64)  # a training step asks for the same few plans again and again
def _plan(
    n: int, numel: int, sub_chunk_numel: int, depth: int, first_chunk: int, reduce_rounds: int, store_rounds: int
) -> tuple[tuple[Send, ...], tuple[Receive, ...]]:
    """The one rule: send ``first_chunk``, receive those before it; reduce, then store; pass on all but the last."""
    rounds = reduce_rounds + store_rounds
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
    """Every (segment, round) in the order of ``segment + depth * round``, of equal ones the earlier round first."""
    for place in range(segments + depth * (rounds - 1)):
        for t in range(max(0, -(-(place - segments + 1) // depth)), min(rounds, place // depth + 1)):
            yield place - depth * t, t


def _check(rank: int, n: int, numel: int, sub_chunk_numel: int, depth: int) -> None:
    if not 0 <= rank < n or numel < 0 or sub_chunk_numel < 1 or depth < 1:
        raise ValueError(
            f"no schedule for rank {rank} of {n}, {numel} elements in sub-chunks of {sub_chunk_numel}, {depth} deep"
        )


def cut(
    numel: int, itemsize: int, *, members: int, lanes: int, sub_chunk_bytes: int = 0, block_numel: int = 1
) -> list[tuple[int, int, int, int]]:
    """How an array of ``numel`` elements is cut for an all-reduce: into stripes, one a lane, and those into sub-chunks.

    A pure function of sizes that all members share, so all of them cut alike.

    Where the sub-chunk is given the link is a far one, and chunks go one after the other: who waits for the next one
    has a whole chunk to pass on meanwhile, however long a hop takes.

    Args:
        lanes: there are; as many are used as give each chunk of each stripe a sub-chunk of its own.
        block_numel: sub-chunks are multiples of it, a codec's block.

    Returns:
        (start, stop, elements of a sub-chunk, segments on their way at a time) of each stripe; none where there is no
        lane.
    """
    stripes = min(lanes, max(1, numel * itemsize // (members * (sub_chunk_bytes or LEAST_SUB_CHUNK_BYTES))))
    most_bytes = MOST_SUB_CHUNK_BYTES // (1 if block_numel == 1 else 2)  # coding has scratch of its own in the cache
    most_bytes = max(most_bytes // max(stripes, 1), LEAST_SUB_CHUNK_BYTES)
    parts = []
    for lane in range(stripes):
        start, stop = owned_range(lane, stripes, numel)
        chunk_bytes = -(-(stop - start) // members) * itemsize
        # Four sub-chunks a chunk at least, so that adding one overlaps with receiving the next.
        fitting_bytes = min(max(chunk_bytes // 4, LEAST_SUB_CHUNK_BYTES), most_bytes)
        sub_chunk_numel = max((sub_chunk_bytes or fitting_bytes) // itemsize // block_numel, 1) * block_numel
        segments = max(-(-chunk_bytes // (sub_chunk_numel * itemsize)), 1)
        a_segment_bytes = (2 * members - 2) * sub_chunk_numel * itemsize
        depth = segments if sub_chunk_bytes else min(-(-WINDOW_BYTES // max(a_segment_bytes, 1)), segments)
        parts.append((start, stop, sub_chunk_numel, depth))
    return parts
