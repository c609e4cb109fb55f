"""Scenarios: what the coordinator says after which events. The random ones are in ``test_coordinator_model``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import pytest

from ring import coordination as co
from ring.coordination import SAVE_AGAIN_S
from ring.planning.measurements import LinkQuality
from ring.planning.ring_plan import RingOptions
from tests.ring.desk import Desk, healthy, ids, peer
from wire.address import how_to_open
from wire.job_messages import SettingChange

# --------------------------------------------------------------------------------------------------------- first view


def test_first_view_waits_for_enough_workers() -> None:
    desk = Desk()
    desk.offer("b", "a")
    assert desk.said == [co.SendAssign("a", "", -1)]
    desk.ready("b")
    assert desk.said == [co.SetCorpus("C"), co.SetState("waiting", "one more worker is needed (1 of 2 are ready)")]
    desk.ready("a")
    view = desk.minted()
    assert (view.generation, view.step, view.lineage, ids(view), healthy(view)) == (1, 0, "L0", ["a", "b"], ["a", "b"])
    assert [(member.first, member.count) for member in view.members] == [(0, 4), (4, 4)]
    assert desk.of(co.SetState) == [co.SetState("running", "")]
    assert desk.kinds() == ["view"]


def test_resume_starts_from_the_newest_checkpoint_and_the_others_heal() -> None:
    desk = Desk()
    desk.offer("a", "b")
    desk.report("a", "ready", 50, square_sum=1.0)
    desk.report("b", "ready", 100, square_sum=2.5)
    view = desk.minted()
    assert (view.step, view.lineage, ids(view), healthy(view), view.square_sum) == (100, "L100", ["b", "a"], ["b"], 2.5)


@pytest.mark.parametrize(
    ("lineages", "winner"),
    [({"a": "x", "b": "y", "c": "y"}, "y"), ({"a": "z", "b": "y", "c": "x"}, "x")],
    ids=["the one most hold", "the lesser of equals"],
)
def test_of_two_lineages_at_the_same_step_one_wins(lineages: dict[str, str], winner: str) -> None:
    desk = Desk(co.JobOptions(replicas=3, micro_batches=8))
    desk.offer(*lineages)
    for peer_id, lineage in lineages.items():
        desk.report(peer_id, "ready", 7, lineage)
    view = desk.minted()
    assert view.lineage == winner
    assert set(healthy(view)) == {peer_id for peer_id, lineage in lineages.items() if lineage == winner}


def test_a_worker_with_other_data_is_released_with_a_remedy_and_not_taken_again() -> None:
    desk = Desk()
    desk.offer("a", "b")
    assert desk.core.reason == "no worker is ready"
    desk.ready("a")
    desk.report("b", "ready", corpus="D")
    (release,) = desk.of(co.SendRelease)
    assert "its data, tokenizer or base model differs" in release.reason
    assert "the files that the job started with" in release.reason
    assert desk.kinds() == ["corpus"]
    assert desk.core.refusal("b")
    desk.lose("b")
    assert not desk.core.refusal("b")  # another process may have the right files


# ------------------------------------------------------------------------------------------------- newcomers and holds


def test_a_newcomer_holds_the_ring_and_another_one_waits_for_the_next_view() -> None:
    desk = Desk()
    desk.start("a", "b")
    desk.offer("c", "d")
    desk.ready("c")
    assert desk.of(co.SendHold) == [co.SendHold(("a", "b"), 1, "name-c joining")]
    desk.ready("d")
    assert desk.of(co.SendHold) == []
    desk.stand("held", 4, "a")
    assert desk.of(co.Mint) == []  # b may still be training
    desk.stand("held", 4, "b")
    view = desk.minted()
    assert (view.generation, view.step, ids(view), healthy(view)) == (2, 4, ["a", "b", "c"], ["a", "b"])
    desk.tell(co.StepCommitted(5))
    assert desk.of(co.SendHold), "d has caught up"


# --------------------------------------------------------------------------------------------------- death and breaks


def test_after_a_death_whoever_holds_the_redo_buffer_is_healthy() -> None:
    desk = Desk(co.JobOptions(replicas=4, micro_batches=8))
    desk.run("a", "b", "c", "d")
    desk.lose("d")
    assert desk.said == []  # the ring will tell
    desk.report("a", "broken", 10, square_sum=3.0, suspect="d")
    desk.report("b", "broken", 9, prepared=10, prepared_lineage="L10")
    desk.report("c", "broken", 9, prepared=10, prepared_lineage="another")
    view = desk.minted()
    assert (view.step, view.lineage, view.square_sum, ids(view)) == (10, "L10", 3.0, ["a", "b", "c"])
    assert healthy(view) == ["a", "b"]


def test_a_silent_survivor_is_struck_off_and_may_come_back() -> None:
    desk = Desk(co.JobOptions(replicas=3, micro_batches=8))
    desk.start("a", "b", "c")
    desk.report("a", "broken", 5, suspect="c")
    desk.lose("c")
    assert desk.after(29.0) == []
    desk.after(1.0)
    assert co.SendRelease("b", "removed from the ring: it did not stop in time") in desk.said
    assert ids(desk.minted()) == ["a"]
    assert not desk.core.refusal("b")


def broken(desk: Desk, noticed: str, suspect: str, cause: str = "protocol") -> None:
    """All members of the view report that ``noticed`` accuses ``suspect``, which lost that neighbour in turn."""
    view = desk.view
    for peer_id in ids(view):
        if peer_id == suspect:
            desk.report(peer_id, "broken", 1, suspect=noticed, beside=suspect)
        else:
            desk.report(peer_id, "broken", 1, suspect=suspect, beside=noticed, cause=cause * (peer_id == noticed))


@pytest.mark.parametrize("cause", ["protocol", "stalled"])
@pytest.mark.parametrize("first", [("b", "a"), ("a", "d")], ids=["it is accused twice", "it accuses two"])
def test_member_at_both_of_two_broken_links_is_excluded(first: tuple[str, str], cause: str) -> None:
    desk = Desk(co.JobOptions(replicas=4, micro_batches=8))
    before = ids(desk.run("a", "b", "c", "d"))
    broken(desk, *first, cause)
    assert ids(desk.minted()) == before[::-1], "the neighbours change sides"
    desk.tell(co.StepCommitted(2))  # a step that is committed meanwhile absolves nobody
    second = ("d", "a") if first == ("b", "a") else ("a", "b")
    broken(desk, *second, cause)
    assert ids(desk.minted()) == ["b", "c", "d"]
    assert desk.kinds()[0] == "link"
    assert "name-a is excluded for 30 s" in str(desk.said)


def test_member_that_others_cannot_connect_to_is_told_how_to_open_its_port() -> None:
    desk = Desk(co.JobOptions(replicas=2, micro_batches=8))
    view = desk.start("a", "b")
    for _ in range(2):
        desk.report("a", "broken", suspect="b", cause="dial", reason="cannot reach 10.0.0.2:7339: no answer")
        desk.report("b", "broken", suspect="a", beside="b")
    (why, _) = desk.core.kept_out()["b"]
    for text in (why, str(desk.said)):
        assert "cannot reach 10.0.0.2:7339" in text
        assert f"On name-b's machine: {how_to_open(view.members[1].port)}" in text


def test_breaks_of_links_are_forgotten_with_a_commit() -> None:
    desk = Desk(co.JobOptions(replicas=3, micro_batches=8))
    desk.run("a", "b", "c")
    broken(desk, "b", "a", "")
    desk.tell(co.StepCommitted(2))
    broken(desk, "c", "a", "")
    assert len(ids(desk.minted())) == 3


def test_suspect_that_waits_for_another_member_is_not_at_fault() -> None:
    desk = Desk(co.JobOptions(replicas=3, micro_batches=8))
    desk.run("a", "b", "c")
    for _ in range(2):
        desk.report("b", "broken", 1, suspect="a")
        desk.report("a", "broken", 1, suspect="c")
        desk.report("c", "broken", 1)
    assert ids(desk.minted()) == ["a", "b"]


def test_member_that_hangs_is_removed_and_nobody_else() -> None:
    desk = Desk(co.JobOptions(replicas=3, micro_batches=8))
    desk.run("a", "b", "c")
    desk.report("b", "hung", 1, reason="its computing has not moved for 10 s")
    assert desk.kinds() == ["struck-off"]
    assert "name-b was removed from the ring: its computing has not moved for 10 s" in str(desk.said)
    assert desk.of(co.SendRelease) == [
        co.SendRelease("b", "removed from the ring: its computing has not moved for 10 s")
    ]
    desk.stand("broken", 1, "a", "c", suspect="b", beside="c")
    assert sorted(ids(desk.minted())) == ["a", "c"]
    desk.offer("b")
    desk.ready("b")
    assert desk.of(co.SendHold), "it comes back when its computing goes on"


def test_member_that_hangs_with_the_only_copy_of_its_part_has_more_time() -> None:
    desk = Desk(co.JobOptions(replicas=1, micro_batches=8))
    desk.run("a")
    for kinds in (["hung"], []):
        desk.report("a", "hung", 1, reason="its computing has not moved for 10 s")
        assert desk.kinds() == kinds
    desk.after(30.0)
    desk.report("a", "hung", 1)
    assert desk.kinds() == ["struck-off"]


def test_when_a_link_breaks_twice_without_a_step_the_suspect_sits_out_and_longer_each_time() -> None:
    desk = Desk()
    desk.start("a", "b")
    for cooldown_s in (30.0, 60.0):
        for _ in range(2):
            desk.report("a", "broken", 0, suspect="b")
            desk.stand("broken", 0, "b")
        assert ids(desk.minted()) == ["a"]
        desk.after(cooldown_s - 1)
        assert desk.of(co.SendHold) == []
        desk.after(1.0)
        assert desk.of(co.SendHold)
        desk.stand("held", 0, "a")
        assert ids(desk.minted()) == ["a", "b"]


# --------------------------------------------------------------------------------------------------- links to the seed


def test_a_lost_link_to_the_seed_does_not_disturb_a_ring_that_runs() -> None:
    desk = Desk()
    desk.run("a", "b")
    desk.lose("a")
    assert desk.said == []
    desk.now += 10
    assert desk.tell(co.PeerReturned(peer("a"), 1)) == [co.SetState("forming", "")]
    assert desk.report("a", "training", 40) == [co.SetState("running", "")]
    assert desk.after(1000.0) == []


def test_a_restarted_seed_takes_a_running_ring_back_as_it_is() -> None:
    view = Desk().start("a", "b")
    desk = Desk(past=co.StoredJob(state="running", view=view, corpus="C", known_step=30))
    assert desk.core.state == "forming"
    for peer_id in ("a", "b"):
        desk.tell(co.PeerReturned(peer(peer_id), 1))
    assert desk.of(co.SendAssign) == []
    desk.report("a", "training", 40)
    assert desk.core.state == "forming"
    desk.report("b", "training", 40)
    assert desk.said == [co.SetState("running", "")]
    assert desk.after(1000.0) == []


# -------------------------------------------------------------------------------------------------- everybody was gone


@pytest.mark.parametrize("how", ["all members are back", "patience"])
def test_if_the_newest_state_is_gone_the_best_at_hand_is_used_and_the_loss_is_named(how: str) -> None:
    desk = Desk()
    desk.start("a", "b")
    desk.tell(co.CheckpointsSaved({"a": frozenset({50}), "b": frozenset({60})}))
    desk.tell(co.StepCommitted(73))
    desk.lose("a", "b")
    desk.offer("a")
    desk.ready("a", applied=50)
    why = "waiting for name-b, which may hold step 73 (newest here: step 50)"
    assert desk.of(co.SetState) == [co.SetState("waiting", why)]
    assert desk.core.kept_out() == {"a": (why, desk.now + 30.0)}
    if how == "patience":
        desk.after(30.0)
    else:
        desk.offer("b")
        desk.ready("b", applied=25)  # nobody has 73 in memory any more, and its 60 is damaged
    assert (desk.minted().step, desk.core.known_step) == (50, 50)
    assert any(isinstance(item, co.Emit) and "23 steps are lost" in item.text for item in desk.said)


# ----------------------------------------------------------------------------------------------- what a person asks for


def test_pause_and_resume_keep_the_members_and_their_state() -> None:
    desk = Desk()
    desk.start("a", "b")
    desk.tell(co.Signal.PAUSE)
    assert desk.of(co.SendHold) == [co.SendHold(("a", "b"), 1, "the job is pausing")]
    desk.stand("held", 6, "a", "b")
    assert desk.said == [co.SetState("paused", "paused by a person")]
    assert desk.core.refusal("z") == "is paused"
    assert desk.core.kept_out() == dict.fromkeys(("a", "b"), ("the job is paused", math.inf))
    desk.tell(co.Signal.RESUME)
    view = desk.minted()
    assert (view.step, healthy(view)) == (6, ["a", "b"])


def test_job_ends_where_it_is_when_it_has_passed_its_new_number_of_steps() -> None:
    desk = Desk()
    desk.start("a", "b")
    changes = (SettingChange(0, "job.steps", "5", "400"), SettingChange(0, "job.steps", "6", "5"))
    desk.tell(co.ChangeSettings(changes, 6))
    desk.stand("held", 7, "a", "b")
    assert [(item.value, item.before) for item in desk.view.changes] == [("7", "400"), ("7", "7")]


def test_cancel_releases_everybody() -> None:
    desk = Desk()
    desk.start("a", "b")
    desk.tell(co.Signal.CANCEL)
    assert {item.peer_id for item in desk.of(co.SendRelease)} == {"a", "b"}
    assert desk.core.state == "cancelled"
    assert desk.tell(co.PeerOffered(peer("c"))) == [
        co.SendRelease("c", "the job is cancelled and accepts no workers now")
    ]


def test_restore_takes_all_back_and_state_of_the_given_up_branch_counts_no_more() -> None:
    desk = Desk()
    desk.start("a", "b", applied=200)
    desk.lose("b")  # it keeps step 200 on its disk
    desk.tell(co.Restore(100, "a", "L100"))
    desk.stand("held", 205, "a")
    assert desk.said[0] == co.SendAssign("a", "C", 100, lineage="L100")
    desk.report("a", "held", 205)  # said before it read the order
    assert desk.of(co.Mint) == []
    desk.ready("a", applied=100)
    mint = desk.of(co.Mint)[0]
    assert (mint.restored, mint.view.step, mint.view.generation) == (True, 100, 2)
    assert desk.core.known_step == 100
    desk.lose("a")
    desk.offer("b")
    desk.ready("b", applied=205)
    assert desk.of(co.Mint) == []  # not before a had its chance
    desk.offer("a")
    desk.ready("a", applied=100)
    assert (desk.minted().step, healthy(desk.minted())) == (100, ["a"])


# ------------------------------------------------------------------------------------------------------ ends and leaves


def test_a_job_is_done_only_when_a_disk_has_its_result() -> None:
    desk = Desk()
    desk.start("a", "b")
    desk.tell(co.CheckpointsSaved({"a": frozenset({300})}))
    desk.report("a", "done", 400, unsaved="no space on /x. Free some")
    desk.report("b", "done", 400)
    assert desk.core.state == "saving"
    assert "step 400, is not saved yet: name-a: no space on /x. Free some" in desk.core.reason
    asked = [co.SendSave(("a",))]
    assert desk.of(co.SendSave) == asked
    desk.report("a", "done", 400, unsaved="no space on /x. Free some")
    assert desk.of(co.SendSave) == [], "not again at once"
    for peer_id in "baba":
        asked = desk.after(SAVE_AGAIN_S - 0.1) + desk.after(SAVE_AGAIN_S * 8)
        assert co.SendSave((peer_id,)) in asked
    desk.lose("a")
    assert desk.core.state == "saving", "b keeps it"
    desk.tell(co.CheckpointsSaved({"b": frozenset({400})}))
    assert (desk.core.state, desk.core.reason) == ("done", "every step is done")
    assert desk.of(co.SendRelease) == []  # it keeps the model until another job needs it


def test_a_newcomer_may_have_room_for_the_result_and_one_without_a_place_is_no_reason_for_a_view() -> None:
    desk = Desk(co.JobOptions(replicas=2, micro_batches=3), slow=True)
    desk.run("a", "b")
    desk.stand("done", 400, "a", "b")
    assert desk.core.state == "saving"
    desk.offer("c", "d")
    desk.ready("c")
    assert (ids(desk.minted()), healthy(desk.minted())) == (["a", "b", "c"], ["a", "b"])
    desk.report("c", "healed", 400)
    desk.stand("done", 400, "a", "b", "c")
    desk.ready("d")
    assert (desk.core.state, desk.of(co.Mint)) == ("saving", [])


@pytest.mark.parametrize("verb", ["pause", "cancel", "restore"])
def test_people_have_their_way_with_a_job_whose_result_is_not_saved(verb: str) -> None:
    desk = Desk()
    desk.run("a", "b")
    desk.stand("done", 400, "a", "b")
    match verb:
        case "cancel":
            desk.tell(co.Signal.CANCEL)
            assert desk.core.state == "cancelled"
        case "pause":
            desk.tell(co.Signal.PAUSE)
            assert desk.core.state == "paused"
            desk.tell(co.Signal.RESUME)
            assert desk.core.state == "saving"
        case "restore":
            desk.tell(co.Restore(100, "a", "L100"))
            desk.ready("a", "b", applied=100)
            assert desk.minted().step == 100


def test_parts_of_a_result_are_enough_when_every_member_has_tried_to_assemble_them() -> None:
    desk = Desk(co.JobOptions(replicas=1, micro_batches=2, parts=2))
    desk.run("a", "b")
    desk.tell(co.CheckpointsSaved({}, {("a", 0): frozenset({400}), ("b", 1): frozenset({400})}))
    desk.stand("done", 400, "a", "b")
    assert desk.of(co.SendSave) == [co.SendSave(("a",))]
    assert co.SendSave(("b",)) in desk.after(SAVE_AGAIN_S + 0.1)
    assert desk.core.state == "saving"
    desk.after(4 * SAVE_AGAIN_S)
    assert desk.core.state == "done"


def test_the_last_holder_of_a_state_is_known() -> None:
    desk = Desk()
    desk.run("a", "b")
    desk.offer("c")
    assert not desk.core.is_last_holder("a", ["b", "c"])
    assert desk.core.is_last_holder("a", ["c"]), "a newcomer has no state"
    desk.stand("held", 5, "a", "b")
    assert not desk.core.is_last_holder("a", ["b"]), "it keeps what it stopped with"


def test_a_failed_member_leaves_the_view_and_the_others_go_on() -> None:
    desk = Desk()
    desk.start("a", "b")
    desk.report("b", "failed", 3, reason="out of memory")
    assert co.SendRelease("b", "cannot continue: out of memory") in desk.said
    desk.report("a", "broken", 3, suspect="b")
    assert ids(desk.minted()) == ["a"]
    assert desk.core.refusal("b")


@pytest.mark.parametrize("spares", [(), ("s",)])
def test_when_all_members_fail_the_job_has_failed_with_their_reason(spares: Iterable[str]) -> None:
    desk = Desk(co.JobOptions(replicas=2, micro_batches=2))
    desk.start("a", "b")
    desk.offer(*spares)
    desk.ready(*spares)
    said = "each micro-batch of a step has a worker; this one replaces one that leaves"
    assert desk.core.kept_out() == dict.fromkeys(spares, (said, math.inf))
    desk.report("a", "failed", 3, reason="the loss is not finite")
    desk.report("b", "failed", 3, reason="the loss is not finite")
    assert desk.core.state == "failed"
    assert desk.of(co.SetState) == [co.SetState("failed", "the loss is not finite")]


def test_a_paused_job_saves_where_it_stops_and_can_let_its_workers_go() -> None:
    desk = Desk()
    desk.run("a", "b")
    desk.tell(co.Signal.PAUSE)
    assert [type(item) for item in desk.said[:2]] == [co.SendSave, co.SendHold]  # in this order: both in one step
    assert desk.tell(co.Signal.YIELD) == []  # it still trains
    desk.stand("held", 6, "a", "b")
    survivors = desk.core.paused_survivors()
    assert survivors is not None
    assert {peer_id: report.applied for peer_id, report in survivors.items()} == {"a": 6, "b": 6}
    desk.tell(co.CheckpointsSaved({"a": frozenset({6})}))
    desk.tell(co.Signal.YIELD)
    assert [item.peer_id for item in desk.of(co.SendRelease)] == ["a", "b"]
    assert (desk.core.state, desk.core.paused_survivors()) == ("paused", None)
    desk.tell(co.Signal.RESUME)
    desk.offer("b")
    desk.ready("b", applied=6)
    assert desk.minted().step == 6


# ------------------------------------------------------------------------------------------------------- the table


@pytest.mark.parametrize("status", ["held", "broken"])
def test_a_view_that_its_members_never_heard_of_costs_no_step(status: str) -> None:
    desk = Desk()
    old = desk.run("a", "b")
    desk.stand(status, 500, "a", "b")
    view = desk.minted()  # durable, and then the seed dies
    saved = co.CheckpointsSaved({"a": frozenset({400}), "b": frozenset({400})})
    past = co.StoredJob(state="running", view=view, corpus="C", known_step=500, saved=saved)
    desk = Desk(past=past)
    for peer_id in ("a", "b"):
        desk.tell(co.PeerReturned(peer(peer_id), old.generation))
        desk.report(peer_id, status, 500, generation=old.generation)
    again = desk.minted()
    assert (again.generation, again.step, healthy(again)) == (view.generation + 1, 500, ["a", "b"])


# ------------------------------------------------------------------------------------------ the plan of a view's ring


def slow_between(*slow: str) -> dict[tuple[str, str], LinkQuality]:
    """Links between a, b, c and d, of which those of the named pairs are slow both ways."""
    unwanted = {frozenset(pair) for pair in slow}
    return {
        pair: LinkQuality(0.02, 20e6) if frozenset(pair) in unwanted else LinkQuality(1e-3, 1e9)
        for pair in itertools.permutations("abcd", 2)
    }


def planned(links: dict[tuple[str, str], LinkQuality], compute_s: float = 0.0, **ring_options: Any) -> Desk:
    desk = Desk(co.JobOptions(replicas=4, micro_batches=8, ring_options=RingOptions(**ring_options)))
    desk.tell(co.LinksMeasured(links, compute_s))
    desk.offer(*"abcd")
    for name in "abcd":
        desk.report(name, "ready", reduce_bytes=1 << 24)
    return desk


def neighbours(desk: Desk) -> set[frozenset[str]]:
    order = ids(desk.minted())
    return {frozenset(pair) for pair in itertools.pairwise([*order, order[0]])}


def test_a_view_has_the_order_of_the_measured_links_and_says_why() -> None:
    desk = planned(slow_between("ab", "cd"), streams=2, sub_chunk_bytes=65536, codec="bf16")
    view = desk.minted()
    assert not neighbours(desk) & {frozenset("ab"), frozenset("cd")}
    assert [member.first for member in view.members] == [0, 2, 4, 6]  # shares follow the ranks
    assert (view.streams, view.sub_chunk_bytes, view.codec) == (2, 65536, "bf16")
    texts = {item.kind: item.text for item in desk.said if isinstance(item, co.Emit)}
    assert "; slowest edge name-" in texts["ring-order"]
    assert texts["ring-transport"] == "2 connections per link, as ring.streams says; codec bf16, as the profile says"


def test_a_better_order_ends_no_ring_but_is_taken_by_the_next_view() -> None:
    desk = planned(slow_between("ac", "bd"))
    assert ids(desk.minted()) == list("abcd")
    desk.stand("training", 1, *"abcd")
    assert desk.tell(co.LinksMeasured(slow_between("ab", "cd"))) == []
    desk.stand("broken", 1, *"abcd")
    assert frozenset("ab") not in neighbours(desk)


def test_an_asynchronous_view_begins_with_its_server_a_holder_of_the_newest_version() -> None:
    desk = Desk(co.JobOptions(replicas=3, micro_batches=2, least=2, asynchronous=True))
    server, second, third = ids(desk.run("a", "b", "c"))
    desk.tell(co.StepCommitted(9))
    desk.stand("broken", 9, server)
    desk.stand("broken", 7, second)
    desk.stand("broken", 8, third, suspect=second)
    view = desk.minted()
    assert (view.step, ids(view)[0], healthy(view)) == (9, server, [server])
    desk.tell(co.PeerLost(server, "its connection ended"))
    desk.stand("broken", 10, second, suspect=server)
    desk.stand("broken", 11, third, suspect=server)
    view = desk.minted()
    assert (view.step, ids(view), healthy(view)) == (11, [third, second], [third])
    desk.tell(co.StepCommitted(15))
    desk.tell(co.PeerLost(third, "its connection ended"))
    desk.stand("broken", 13, second, suspect=third)
    assert desk.core.phase is co.JobPhase.WAITING
    assert desk.core.reason == "one more worker is needed (1 of 2 are ready)"
    desk.offer("d")
    desk.ready("d")
    view = desk.minted()
    assert (view.step, ids(view), healthy(view)) == (13, [second, "d"], [second])
    assert "steps-lost" in desk.kinds(), "the two versions that nobody else had pulled"


def test_a_member_that_still_has_the_state_of_an_abandoned_branch_carries_nothing_on() -> None:
    desk = Desk(co.JobOptions(replicas=2, micro_batches=2, asynchronous=True))
    server, second = ids(desk.start("a", "b", applied=200))
    desk.tell(co.Restore(100, server, "L100"))
    desk.stand("held", 205, server, second)
    desk.ready(server, second, applied=100)
    assert ids(desk.minted())[0] == server
    desk.tell(co.StepCommitted(101))
    desk.offer("c")
    desk.report("c", "ready", 205, "X205")
    desk.stand("held", 101, server, second)
    assert (desk.minted().step, len(ids(desk.minted()))) == (101, 3)
    desk.report("c", "broken", 205, "X205", suspect=server)  # before it pulled
    desk.stand("broken", 102, server, second, suspect="c")
    assert (desk.minted().step, desk.minted().lineage) == (102, "L102")


# ------------------------------------------------------------------------------------------------- undialled neighbours


def test_two_members_that_cannot_reach_each_other_are_not_placed_beside_each_other_again() -> None:
    desk = Desk(co.JobOptions(replicas=4, micro_batches=8))
    assert ids(desk.start("a", "b", "c", "d")) == ["a", "b", "c", "d"]
    desk.report("a", "broken", suspect="b", cause="dial")
    desk.stand("broken", 0, "b", "c", "d")
    order = ids(desk.minted())
    assert sorted(order) == ["a", "b", "c", "d"]
    assert order[(order.index("a") + 1) % 4] != "b"
    desk.tell(co.PeerLost("b", "it left", left=True))  # its address may change
    desk.stand("held", 0, "a", "c", "d")
    desk.offer("b")
    desk.ready("b")
    assert not desk.core._ring_planner.undialled


# ------------------------------------------------------------------------------------------------------------ the pool


def test_withdrawn_member_stops_with_its_ring_and_the_others_go_on() -> None:
    desk = Desk()
    desk.run("a", "b")
    desk.tell(co.PeerWithdrawn("b"))
    (hold,) = desk.of(co.SendHold)
    assert set(hold.peer_ids) == {"a", "b"}
    desk.report("b", "held", 6)
    assert not desk.of(co.SendRelease), "the other one may not have the state"
    desk.report("a", "held", 6)
    assert [item.peer_id for item in desk.of(co.SendRelease)] == ["b"]
    assert ids(desk.minted()) == ["a"]
    assert desk.view.step == 6
    assert not desk.core.refusal("b"), "the pool may give it back"


def test_member_that_alone_holds_the_state_is_not_released() -> None:
    desk = Desk()
    desk.run("a", "b")
    desk.tell(co.PeerWithdrawn("b"))
    desk.report("b", "held", 6)
    desk.lose("a")
    desk.after(co.HOLD_S)
    assert not desk.of(co.SendRelease)
    assert ids(desk.view) == ["b"]
    assert not desk.core.is_withdrawn("b")


def test_last_members_of_a_view_are_not_released() -> None:
    desk = Desk()
    desk.run("a", "b")
    for peer_id in "ab":
        desk.tell(co.PeerWithdrawn(peer_id))
    desk.stand("held", 6, "a", "b")
    assert len(desk.core.peer_ids) == desk.core.needs.floor == 1
    assert desk.view.size == 1


def test_newcomer_is_released_at_once_and_nobody_stops() -> None:
    desk = Desk(slow=True)
    desk.run("a", "b")
    desk.offer("c")
    assert desk.core.may_withdraw("c")
    desk.tell(co.PeerWithdrawn("c"))
    assert [type(item) for item in desk.said] == [co.SendRelease]
