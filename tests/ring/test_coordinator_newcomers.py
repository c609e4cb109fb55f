"""Newcomers that catch up beside the ring, those that come too often, and shares that follow speed."""

from __future__ import annotations

import random

import pytest

from ring import coordination as co
from ring.coordination import CATCHING_UP_PER_MEMBER, JobPhase
from ring.coordinator import Coordinator
from ring.planning.measurements import LinkQuality
from ring.quarantine import DEATH_COOLDOWN_S
from tests.invariants import check_invariants
from tests.ring.desk import Desk, healthy, ids, peer
from wire.codec import encode
from wire.frame import CONTROL_FRAME_BYTES
from wire.job_messages import MemberRecord, Report


def asked(desk: Desk) -> list[str]:
    return [item.peer_id for item in desk.of(co.SendCatchUp)]


def held(desk: Desk) -> bool:
    return bool(desk.of(co.SendHold))


def beside(*peer_ids: str, members: tuple[str, ...] = ("a", "b")) -> Desk:
    """A running view, and newcomers that stand ready beside it."""
    desk = Desk(co.JobOptions(replicas=len(members), micro_batches=8), slow=True)
    desk.run(*members)
    desk.offer(*peer_ids)
    desk.ready(*peer_ids)
    return desk


def test_a_newcomer_catches_up_first_and_the_ring_is_held_when_it_follows() -> None:
    desk = beside("c")
    (ask,) = desk.of(co.SendCatchUp)
    assert (ask.peer_id, ask.generation, [source.peer_id for source in ask.sources]) == ("c", 1, ["b", "a"])
    assert isinstance(ask.sources[0], MemberRecord)
    desk.tell(co.StepCommitted(2))
    assert desk.core.phase is JobPhase.RUNNING
    desk.report("c", "following", 2)
    assert desk.of(co.SendHold) == [co.SendHold(("a", "b"), 1, "name-c joining")]
    desk.stand("held", 3, "a", "b")
    view = desk.minted()
    assert (view.step, ids(view), healthy(view)) == (3, ["a", "b", "c"], ["a", "b"]), "what it holds it knows itself"


def test_the_time_to_catch_up_grows_with_the_state() -> None:
    desk = Desk(slow=True)
    desk.run("a", "b")
    desk.offer("c")
    desk.report("c", "ready", reduce_bytes=100 * 10**6)
    assert asked(desk) == ["c"]
    desk.after(co.GRACE_S + 299.0)
    assert not held(desk)
    desk.after(1.0)
    assert held(desk), "it heals within the ring"
    desk.stand("held", 8, "a", "b")
    assert ids(desk.minted()) == ["a", "b", "c"]


def test_a_view_after_a_death_is_made_without_those_that_catch_up() -> None:
    desk = beside("d", members=("a", "b", "c"))
    desk.offer("e")
    desk.ready("e")
    desk.lose("c")
    desk.stand("broken", 5, "a", "b")
    assert ids(desk.minted()) == ["a", "b"]
    desk.report("d", "ready", 0)  # its source is gone: it has begun anew
    assert asked(desk) == ["d"]
    desk.report("d", "following", 9)
    desk.report("e", "following", 9)
    assert desk.core.phase is JobPhase.STOPPING


def test_where_the_ring_is_gone_the_follower_is_asked_what_it_has() -> None:
    desk = beside("c")
    desk.report("c", "following", 3)
    for peer_id in ("a", "b"):
        desk.tell(co.PeerLost(peer_id, "stopped", left=True))
    assert desk.of(co.SendAssign) == [co.SendAssign("c", "C", -1)]
    desk.ready("c", applied=3)
    view = desk.minted()
    assert (view.step, healthy(view)) == (3, ["c"])


def test_an_excluded_member_goes_on_if_the_others_only_catch_up() -> None:
    desk = beside("c", members=("a",))
    desk.report("a", "broken", 5, cause="contribution", suspect="a")
    assert ids(desk.minted()) == ["a"], "no other holds the state"


