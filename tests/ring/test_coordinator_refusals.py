"""Steps that the members refused: a spike in the data, a faulty member, a hop that changes bytes."""

from __future__ import annotations

import pytest

from ring import coordination as co
from ring.coordination import Phase
from ring.spoilt import SOUGHT
from ring.suspects import LinkJudge
from ring.view import Care, View
from tests.ring.test_coordinator import Desk, ids

STEP = 7


def running(*members: str) -> Desk:
    desk = Desk(co.Terms(workers=len(members), micro_batches=8))
    desk.run(*members)
    desk.tell(co.Progress(STEP))
    return desk


def refuse(desk: Desk, suspect: str, cause: str = "contribution", *, beside: str = "", unaware: str = "") -> None:
    """All members refuse the step after ``STEP``; ``unaware``: one that lost its neighbour before it saw the vote."""
    view = desk.core.view
    assert view is not None
    for peer_id in ids(view):
        if peer_id == unaware:
            desk.report(peer_id, "broken", STEP, suspect=ids(view)[0])
        else:
            desk.report(peer_id, "broken", STEP, cause=cause, suspect=suspect, beside=beside)


def text(desk: Desk) -> str:
    (event,) = [item for item in desk.said if isinstance(item, co.Emit) and item.kind == "step-refused"]
    return event.text


def next_view(desk: Desk) -> tuple[list[str], Care]:
    view = desk.minted()
    return sorted(ids(view)), view.care


@pytest.mark.parametrize("unaware", ["", "b"])
def test_a_refused_step_is_computed_again_by_the_same_members_and_looked_at_closely(unaware: str) -> None:
    desk = running("a", "b", "c")
    refuse(desk, "c", unaware=unaware)
    assert next_view(desk) == (["a", "b", "c"], Care.AUDITED)
    assert desk.minted().step == STEP
    assert text(desk) == (
        "step 8 was not applied: name-c contributes what is not finite, or absurdly large: "
        "it is computed again, and looked at closely"
    )


def test_the_same_member_twice_sits_out_and_the_others_compute_its_part() -> None:
    desk = running("a", "b", "c")
    refuse(desk, "c")
    refuse(desk, "c")
    assert next_view(desk) == (["a", "b"], Care.AUDITED)
    assert sum(member.count for member in desk.minted().members) == 8
    assert "name-c sits out 30 s" in text(desk)
    desk.tell(co.Progress(STEP + 1))
    desk.after(30.0)
    assert desk.of(co.SendHold), "it may come back"
    desk.stand("held", STEP + 9, "a", "b")
    assert next_view(desk) == (["a", "b", "c"], Care.USUAL)


def test_a_faulty_member_sits_out_longer_each_time_whatever_its_connection() -> None:
    desk = running("a", "b", "c")
    for seconds in (30, 60):
        refuse(desk, "c")
        refuse(desk, "c")
        assert f"name-c sits out {seconds} s" in text(desk)
        desk.tell(co.Progress(STEP + 1))
        desk.tell(co.PeerLost("c", "closed"))
        desk.offer("c")
        desk.ready("c")
        desk.after(seconds - 1.0)
        assert not desk.of(co.SendHold)
        desk.after(1.0)
        desk.stand("held", STEP, "a", "b")  # the step was taken back, for this test
        assert "c" in ids(desk.minted())


def test_a_sum_that_differed_before_is_no_witness_that_the_data_is_bad() -> None:
    desk = running("a", "b", "c")
    refuse(desk, "a", cause="digest")
    refuse(desk, "c")
    assert next_view(desk) == (["a", "b", "c"], Care.AUDITED)
    refuse(desk, "c")
    assert "name-c sits out 30 s" in text(desk)
    assert next_view(desk) == (["a", "b"], Care.AUDITED)


def test_what_another_member_computes_alike_is_the_data_and_who_sat_out_is_absolved() -> None:
    desk = running("a", "b", "c")
    refuse(desk, "c")
    refuse(desk, "c")
    refuse(desk, "b")
    assert next_view(desk) == (["a", "b", "c"], Care.LENIENT)
    assert "the data is like that" in text(desk)
    desk.tell(co.Progress(STEP + 1))
    desk.tell(co.PeerLost("c", "closed"))
    desk.stand("broken", STEP + 1, "a", "b")
    assert next_view(desk) == (["a", "b"], Care.USUAL)


@pytest.mark.parametrize("members", [("a",), ("a", "b", "c")])
def test_a_step_that_nobody_can_compute_ends_the_job_with_a_remedy(members: tuple[str, ...]) -> None:
    desk = running(*members)
    last = members[-1]
    refuse(desk, last)
    refuse(desk, last)
    if len(members) > 1:
        refuse(desk, members[0])
    assert next_view(desk) == (sorted(members), Care.LENIENT)
    refuse(desk, last)
    assert desk.core.phase is Phase.FAILED
    assert "step 8 cannot be computed: the gradient is not finite" in desk.core.reason
    assert "older checkpoint" in desk.core.reason


