"""Steps that the members refused: a spike in the data, a faulty member."""

from __future__ import annotations

import pytest

from ring import coordination as co
from ring.coordination import JobPhase
from tests.ring.desk import Desk, ids

STEP = 7


def running(*members: str) -> Desk:
    desk = Desk(co.JobOptions(replicas=len(members), micro_batches=8))
    desk.run(*members)
    desk.tell(co.StepCommitted(STEP))
    return desk


def refuse(desk: Desk, suspect: str, cause: str = "contribution", *, unaware: str = "") -> None:
    """All members refuse the step after ``STEP``; ``unaware``: one that lost its neighbour before it saw the vote."""
    view = desk.view
    for peer_id in ids(view):
        if peer_id == unaware:
            desk.report(peer_id, "broken", STEP, suspect=ids(view)[0])
        else:
            desk.report(peer_id, "broken", STEP, cause=cause, suspect=suspect)


def text(desk: Desk) -> str:
    (event,) = [item for item in desk.said if isinstance(item, co.Emit) and item.kind == "step-refused"]
    return event.text


def next_view(desk: Desk) -> tuple[list[str], bool]:
    view = desk.minted()
    return sorted(ids(view)), view.lenient


@pytest.mark.parametrize("unaware", ["", "b"])
def test_who_contributes_what_is_refused_sits_out_and_the_others_compute_its_part(unaware: str) -> None:
    desk = running("a", "b", "c")
    refuse(desk, "c", unaware=unaware)
    assert next_view(desk) == (["a", "b"], False)
    assert desk.minted().step == STEP
    assert sum(member.count for member in desk.minted().members) == 8
    assert text(desk) == (
        "step 8 was not applied: name-c sent gradients that are not finite or are outliers: name-c is excluded for 30 s"
    )
    why = "it is excluded: name-c sent gradients that are not finite or are outliers"
    assert desk.core.kept_out() == {"c": (why, desk.now + 30.0)}
    desk.tell(co.StepCommitted(STEP + 1))
    desk.after(30.0)
    assert desk.of(co.SendHold), "it may come back"
    desk.stand("held", STEP + 9, "a", "b")
    assert next_view(desk) == (["a", "b", "c"], False)


@pytest.mark.parametrize("cause", ["contribution", "digest"])
def test_a_faulty_member_sits_out_longer_each_time_whatever_its_connection(cause: str) -> None:
    desk = running("a", "b", "c")
    for seconds in (30, 60):
        refuse(desk, "c", cause)
        assert f"name-c is excluded for {seconds} s" in text(desk)
        desk.tell(co.StepCommitted(STEP + 1))
        desk.lose("c")
        desk.offer("c")
        desk.ready("c")
        desk.after(seconds - 1.0)
        assert not desk.of(co.SendHold)
        desk.after(1.0)
        desk.stand("held", STEP, "a", "b")  # the step was taken back, for this test
        assert "c" in ids(desk.minted())


def test_what_another_member_computes_alike_is_the_data_and_who_sat_out_is_absolved() -> None:
    desk = running("a", "b", "c")
    refuse(desk, "c")
    refuse(desk, "b")
    assert next_view(desk) == (["a", "b", "c"], True)
    assert "the data is the cause" in text(desk)
    desk.tell(co.StepCommitted(STEP + 1))
    desk.lose("c")
    desk.stand("broken", STEP + 1, "a", "b")
    assert next_view(desk) == (["a", "b"], False)


@pytest.mark.parametrize("members", [("a",), ("a", "b", "c")])
def test_a_step_that_nobody_can_compute_ends_the_job_with_a_remedy(members: tuple[str, ...]) -> None:
    desk = running(*members)
    refuse(desk, members[-1])
    refuse(desk, members[0])
    assert next_view(desk) == (sorted(members), True)
    refuse(desk, members[-1])
    if len(members) > 1:  # the word of one of them does not end the job
        assert next_view(desk) == (["a", "b"], True)
        refuse(desk, members[0])
    assert desk.core.phase is JobPhase.FAILED
    assert "step 8 cannot be computed: the gradient is not finite" in desk.core.reason
    assert "older checkpoint" in desk.core.reason


def test_a_job_is_not_done_before_its_last_step_by_the_word_of_its_members() -> None:
    desk = Desk(co.JobOptions(replicas=2, micro_batches=8, least_steps=STEP + 1))
    desk.run("a", "b")
    for peer_id in "ab":
        desk.report(peer_id, "done", STEP)
    assert next_view(desk) == (["a", "b"], False)
    desk.tell(co.CheckpointsSaved({"a": frozenset({STEP + 1})}))
    for peer_id in "ab":
        desk.report(peer_id, "done", STEP + 1)
    assert desk.core.phase is JobPhase.DONE


def test_one_report_alone_excludes_nobody() -> None:
    desk = running("a", "b", "c")
    for peer_id, cause, suspect in (("c", "figure", "a"), ("a", "", ""), ("b", "", "")):
        desk.report(peer_id, "broken", STEP, cause=cause, suspect=suspect)
    assert next_view(desk) == (["a", "b", "c"], False)


def test_a_member_that_told_a_false_figure_sits_out_whatever_it_reports() -> None:
    desk = running("a", "b", "c")
    for peer_id, cause, suspect in (("b", "digest", "a"), ("a", "figure", "b"), ("c", "figure", "b")):
        desk.report(peer_id, "broken", STEP, cause=cause, suspect=suspect)
    assert text(desk) == (
        "step 8 was not applied: name-b told what the other members know to be false: name-b is excluded for 30 s"
    )
    assert next_view(desk) == (["a", "c"], False)


@pytest.mark.parametrize("culprit", ["a", "c", "d"])
def test_who_spoils_sums_unsaid_is_found_by_trying_without_each(culprit: str) -> None:
    desk = running("a", "b", "c", "d")
    refuse(desk, "")
    assert "it is computed again" in text(desk)
    assert next_view(desk) == (["a", "b", "c", "d"], False), "it may have been damage in transit"
    for _ in range(4):
        refuse(desk, "")
        without = {"a", "b", "c", "d"} - set(ids(desk.minted()))
        assert len(without) == 1
        if without == {culprit}:
            break
    assert f"tried without: name-{culprit} is excluded for 30 s" in text(desk)
    desk.tell(co.StepCommitted(STEP + 1))
    assert desk.core.kept_out().keys() == {culprit}


def test_a_masked_sum_is_not_tried_and_the_job_waits_for_a_person_who_is_told_whom_to_ask() -> None:
    desk = Desk(co.JobOptions(replicas=3, micro_batches=8, masked=True))
    desk.run("a", "b", "c")
    desk.tell(co.StepCommitted(STEP))
    refuse(desk, "")
    assert next_view(desk) == (["a", "b", "c"], False)
    refuse(desk, "")
    assert desk.core.phase is JobPhase.PAUSED
    assert "masks hide whose it is: ask who runs name-a, name-b, name-c" in desk.core.reason
    desk.tell(co.Signal.RESUME)
    assert next_view(desk) == (["a", "b", "c"], False)