def test_the_state_of_an_excluded_worker_is_not_given_up() -> None:
    desk = Desk(co.JobOptions(replicas=2, micro_batches=8))
    desk.run("a", "b")
    desk.lose("a", "b")
    desk.after(co.GRACE_S)
    desk.core._quarantine.exclusions.add("a", "it died repeatedly", desk.now, 600.0, 600.0)
    desk.offer("a", "b")
    desk.report("b", "ready", 0)
    desk.report("a", "ready", 1)
    assert (desk.view.step, healthy(desk.view)) == (1, ["a"]), "no other holds it"


def test_no_more_are_fed_at_a_time_than_the_members_can_feed_and_have_room_for() -> None:
    many = [f"n{number}" for number in range(9)]
    desk = Desk(co.JobOptions(replicas=1, micro_batches=6), slow=True)
    desk.run("a")
    desk.offer(*many)
    for peer_id in many:
        desk.ready(peer_id)
    assert desk.core._catch_ups.moving == frozenset(many[:CATCHING_UP_PER_MEMBER])
    desk.report("n0", "following", 2)
    desk.report("n1", "following", 2)
    desk.stand("held", 3, "a")
    assert ids(desk.minted()) == ["a", "n0", "n1"]
    assert desk.core._catch_ups.moving == {"n2"}, "asked when the first one followed"
    desk.tell(co.StepCommitted(4))
    assert asked(desk) == ["n3", "n4"], "there is room for three"


def test_sources_are_those_with_the_fastest_way_to_the_newcomer() -> None:
    desk = Desk(co.JobOptions(replicas=4, micro_batches=8), slow=True)
    desk.run("a", "b", "c", "d")
    fast, slow = LinkQuality(1e-3, 1e9), LinkQuality(1e-3, 1e6)
    desk.tell(co.LinksMeasured({("a", "e"): fast, ("d", "e"): slow}))
    desk.offer("e")
    desk.ready("e")
    (ask,) = desk.of(co.SendCatchUp)
    assert [source.peer_id for source in ask.sources] == ["a", "d", "c"]


# ----------------------------------------------------------------------------------------------------------- flapping


def die_and_return(desk: Desk, peer_id: str = "c") -> float:
    """The member dies, comes again, and the ring goes on; returns how long it is kept out."""
    step = desk.core.known_step
    desk.lose(peer_id)
    desk.stand("broken", step, "a", "b")
    assert ids(desk.minted()) == ["a", "b"]
    desk.tell(co.StepCommitted(step + 1))
    desk.offer(peer_id)
    desk.ready(peer_id)
    began = desk.now
    while not held(desk):
        at = desk.core.next_deadline()
        assert at is not None
        desk.now = at
        desk.tell(co.Signal.TICK)
    desk.stand("held", step + 2, "a", "b")
    assert peer_id in ids(desk.minted())
    desk.tell(co.StepCommitted(step + 3))
    return desk.now - began


def test_a_member_that_dies_again_and_again_is_kept_out_for_ever_longer() -> None:
    desk = Desk(co.JobOptions(replicas=3, micro_batches=8))
    desk.run("a", "b", "c")
    assert [die_and_return(desk) for _ in range(8)] == [0, 1, 2, 4, 8, 16, 30, 30]


def test_a_dead_member_is_named_and_told_how_long_it_is_kept_out_when_it_is_back() -> None:
    desk = Desk(co.JobOptions(replicas=3, micro_batches=8))
    desk.run("a", "b", "c")
    die_and_return(desk)
    step = desk.core.known_step
    desk.lose("c")
    desk.stand("broken", step, "a", "b")
    assert "name-c is excluded for 1 s: it died repeatedly" in [it.text for it in desk.said if isinstance(it, co.Emit)]
    assert desk.core.kept_out() == {}
    desk.offer("c")
    assert desk.core.kept_out() == {"c": ("it is excluded: it died repeatedly", desk.now + DEATH_COOLDOWN_S)}


# ------------------------------------------------------------------------------------------------------- shares, doubt


# ---------------------------------------------------------------------------------------------------------- two sides


def cut_off(step_s: float) -> Desk:
    """All members of a ring at step 100 are cut off from the seed, and fresh workers came."""
    desk = Desk()
    desk.run("a", "b")
    for step in range(2, 101):  # told all at once: who should have told them found the seed again only now
        desk.tell(co.StepCommitted(step, step_s))
    desk.lose("a", "b")
    desk.after(co.GRACE_S)
    assert desk.core.phase is JobPhase.WAITING
    desk.offer("x", "y")
    desk.ready("x", "y")
    return desk


