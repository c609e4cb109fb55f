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
from ring.collectives import SCRATCH_SLOTS, Done, Instruction, Post, Reduce, Schedule, Send, owned_range


class Member:
    """An array, a schedule, and what the shell would hold."""

    def __init__(self, array: np.ndarray, schedule: Schedule, sub_chunk_numel: int) -> None:
        self.array = array
        self.schedule = schedule
        self.scratch = np.zeros((SCRATCH_SLOTS, sub_chunk_numel), array.dtype)
        self.outgoing: deque[Send] = deque()
        self.posts: deque[Post] = deque()
        self.slots_in_use: set[int | None] = set()
        self.done = False

    def carry_out(self, instructions: list[Instruction]) -> None:
        for item in instructions:
            assert not self.done, "an instruction after Done"
            match item:
                case Send():
                    self.outgoing.append(item)
                case Post():
                    assert item.slot is None or item.slot not in self.slots_in_use, "slot in use"
                    self.slots_in_use |= {item.slot} - {None}
                    self.posts.append(item)
                    assert len(self.posts) <= SCRATCH_SLOTS
                case Reduce(start, stop, slot):
                    self.check_writable(start, stop)
                    self.array[start:stop] += self.scratch[slot, : stop - start]
                    self.slots_in_use.remove(slot)
                case Done():
                    self.done = True
        self.schedule.validate()
        assert self.schedule.done == self.done

    def check_writable(self, start: int, stop: int) -> None:
        assert not any(send.start < stop and start < send.stop for send in self.outgoing), "sent memory overwritten"

    def accept(self, left: Member) -> None:
        """The oldest send of the left neighbour arrives whole; only now does it leave that neighbour's memory."""
        post, send = self.posts.popleft(), left.outgoing.popleft()
        assert (send.start, send.stop) == (post.start, post.stop), "the two ends disagree about the next sub-chunk"
        payload = left.array[send.start : send.stop].copy()
        if post.slot is None:
            self.check_writable(post.start, post.stop)
            self.array[post.start : post.stop] = payload
        else:
            self.scratch[post.slot, : len(payload)] = payload
        self.carry_out(self.schedule.on_received(post.index))


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
            member = members[waiting.pop()]
            member.carry_out(member.schedule.start())
        elif ready:
            rank = chance.choice(ready)
            members[rank].accept(members[rank - 1])
        else:
            break
    for member in members:
        assert member.done, "stuck"
        assert not member.outgoing, "sent what nobody expects"


sizes = st.integers(1, 7)
numels = st.integers(0, 200)
sub_chunks = st.integers(1, 70)
seeds = st.integers(0, 2**32 - 1)
many = settings(max_examples=150, deadline=None)


def arrays(n: int, numel: int, seed: int, dtype: str) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "f":
        return [draw.standard_normal(numel).astype(dtype) for _ in range(n)]
    return [draw.integers(-(2**20), 2**20, numel).astype(dtype) for _ in range(n)]


