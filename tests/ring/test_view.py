"""Views: ranks, neighbours, shares, and what a peer may not pass off as one."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ring.token import Shares, balance_counts
from ring.view import View
from wire.codec import decode_untrusted, encode
from wire.job_messages import MemberRecord, ViewAnnounced


def make_view(*names: str) -> View:
    members = tuple(
        MemberRecord(name, name.upper(), "", 7000 + rank, 2 * rank, 2, healthy=rank > 0)
        for rank, name in enumerate(names)
    )
    return View("job", 3, 10, "ab" * 16, members)


def test_ranks_and_neighbours_go_round():
    view = make_view("a", "b", "c")
    assert view.size == 3
    assert [view.rank_of(name) for name in ("a", "b", "c", "x")] == [0, 1, 2, None]
    assert view.right_of(2).peer_id == "a"
    assert view.left_of(0).peer_id == "c"


def test_a_view_survives_its_message():
    view = dataclasses.replace(make_view("a", "b"), streams=16, sub_chunk_bytes=8, codec="int8", reduce_bytes=9)
    assert received(view) == view


def received(view: View) -> View:
    """The view after its way over the wire. Raises ``ValueError`` if it cannot be sent."""
    message = decode_untrusted(view.KIND, encode(view))
    assert type(message) is ViewAnnounced
    return View.of(message)


def spoiled(**changes: object) -> View:
    return dataclasses.replace(make_view("a", "b"), **changes)


def member(peer_id: str, first: int, count: int) -> MemberRecord:
    return MemberRecord(peer_id, peer_id, "", 7000, first, count, healthy=True)


@pytest.mark.parametrize(
    ("view", "why"),
    [
        (spoiled(members=()), "members is 0 long"),
        (spoiled(members=(member("a", 0, 2), member("a", 2, 2))), "names a member twice"),
        (spoiled(generation=0), "generation is 0"),
        (spoiled(step=-1), "step is -1"),
        (spoiled(lineage="x"), "lineage is 'x'"),
        (spoiled(members=(member("a", 0, 2), member("b", 3, 2))), "do not cover"),
        (spoiled(members=(member("a", 0, 2), member("b", 2, -1))), "count is -1"),
        (spoiled(streams=0), "streams is 0"),
        (spoiled(streams=17), "streams is 17"),
        (spoiled(sub_chunk_bytes=-1), "sub_chunk_bytes is -1"),
        (spoiled(sub_chunk_bytes=(64 << 20) + 1), "sub_chunk_bytes is 67108865"),
        (spoiled(codec="Zip"), "codec is 'Zip'"),
        (spoiled(reduce_bytes=-1), "reduce_bytes is -1"),
        (spoiled(square_sum=float("nan")), "square_sum is nan"),
    ],
)
def test_what_is_no_view_is_refused(view, why):
    with pytest.raises(ValueError, match=why):
        encode(view)


@given(st.integers(0, 300), st.integers(1, 9))
def test_shares_cover_the_micro_batches_as_equally_as_can_be(micro_batches, members):
    shares = Shares(balance_counts(micro_batches, [0] * members))
    cut = [shares.of(rank) for rank in range(members)]
    counts = [count for _, count in cut]
    assert [first for first, _ in cut] == [sum(counts[:rank]) for rank in range(members)]
    assert sum(counts) == micro_batches
    assert counts == sorted(counts, reverse=True)
    assert counts[0] - counts[-1] <= 1


def test_members_of_a_split_model_stand_by_replicas_and_by_stages() -> None:
    view = received(split_view(2, 3))
    assert [view.stage_of(rank) for rank in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [view.replica_of(rank) for rank in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [member.peer_id for member in view.replica(4)] == ["p3", "p4", "p5"]
    assert [member.peer_id for member in view.same_stage(4)] == ["p1", "p4"]
    ring = view.stage_ring(4)
    assert (ring.job, ring.size, ring.stages, ring.generation) == ("job/1", 2, 1, view.generation)
    assert [(member.peer_id, member.first, member.count) for member in ring.members] == [("p1", 0, 3), ("p4", 3, 3)]
    assert received(view) == view


@pytest.mark.parametrize(("stages", "said"), [(0, "stages is 0"), (4, "6 members in 4 stages"), (257, "stages is 257")])
def test_a_view_whose_stages_do_not_fit_is_refused(stages: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        encode(dataclasses.replace(split_view(2, 3), stages=stages))


def test_shares_stand_at_the_first_stage_of_a_replica() -> None:
    with pytest.raises(ValueError, match="beyond its replica's first stage"):
        encode(dataclasses.replace(split_view(2, 3), stages=2))


def split_view(replicas: int, stages: int) -> View:
    members = tuple(
        MemberRecord(f"p{rank}", f"p{rank}", "h", 1, 3 * -(-rank // stages), 0 if rank % stages else 3, healthy=True)
        for rank in range(replicas * stages)
    )
    return View("job", 1, 0, "ab" * 16, members, stages=stages)