def test_a_ring_that_is_cut_off_is_taken_back_as_long_as_no_newer_view_was_minted() -> None:
    desk = cut_off(step_s=4.0)
    desk.after(100 * 4.0 - 1.0)
    assert desk.core.phase is JobPhase.WAITING, "as long as it took to get there"
    for peer_id in ("a", "b"):
        desk.tell(co.PeerReturned(peer(peer_id), 1))
        desk.report(peer_id, "training", 140)
    assert desk.core.phase is not JobPhase.WAITING
    assert desk.core.known_step == 140


def test_the_side_that_was_cut_off_is_given_up_when_a_newer_view_was_minted() -> None:
    desk = cut_off(step_s=4.0)
    desk.after(100 * 4.0)
    assert ids(desk.minted()) == ["x", "y"]
    assert "steps-lost" in desk.kinds()
    desk.tell(co.StepCommitted(1))
    for peer_id, status in (("a", "training"), ("b", "broken")):
        desk.tell(co.PeerReturned(peer(peer_id), 1))
        desk.report(peer_id, status, 160, generation=1)
        assert desk.of(co.SendRelease) == [
            co.SendRelease(peer_id, "the ring continued without this worker; it will join again")
        ]
    assert desk.core.known_step == 1


# ------------------------------------------------------------------------------------------------------------- a crowd


@pytest.mark.parametrize(("random_bytes", "least", "most"), [(0, 1000, 1000), (32, 400, 999)])
def test_a_view_names_a_thousand_members_unless_their_names_do_not_fit_a_frame(
    random_bytes: int, least: int, most: int
) -> None:
    core, rng = Coordinator("j" * 12, co.JobOptions(replicas=1000, micro_batches=1000)), random.Random(1)
    for number in range(1000):
        host = f"198.{rng.randrange(256)}.{rng.randrange(256)}.{rng.randrange(256)}"
        name = rng.randbytes(random_bytes).hex() or f"machine-{number}"
        core.handle(co.PeerOffered(co.JobWorker(rng.randbytes(8).hex(), name, host, rng.randrange(1, 1 << 16))), 0.0)
    for peer_id in sorted(core.peer_ids):
        core.handle(co.PeerReported(peer_id, Report("j", 0, "ready", 0, 0, "0" * 32, corpus="C")), 0.0)
    assert core.view is not None
    assert least <= core.view.size <= most
    assert len(encode(core.view)) < CONTROL_FRAME_BYTES
    check_invariants(core)


def test_with_too_few_members_a_job_waits_for_a_newcomer_and_takes_it_at_once() -> None:
    desk = Desk(co.JobOptions(replicas=3, micro_batches=8, least=3), slow=True)
    desk.run("a", "b", "c")
    desk.tell(co.PeerLost("c", "it died"))
    desk.stand("broken", 4, "a", "b")
    assert (desk.core.phase, desk.core.short) == (JobPhase.WAITING, True)
    assert desk.core.reason == "one more worker is needed (2 of 3 are ready)"
    desk.offer("d")
    desk.ready("d")
    view = desk.minted()
    assert (view.step, ids(view), healthy(view)) == (4, ["a", "b", "d"], ["a", "b"])


def test_a_member_excluded_in_the_last_moment_leaves_no_view_of_too_few() -> None:
    desk = Desk(co.JobOptions(replicas=3, micro_batches=8, least=3))
    desk.run("a", "b", "c")
    for step, waits in ((1, False), (2, True)):
        desk.lose("c")
        desk.stand("broken", step, "a", "b")
        desk.offer("c")
        desk.ready("c")
        assert (desk.core.phase is JobPhase.WAITING) is waits  # its second death excludes it for a while
        if waits:
            assert desk.core.reason == "one more worker is needed (2 of 3 are ready)"
            desk.after(DEATH_COOLDOWN_S)
        assert ids(desk.minted()) == ["a", "b", "c"]
        desk.tell(co.StepCommitted(step + 1))