@many
@given(sizes, numels, sub_chunks, seeds, st.sampled_from(["float32", "float64", "int64", "int8"]))
def test_all_reduce_gives_every_member_the_same_bits_and_the_right_sum(n, numel, sub, seed, dtype):
    before = arrays(n, numel, seed, dtype)
    members = [
        Member(array.copy(), collectives.all_reduce(rank, n, numel, sub), sub) for rank, array in enumerate(before)
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
@given(sizes, numels, sub_chunks, seeds)
def test_reduce_scatter_gives_every_rank_the_sum_of_what_it_owns(n, numel, sub, seed):
    before = arrays(n, numel, seed, "int64")
    members = [
        Member(array.copy(), collectives.reduce_scatter(rank, n, numel, sub), sub) for rank, array in enumerate(before)
    ]
    play(members, random.Random(seed))
    for rank, member in enumerate(members):
        start, stop = owned_range(rank, n, numel)
        assert np.array_equal(member.array[start:stop], np.sum(before, axis=0)[start:stop])


@many
@given(sizes, numels, sub_chunks, seeds)
def test_reduce_scatter_then_all_gather_is_all_reduce(n, numel, sub, seed):
    before = arrays(n, numel, seed, "float32")
    once = [Member(a.copy(), collectives.all_reduce(rank, n, numel, sub), sub) for rank, a in enumerate(before)]
    play(once, random.Random(seed))
    first = [Member(a.copy(), collectives.reduce_scatter(rank, n, numel, sub), sub) for rank, a in enumerate(before)]
    play(first, random.Random(seed + 1))
    second = [Member(m.array, collectives.all_gather(rank, n, numel, sub), sub) for rank, m in enumerate(first)]
    play(second, random.Random(seed + 2))
    assert [m.array.tobytes() for m in second] == [m.array.tobytes() for m in once]


@many
@given(sizes, numels, sub_chunks, seeds)
def test_all_gather_gives_every_member_every_chunk(n, numel, sub, seed):
    whole = arrays(1, numel, seed, "int64")[0]
    members = []
    for rank in range(n):
        start, stop = owned_range(rank, n, numel)
        mine = np.zeros_like(whole)
        mine[start:stop] = whole[start:stop]
        members.append(Member(mine, collectives.all_gather(rank, n, numel, sub), sub))
    play(members, random.Random(seed))
    for member in members:
        assert np.array_equal(member.array, whole)


@many
@given(sizes, numels, sub_chunks, seeds, st.data())
def test_broadcast_gives_every_member_the_roots_array(n, numel, sub, seed, data):
    root = data.draw(st.integers(0, n - 1))
    before = arrays(n, numel, seed, "int64")
    members = [
        Member(array.copy(), collectives.broadcast(rank, n, numel, sub, root=root), sub)
        for rank, array in enumerate(before)
    ]
    play(members, random.Random(seed))
    for member in members:
        assert np.array_equal(member.array, before[root])


@many
@given(st.integers(2, 7), seeds)
def test_nobody_leaves_a_barrier_before_everybody_entered(n, seed):
    chance = random.Random(seed)
    members = [Member(np.zeros(n, np.uint8), collectives.barrier(rank, n), 1) for rank in range(n)]
    absent = members[chance.randrange(n)]
    present = [member for member in members if member is not absent]
    for member in present:
        member.carry_out(member.schedule.start())
    deliver_all(members, chance)
    assert not any(member.done for member in present)
    absent.carry_out(absent.schedule.start())
    deliver_all(members, chance)
    assert all(member.done for member in members)


@given(sizes, numels)
def test_owned_ranges_cover_the_array_in_order_and_evenly(n, numel):
    ranges = [owned_range(rank, n, numel) for rank in range(n)]
    assert [start for start, _ in ranges] + [numel] == [0] + [stop for _, stop in ranges]
    lengths = [stop - start for start, stop in ranges]
    assert max(lengths) - min(lengths) <= 1


def test_each_rank_sends_the_bandwidth_optimal_share():
    n, numel = 4, 64
    members = [Member(np.zeros(numel), collectives.all_reduce(rank, n, numel, 4), 4) for rank in range(n)]
    sent = [0] * n
    for rank, member in enumerate(members):
        member.carry_out(member.schedule.start())
        sent[rank] += sum(send.stop - send.start for send in member.outgoing)
    while ready := deliverable(members):
        rank = ready[0]
        queued = len(members[rank].outgoing)
        members[rank].accept(members[rank - 1])
        sent[rank] += sum(send.stop - send.start for send in list(members[rank].outgoing)[queued:])
    assert sent == [2 * (n - 1) * numel // n] * n


def test_a_sub_chunk_is_forwarded_as_soon_as_it_is_reduced():
    schedule = collectives.all_reduce(0, 3, 12, 2)
    assert schedule.start() == [Send(8, 10), Send(10, 12), Post(0, 4, 6, 0), Post(1, 6, 8, 1)]
    assert schedule.on_received(0) == [Reduce(4, 6, 0), Send(4, 6), Post(2, 0, 2, 0)]


def test_a_ring_of_one_is_done_at_once():
    for schedule in (
        collectives.all_reduce(0, 1, 5, 2),
        collectives.reduce_scatter(0, 1, 5, 2),
        collectives.all_gather(0, 1, 5, 2),
        collectives.broadcast(0, 1, 5, 2, root=0),
        collectives.barrier(0, 1),
    ):
        assert schedule.start() == [Done()]


def test_a_shell_that_loses_count_is_told():
    schedule = collectives.all_reduce(0, 2, 8, 2)
    with pytest.raises(ValueError, match="sub-chunk 0 arrived"):
        schedule.on_received(0)
    schedule.start()
    with pytest.raises(ValueError, match="already started"):
        schedule.start()
    with pytest.raises(ValueError, match="sub-chunk 1 arrived"):
        schedule.on_received(1)


@pytest.mark.parametrize(
    ("rank", "n", "numel", "sub"), [(2, 2, 1, 1), (-1, 2, 1, 1), (0, 0, 1, 1), (0, 1, -1, 1), (0, 1, 1, 0)]
)
def test_impossible_plans_are_refused(rank, n, numel, sub):
    for build in (collectives.all_reduce, collectives.all_gather, collectives.reduce_scatter):
        with pytest.raises(ValueError, match="no schedule"):
            build(rank, n, numel, sub)


def test_a_root_outside_the_ring_is_refused():
    with pytest.raises(ValueError, match="root 3 is no rank"):
        collectives.broadcast(0, 3, 1, 1, root=3)
