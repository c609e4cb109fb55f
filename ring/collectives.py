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

**Sub-chunks.** A chunk travels as sub-chunks, each forwarded as soon as it is reduced, so every link is busy in both
directions while later parts still arrive. Bounds follow from (n, numel, sub_chunk_numel) alone, TCP keeps order, and
every rank sends first its own and then what it forwards in the order of arrival: both ends know what comes next, a
sub-chunk needs no header. An empty chunk (numel < n) has no sub-chunks.

**Memory.** A sub-chunk to be reduced lands in one of two scratch slots (one is added while the next arrives); a final
one lands in its place. The slot is posted again only after it was added.

**Sent memory.** Sending borrows the array, it copies nothing, so a range must not change while its bytes are on their
way out. Nothing here waits for that, because cause and effect do. A range is written after it was sent in one case
only: the final sum of a sub-chunk replaces the partial sum that went out in the first pass. That final sum contains
the partial sum: it cannot exist, let alone arrive, before the right neighbour had received every byte of it.
Sub-chunks must be cut equally in both passes for this to hold, and they are. What is still on its way out when all
has been received is flushed by the shell before the caller gets the array back.

**Equal bits.** One rank, the owner, computes the final sum of an element; all others copy it. So all members end with
the same bits, though floating-point addition is not associative.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SCRATCH_SLOTS = 2
"""Receives posted ahead. Two keep the socket busy: one is being filled while the other is added."""


@dataclass(frozen=True, slots=True)
class Send:
    """Elements [start, stop) may go to the right neighbour now; they are final for this hop."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Post:
    """Expect the next sub-chunk from the left: elements [start, stop), into scratch ``slot``, or in place where that
    is None.
    """

    index: int
    start: int
    stop: int
    slot: int | None


@dataclass(frozen=True, slots=True)
class Reduce:
    """Add the sub-chunk in scratch ``slot`` to elements [start, stop)."""

    start: int
    stop: int
    slot: int


@dataclass(frozen=True, slots=True)
class Done:
    """Everything was received and handled; the result is there once the sends are flushed."""


Instruction = Send | Post | Reduce | Done


@dataclass(frozen=True, slots=True)
class Receive:
    """One planned sub-chunk from the left: elements [start, stop), added or stored, and passed on or not."""

    start: int
    stop: int
    reduce: bool
    forward: bool


class Schedule:
    """One member's side of one collective operation. Give instructions to the shell in order; it must carry them out
    in order.

    Args:
        sends: what this member puts into the ring by itself, in order.
        receives: every sub-chunk that the left neighbour will send, in order.
    """

    def __init__(self, sends: Sequence[Send], receives: Sequence[Receive]) -> None:
        self._sends = tuple(sends)
        self._receives = tuple(receives)
        self._posted = 0
        self._handled = 0
        self._started = False

    @property
    def done(self) -> bool:
        """Whether ``Done`` was given."""
        return self._started and self._handled == len(self._receives)

    def start(self) -> list[Instruction]:
        """The first instructions: own sends, and the first receives to post. Called once."""
        if self._started:
            raise ValueError("the schedule has already started")
        self._started = True
        result: list[Instruction] = list(self._sends)
        while self._posted < min(SCRATCH_SLOTS, len(self._receives)):
            result.append(self._post())
        if self.done:
            result.append(Done())
        return result

    def on_received(self, index: int) -> list[Instruction]:
        """The sub-chunk of ``Post(index)`` has arrived whole. Raises ``ValueError`` for any but the oldest post."""
        if index != self._handled or index >= self._posted:
            raise ValueError(f"sub-chunk {index} arrived, {self._handled} of {self._posted} posted are handled")
        receive = self._receives[index]
        self._handled += 1
        result: list[Instruction] = []
        if receive.reduce:
            result.append(Reduce(receive.start, receive.stop, index % SCRATCH_SLOTS))
        if receive.forward:
            result.append(Send(receive.start, receive.stop))
        if self._posted < len(self._receives):
            result.append(self._post())
        if self.done:
            result.append(Done())
        return result

    def validate(self) -> None:
        """Assert what is true between any two calls."""
        assert 0 <= self._handled <= self._posted <= len(self._receives)
        assert self._posted - self._handled <= SCRATCH_SLOTS
        assert self._started or self._posted == 0
        if self._started:
            assert self._posted == min(self._handled + SCRATCH_SLOTS, len(self._receives)), (
                "a receive was not posted in time"
            )
        spans: list[Send | Receive] = [*self._sends, *self._receives]
        assert all(0 <= span.start < span.stop for span in spans), "an empty sub-chunk"

    def _post(self) -> Post:
        index = self._posted
        receive = self._receives[index]
        self._posted += 1
        return Post(index, receive.start, receive.stop, index % SCRATCH_SLOTS if receive.reduce else None)


def owned_range(rank: int, n: int, numel: int) -> tuple[int, int]:
    """Elements [start, stop) of the chunk that belongs to ``rank``: fully reduced there after a reduce-scatter.

    The ranges of ranks 0 .. n-1 cover ``range(numel)`` in order; their sizes differ by one at most.
    """
    return rank * numel // n, (rank + 1) * numel // n


def all_reduce(rank: int, n: int, numel: int, sub_chunk_numel: int) -> Schedule:
    """Every member ends with the sum of all members' arrays of ``numel`` elements, in place."""
    return _ring(rank, n, numel, sub_chunk_numel, first_chunk=rank - 1, reduce_rounds=n - 1, store_rounds=n - 1)