@pytest.mark.parametrize("building", [False, True])
def test_a_lone_member_computes_it_with_whoever_is_there_before_the_data_is_blamed(building: bool) -> None:
    desk = running("a")
    desk.follows = True
    desk.offer("b")
    if not building:
        desk.ready("b")
        assert desk.of(co.SendCatchUp)
    refuse(desk, "a")
    assert next_view(desk)[1] is Care.AUDITED
    refuse(desk, "a")
    assert "as soon as another worker is ready" in text(desk)
    if building:
        assert desk.core.phase is Phase.WAITING
        assert "waiting for another worker" in desk.core.reason
        desk.ready("b")
    assert next_view(desk) == (["a", "b"], Care.AUDITED)
    refuse(desk, "a")
    assert "name-a sits out" in text(desk)


def test_who_never_gets_ready_is_not_waited_for_for_ever() -> None:
    desk = running("a")
    desk.offer("b")
    refuse(desk, "a")
    refuse(desk, "a")
    assert desk.core.phase is Phase.WAITING
    desk.after(desk.core.terms.build_s)
    assert next_view(desk) == (["a"], Care.AUDITED)
    desk.tell(co.PeerLost("b", "closed"))
    refuse(desk, "a")
    assert next_view(desk) == (["a"], Care.LENIENT)


def test_a_step_that_nobody_can_compute_ends_the_job_though_a_worker_never_gets_ready() -> None:
    desk = running("a")
    desk.offer("b")
    for _ in range(2 * SOUGHT + 3):
        if desk.core.phase is Phase.WAITING:
            desk.after(desk.core.terms.build_s)
        if desk.core.phase is not Phase.FAILED:
            refuse(desk, "a")
    assert desk.core.phase is Phase.FAILED
    assert desk.now == SOUGHT * desk.core.terms.build_s


def test_a_worker_that_has_no_place_in_the_ring_is_no_company() -> None:
    desk = Desk(co.Terms(workers=1, micro_batches=1), follows=True)
    desk.run("a")
    desk.tell(co.Progress(STEP))
    desk.offer("b")
    desk.ready("b")
    refuse(desk, "a")
    refuse(desk, "a")
    assert next_view(desk) == (["a"], Care.LENIENT)
    refuse(desk, "a")
    assert desk.core.phase is Phase.FAILED


def test_who_has_company_waits_for_no_more() -> None:
    desk = running("a")
    desk.offer("b")
    refuse(desk, "a")
    refuse(desk, "a")
    desk.ready("b")
    assert next_view(desk)[0] == ["a", "b"]
    desk.offer("c")
    desk.stand("broken", STEP, "a", "b")
    assert next_view(desk) == (["a", "b"], Care.AUDITED)


def test_who_sits_out_is_not_waited_for_as_company() -> None:
    desk = running("a", "c")
    refuse(desk, "c")
    refuse(desk, "c")
    desk.tell(co.Progress(STEP + 1))
    desk.tell(co.PeerLost("c", "closed"))
    desk.offer("b")
    for _ in range(2):
        desk.report("a", "broken", STEP + 1, cause="contribution", suspect="a")
    assert "waiting for another worker" in desk.core.reason
    desk.offer("c")
    desk.tell(co.PeerLost("b", "closed"))
    assert next_view(desk) == (["a"], Care.AUDITED)


def test_in_an_audited_view_the_hop_that_changed_bytes_is_avoided() -> None:
    desk = running("a", "b", "c", "d")
    refuse(desk, "b", "digest")
    assert next_view(desk) == (["a", "b", "c", "d"], Care.AUDITED)
    refuse(desk, "b", "hop", beside="c")
    view = desk.minted()
    assert abs(ids(view).index("b") - ids(view).index("c")) == 2, "opposite each other"
    assert text(desk) == (
        "step 8 was not applied: what name-b sent is not what name-c received: they are no neighbours any more"
    )


def test_in_a_small_ring_who_sends_other_bytes_sits_out() -> None:
    desk = running("a", "b", "c")
    refuse(desk, "b", "hop", beside="c")
    assert next_view(desk) == (["a", "c"], Care.AUDITED)


def test_where_no_hop_changed_anything_the_member_with_another_sum_sits_out() -> None:
    desk = running("a", "b", "c")
    for _ in range(2):
        for peer_id, suspect in (("a", "c"), ("b", "c"), ("c", "a")):  # the odd one names the first that differs
            desk.report(peer_id, "broken", STEP, cause="digest", suspect=suspect)
    assert next_view(desk) == (["a", "b"], Care.AUDITED)


def test_a_refused_step_is_no_fault_of_the_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> str:
        raise AssertionError("the links were judged")

    monkeypatch.setattr(LinkJudge, "judge", never)
    desk = running("a", "b")
    refuse(desk, "b")
    assert isinstance(desk.minted(), View)


def test_another_step_begins_anew() -> None:
    desk = running("a", "b", "c")
    refuse(desk, "c")
    desk.tell(co.Progress(STEP + 1))
    for peer_id in ("a", "b", "c"):
        desk.report(peer_id, "broken", STEP + 1, cause="contribution", suspect="c")
    assert next_view(desk) == (["a", "b", "c"], Care.AUDITED)


def test_names_are_shown_as_they_are() -> None:
    desk = Desk(co.Terms(workers=1, micro_batches=8))
    desk.tell(co.PeerOffered(co.Peer("a", "{0.__class__} %s {", "h", 1)))
    desk.ready("a")
    refuse(desk, "a")
    refuse(desk, "a", "hop", beside="a")
    assert "{0.__class__} %s {" in text(desk)
