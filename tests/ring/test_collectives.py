"""The schedules, paired without sockets: every interleaving of arrivals gives every member the same, right bits.

The model of the wire is the harshest that TCP allows: a send borrows the sender's array and is read only at the moment
it arrives at the neighbour, so a range that is overwritten too early corrupts the result, and is caught besides.
"""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ring import collectives
from ring.collectives import SCRATCH_SLOTS, Receive, Schedule, Send, owned_range
from tests.invariants import check_invariants


class Member:
    """An array, a schedule, and what the shell would hold."""

    def __init__(self, array: np.ndarray, schedule: Schedule) -> None:
        self.array = array
        self.schedule = schedule
        self.outgoing: deque[tuple[Send, bytes | None]] = deque()  # a relay's bytes are those that came
        self.posts: deque[Receive] = deque()
        self.came: dict[int, bytes] = {}

    def pull(self) -> None:
        """Post and send all that the schedule gives now."""
        while len(self.posts) < SCRATCH_SLOTS and (receive := self.schedule.next_receive()) is not None:
            self.posts.append(receive)
        while (send := self.schedule.next_send()) is not None:
            self.outgoing.append((send, self.came.pop(send.relay) if send.relay is not None else None))
        check_invariants(self.schedule)

    def check_writable(self, start: int, stop: int) -> None:
        assert not any(s.start < stop and start < s.stop for s, came in self.outgoing if came is None), (
            "sent memory overwritten"
        )

    def accept(self, left: Member) -> None:
        """The oldest send of the left neighbour arrives whole; only now does it leave that neighbour's memory."""
        receive, (send, came) = self.posts.popleft(), left.outgoing.popleft()
        span = slice(receive.start, receive.stop)
        assert (send.start, send.stop) == (receive.start, receive.stop), "the ends disagree about the next sub-chunk"
        payload = left.array[span].copy()
        assert came is None or came == payload.tobytes(), "a relay that is not what the array holds"
        self.check_writable(receive.start, receive.stop)
        self.array[span] = self.array[span] + payload if receive.reduce else payload
        index = self.schedule.received()
        if receive.relayed:
            self.came[index] = payload.tobytes()
        self.pull()

    @property
    def done(self) -> bool:
        return self.schedule.all_received and self.schedule.all_sent


def deliverable(members: list[Member]) -> list[int]:
    return [rank for rank, member in enumerate(members) if member.posts and members[rank - 1].outgoing]


def deliver_all(members: list[Member], chance: random.Random) -> None:
    while ready := deliverable(members):
        rank = chance.choice(ready)
        members[rank].accept(members[rank - 1])


def play(members: list[Member], chance: random.Random) -> None:
    """Start the members and deliver sub-chunks, each choice by ``chance``, until nothing is on its way."""
    waiting = list(range(len(members)))
    chance.shuffle(waiting)
    while True:
        ready = deliverable(members)
        if waiting and (not ready or chance.random() < 0.3):
            members[waiting.pop()].pull()
        elif ready:
            rank = chance.choice(ready)
            members[rank].accept(members[rank - 1])
        else:
            break
    for member in members:
        assert member.done, "stuck"
        assert not member.outgoing, "sent what nobody expects"
        assert not member.came, "a relay is forgotten"


sizes = st.integers(1, 7)
numels = st.integers(0, 200)
sub_chunks = st.integers(1, 70)
depths = st.integers(1, 5)
seeds = st.integers(0, 2**32 - 1)
many = settings(max_examples=150)


def arrays(n: int, numel: int, seed: int, dtype: str) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "f":
        return [draw.standard_normal(numel).astype(dtype) for _ in range(n)]
    return [draw.integers(-(2**20), 2**20, numel).astype(dtype) for _ in range(n)]


@many
@given(sizes, numels, sub_chunks, depths, seeds, st.sampled_from(["float32", "float64", "int64", "int8"]))
def test_all_reduce_gives_every_member_the_same_bits_and_the_right_sum(n, numel, sub, depth, seed, dtype):
    before = arrays(n, numel, seed, dtype)
    members = [
        Member(array.copy(), collectives.all_reduce(rank, n, numel, sub, depth)) for rank, array in enumerate(before)
    ]
    play(members, random.Random(seed))
    for member in members:
        assert member.array.tobytes() == members[0].array.tobytes()
    if np.dtype(dtype).kind == "f":
        exact = np.sum([array.astype(np.float64) for array in before], axis=0)
        scale = np.sum([np.abs(array.astype(np.float64)) for array in before], axis=0)
        assert np.all(np.abs(members[0].array - exact) <= 1e-6 * scale)
    else:
        assert np.array_equal(members[0].array, np.sum(before, axis=0, dtype=dtype))