def reduce_scatter(rank: int, n: int, numel: int, sub_chunk_numel: int) -> Schedule:
    """Every member ends with the sum over ``owned_range(rank, n, numel)``; the rest of its array holds partial sums."""
    return _ring(rank, n, numel, sub_chunk_numel, first_chunk=rank - 1, reduce_rounds=n - 1, store_rounds=0)


def all_gather(rank: int, n: int, numel: int, sub_chunk_numel: int) -> Schedule:
    """Every member ends with all members' chunks; each brings ``owned_range(rank, n, numel)``, in place."""
    return _ring(rank, n, numel, sub_chunk_numel, first_chunk=rank, reduce_rounds=0, store_rounds=n - 1)


def barrier(rank: int, n: int) -> Schedule:
    """Over an array of n one-byte elements: done only after every member has started."""
    return all_gather(rank, n, n, 1)


def broadcast(rank: int, n: int, numel: int, sub_chunk_numel: int, *, root: int) -> Schedule:
    """Every member ends with the root's array. Raises ``ValueError`` where ``root`` is no rank."""
    if not 0 <= root < n:
        raise ValueError(f"root {root} is no rank of a ring of {n}")
    _check(rank, n, numel, sub_chunk_numel)
    spans = list(_spans(0, numel, sub_chunk_numel))
    if n == 1:
        return Schedule((), ())
    if rank == root:
        return Schedule([Send(*span) for span in spans], ())
    forward = (rank + 1) % n != root
    return Schedule((), [Receive(*span, reduce=False, forward=forward) for span in spans])


def _ring(
    rank: int, n: int, numel: int, sub_chunk_numel: int, *, first_chunk: int, reduce_rounds: int, store_rounds: int
) -> Schedule:
    """The one rule: send ``first_chunk``, receive those before it; reduce, then store; pass on all but the last."""
    _check(rank, n, numel, sub_chunk_numel)

    def chunk(number: int) -> Iterator[tuple[int, int]]:
        return _spans(*owned_range(number % n, n, numel), sub_chunk_numel)

    rounds = reduce_rounds + store_rounds
    sends = [Send(*span) for span in chunk(first_chunk)] if rounds else []
    receives = [
        Receive(*span, reduce=t < reduce_rounds, forward=t + 1 < rounds)
        for t in range(rounds)
        for span in chunk(first_chunk - 1 - t)
    ]
    return Schedule(sends, receives)


def _spans(start: int, stop: int, sub_chunk_numel: int) -> Iterator[tuple[int, int]]:
    for first in range(start, stop, sub_chunk_numel):
        yield first, min(first + sub_chunk_numel, stop)


def _check(rank: int, n: int, numel: int, sub_chunk_numel: int) -> None:
    if not 0 <= rank < n or numel < 0 or sub_chunk_numel < 1:
        raise ValueError(f"no schedule for rank {rank} of {n}, {numel} elements in sub-chunks of {sub_chunk_numel}")