@many
@given(sizes, numels, sub_chunks, depths, seeds)
def test_all_gather_gives_every_member_every_chunk(n, numel, sub, depth, seed):
    whole = arrays(1, numel, seed, "int64")[0]
    members = []
    for rank in range(n):
        start, stop = owned_range(rank, n, numel)
        mine = np.zeros_like(whole)
        mine[start:stop] = whole[start:stop]
        members.append(Member(mine, collectives.all_gather(rank, n, numel, sub)))
    play(members, random.Random(seed))
    for member in members:
        assert np.array_equal(member.array, whole)


@many
@given(sizes, numels, sub_chunks, depths, seeds)
def test_reduce_scatter_gives_every_member_the_sum_of_its_chunk(n, numel, sub, depth, seed):
    before = arrays(n, numel, seed, "int64")
    members = [
        Member(array.copy(), collectives.reduce_scatter(rank, n, numel, sub, depth))
        for rank, array in enumerate(before)
    ]
    play(members, random.Random(seed))
    for rank, member in enumerate(members):
        span = slice(*owned_range(rank, n, numel))
        assert np.array_equal(member.array[span], np.sum(before, axis=0)[span])


@many
@given(sizes, numels, sub_chunks, depths, seeds)
def test_what_a_member_contributes_is_what_it_sends_before_it_receives(n, numel, sub, depth, seed):
    """So a schedule can read contributions from another array than the one that it writes."""
    for schedule in (collectives.all_reduce, collectives.reduce_scatter):
        for rank in range(n):
            own = owned_range((rank - 1) % n, n, numel)
            for send in sends_of(schedule(rank, n, numel, sub, depth)):
                assert (send.after == 0) == (own[0] <= send.start < own[1] and send.relay is None and not send.final)


@many
@given(sizes, numels, sub_chunks, seeds)
def test_broadcast_gives_every_member_the_array_of_the_root(n, numel, sub, seed):
    whole, root = arrays(1, numel, seed, "int64")[0], seed % n
    members = [
        Member(whole.copy() if rank == root else np.zeros_like(whole), collectives.broadcast(rank, n, root, numel, sub))
        for rank in range(n)
    ]
    play(members, random.Random(seed))
    for member in members:
        assert np.array_equal(member.array, whole)


@many
@given(st.integers(2, 7), seeds)
def test_nobody_leaves_a_barrier_before_everybody_entered(n, seed):
    chance = random.Random(seed)
    members = [Member(np.zeros(n, np.uint8), collectives.all_gather(rank, n, n, 1)) for rank in range(n)]
    absent = members[chance.randrange(n)]
    present = [member for member in members if member is not absent]
    for member in present:
        member.pull()
    deliver_all(members, chance)
    assert not any(member.done for member in present)
    absent.pull()
    deliver_all(members, chance)
    assert all(member.done for member in members)


@given(sizes, numels)
def test_owned_ranges_cover_the_array_in_order_and_evenly(n, numel):
    ranges = [owned_range(rank, n, numel) for rank in range(n)]
    assert [start for start, _ in ranges] + [numel] == [0] + [stop for _, stop in ranges]
    lengths = [stop - start for start, stop in ranges]
    assert max(lengths) - min(lengths) <= 1


def sends_of(schedule: Schedule) -> list[Send]:
    """All sends of a schedule, in order: its receives are handled as they come."""
    sends: list[Send] = []
    while not (schedule.all_sent and schedule.all_received):
        while (send := schedule.next_send()) is not None:
            sends.append(send)
        if schedule.next_receive() is not None:
            schedule.received()
    return sends


@pytest.mark.parametrize("depth", [1, 3, 100])
def test_each_rank_sends_the_bandwidth_optimal_share(depth):
    n, numel = 4, 64
    for rank in range(n):
        sends = sends_of(collectives.all_reduce(rank, n, numel, 4, depth))
        assert sum(send.stop - send.start for send in sends) == 2 * (n - 1) * numel // n
