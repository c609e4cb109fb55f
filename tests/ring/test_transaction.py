"""The step transaction: scenarios by hand. Whole clusters are in ``test_transaction_model``."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.core.errors import ProtocolError
from ring import member_events as ev
from ring.job_member import MemberPhase
from ring.token import LEAST_STEPS, TOKEN_BYTES, Flag, Token, next_lineage
from tests.ring.members import ORIGIN, Member, digest_of, view


def alone(steps_total: int = 3) -> Member:
    member = Member("a", steps_total)
    member.handle(ev.StateLoaded(0, ORIGIN))
    return member


def run_step(member: Member, generation: int) -> None:
    """One step of a ring of one."""
    assert isinstance(member.activity, ev.Compute)
    member.finish()
    reduce_(member, generation)
    vote = member.activity
    assert isinstance(vote, ev.Vote)
    member.handle(ev.TokensGathered(vote.ticket, (vote.token,)))
    member.finish()


def reduce_(member: Member, generation: int, *, stop: bool = False) -> None:
    activity = member.activity
    assert isinstance(activity, ev.Reduce)
    member.buffer = digest_of(generation, activity.step)
    member.handle(ev.StepReduced(activity.ticket, member.buffer, 1.5, stop=stop))


def voting(member: Member, *, stop: bool = False) -> ev.Vote:
    """Bring it to the vote on the first step of a view with another member."""
    member.handle(ev.ViewArrived(view(1, ["a", "b"])))
    member.finish()
    member.finish()
    reduce_(member, 1, stop=stop)
    vote = member.activity
    assert isinstance(vote, ev.Vote)
    return vote


# ---------------------------------------------------------------------------------------------------------- scenarios


def test_a_hold_stops_at_the_boundary_and_the_session_stays() -> None:
    member = alone()
    member.handle(ev.ViewArrived(view(1, ["a"])))
    member.finish()
    member.handle(ev.FlagRequested(Flag.HOLD, 1))
    run_step(member, 1)
    member.finish()
    assert member.core.phase is MemberPhase.HELD
    assert (member.said[-1].status, member.said[-1].applied) == ("held", 1)
    member.handle(ev.ViewBroken(1, "b", "the faster one is gone"))
    assert member.core.phase is MemberPhase.HELD


def test_a_state_that_is_given_up_is_not_trained_on_nor_given_until_another_is_loaded() -> None:
    member = alone()
    member.handle(ev.ViewArrived(view(1, ["a"])))
    member.finish()
    run_step(member, 1)
    member.handle(ev.StateDiscarded("back to a checkpoint"))
    assert isinstance(member.activity, ev.Reload)
    member.handle(ev.ViewArrived(view(2, ["a"])))
    assert isinstance(member.activity, ev.Reload), "the view waits for the state"
    assert not member.core.may_give
    member.finish()
    assert member.said[-1].status == "ready"
    assert isinstance(member.activity, ev.FormRing)


@pytest.mark.parametrize("same", [True, False])
def test_only_the_very_step_that_was_committed_is_redone(same: bool) -> None:
    member = alone()
    voting(member)
    member.handle(ev.ViewBroken(1, "b", "died"))
    assert (member.said[-1].applied, member.said[-1].prepared) == (0, 1)
    committed = next_lineage(ORIGIN, digest_of(1 if same else 2, 0))
    member.handle(ev.ViewArrived(view(3, ["a", "c"], step=1, lineage=committed, healthy={"c"})))
    if same:
        assert isinstance(member.activity, ev.Apply)
        assert (member.activity.redo, member.activity.square_sum) == (True, 1.5)
        member.finish()
    assert isinstance(member.activity, ev.FormRing)
    member.finish()
    assert isinstance(member.activity, ev.Compute if same else ev.Heal)


@pytest.mark.parametrize("name", ["digest", "lineage", "step", "generation"])
def test_a_member_that_differs_stops_the_commit_and_is_named(name: str) -> None:
    member = alone()
    vote = voting(member)
    token = Token.decode_untrusted(vote.token)
    changed = {"digest": b"x" * 16, "lineage": b"y" * 16, "step": 9, "generation": 9}
    member.handle(ev.TokensGathered(vote.ticket, (vote.token, replace(token, **{name: changed[name]}).encode())))  # type: ignore[arg-type]
    report = member.said[-1]
    assert (report.status, report.suspect, report.applied, report.prepared) == ("broken", "b", 0, 0)
    assert name in report.reason


def test_the_norm_that_most_members_measure_counts_and_also_in_a_redo() -> None:
    member = alone()
    vote = voting(member)
    token = Token.decode_untrusted(vote.token)
    near = replace(token, part=token.part * (1 + 1e-9))  # as another processor may sum it
    member.handle(ev.TokensGathered(vote.ticket, (vote.token, near.encode())))
    assert isinstance(member.activity, ev.Apply)
    assert member.activity.square_sum in (token.part, near.part)
    member = alone()
    voting(member)
    prepared = member.core.prepared_lineage
    member.handle(ev.ViewBroken(1, "b", "died"))
    false = replace(view(2, ["a", "b"], step=1, lineage=prepared), square_sum=1e30)
    member.handle(ev.ViewArrived(false))
    assert isinstance(member.activity, ev.Apply)
    assert member.activity.square_sum == 1.5, "it has measured the bytes itself"


@pytest.mark.parametrize(
    ("own", "part", "told"), [(4.0, 1.5, 0.0), (4.0, 1e30, 0.0), (1e30, 1.5, math.nan), (math.nan, 1.5, math.nan)]
)
def test_a_hidden_norm_is_told_only_as_fit_or_not(own: float, part: float, told: float) -> None:
    member = Member("a", 3, outlier_factor=1000.0)
    member.core._hidden_norms = True
    for _ in range(LEAST_STEPS):
        member.core._guard.committed(4.0)
    member.core._guard.forget = lambda: None  # type: ignore[method-assign]  # loading would
    member.handle(ev.StateLoaded(0, ORIGIN))
    member.handle(ev.ViewArrived(view(1, ["a", "b"])))
    member.finish()
    member.finish()
    activity = member.activity
    assert isinstance(activity, ev.Reduce)
    member.handle(ev.StepReduced(activity.ticket, digest_of(1, 0), part, own))
    vote = member.activity
    assert isinstance(vote, ev.Vote)
    token = Token.decode_untrusted(vote.token)
    assert token.own == pytest.approx(told, nan_ok=True)


def voted(wish: Flag, *, peers: Sequence[str] = ("a", "b"), steps_total: int = 3) -> Member:
    """A member of two that applies a step, with which all wished for something."""
    member = alone(steps_total)
    member.handle(ev.ViewArrived(view(1, peers)))
    member.finish()
    member.handle(ev.FlagRequested(wish))
    member.finish()
    reduce_(member, 1)
    vote = member.activity
    assert isinstance(vote, ev.Vote)
    member.handle(ev.TokensGathered(vote.ticket, (vote.token, vote.token)))
    assert isinstance(member.activity, ev.Apply)
    return member


def confirming(peers: Sequence[str] = ("a", "b"), *, steps_total: int = 3) -> tuple[Member, ev.Confirm]:
    """A member of two that compares its state with the other's, for the step was to be saved."""
    member = voted(Flag.SAVE, peers=peers, steps_total=steps_total)
    member.finish()
    confirm = member.activity
    assert isinstance(confirm, ev.Confirm)
    return member, confirm


def test_a_member_whose_state_drifted_loads_another_and_heals() -> None:
    member, confirm = confirming(["b", "a"])
    member.handle(ev.DigestsGathered(confirm.ticket - 1, (b"x", b"y")))
    assert member.activity is confirm, "what belongs to another activity changes nothing"
    member.handle(ev.DigestsGathered(confirm.ticket, (b"x", b"y")))
    assert isinstance(member.activity, ev.Reload)
    assert not member.core.may_give
    member.finish()
    assert (member.said[-1].status, member.said[-1].applied) == ("ready", 0)


def test_a_step_is_saved_only_when_all_have_sent_their_digests() -> None:
    member, confirm = confirming()
    member.handle(ev.DigestsGathered(confirm.ticket, (b"x", b"x")))
    assert [(item.applied, item.save) for item in member.boundaries] == [(1, True)]
    member, confirm = confirming()
    member.handle(ev.ViewBroken(1, "b", "died"))
    assert member.boundaries == []
    assert (member.said[-1].status, member.said[-1].applied) == ("broken", 1)
    member.handle(ev.DigestsGathered(confirm.ticket, (b"x", b"x")))
    assert member.boundaries == []


@pytest.mark.parametrize("when", ["applying", "confirming"])
def test_a_checkpoint_that_a_break_prevents_is_still_wanted_in_the_next_view(when: str) -> None:
    member = voted(Flag.SAVE | Flag.LEAVE)
    if when == "confirming":
        member.finish()
    member.handle(ev.ViewBroken(1, "b", "died"))
    if when == "applying":
        member.finish()
    assert member.said[-1].status == "broken"
    member.handle(ev.ViewArrived(view(2, ["a"], step=1, lineage=member.core.lineage)))
    member.finish()
    run_step(member, 2)
    member.finish()
    assert [(item.applied, item.save) for item in member.boundaries] == [(2, True)]


def test_the_last_step_is_not_done_before_it_is_confirmed() -> None:
    member, _ = confirming(steps_total=1)
    member.handle(ev.ViewBroken(1, "b", "died"))
    assert (member.said[-1].status, member.said[-1].applied) == ("broken", 1)
    member.handle(ev.ViewArrived(view(2, ["a"], step=1, lineage=member.core.lineage)))
    member.finish()
    assert isinstance(member.activity, ev.Confirm)
    member.finish()
    member.finish()
    assert [(item.applied, item.save, item.last) for item in member.boundaries] == [(1, True, True)]
    assert member.core.phase is MemberPhase.DONE


@pytest.mark.parametrize("all_say_so", [True, False])
def test_the_job_ends_where_all_members_say_that_it_ends(all_say_so: bool) -> None:
    member = alone(9)
    vote = voting(member, stop=True)
    other = replace(Token.decode_untrusted(vote.token), flags=Flag.STOP if all_say_so else Flag(0))
    member.handle(ev.TokensGathered(vote.ticket, (vote.token, other.encode())))
    member.finish()
    assert isinstance(member.activity, ev.Confirm if all_say_so else ev.Boundary)
    assert member.core.stopping is all_say_so


def test_a_snapshot_is_asked_for_by_anyone_and_outlives_a_break() -> None:
    member = voted(Flag.SNAPSHOT, steps_total=9)
    member.handle(ev.ViewBroken(1, "b", "died"))
    member.finish()
    assert member.boundaries == []
    member.handle(ev.ViewArrived(view(2, ["a"], step=1, lineage=member.core.lineage)))
    member.finish()
    run_step(member, 2)
    assert [(item.snapshot, item.save) for item in member.boundaries] == [(True, False)]
    member.finish()
    run_step(member, 2)
    assert not member.boundaries[-1].snapshot


def test_checkpoints_follow_the_calendar() -> None:
    member = Member("a", 5, checkpoint_every=2)
    member.handle(ev.StateLoaded(0, ORIGIN))
    member.handle(ev.ViewArrived(view(1, ["a"])))
    member.finish()
    for _ in range(5):
        run_step(member, 1)
        while not isinstance(member.activity, ev.Compute) and member.activity is not None:
            member.finish()
    assert [item.applied for item in member.boundaries if item.save] == [2, 4, 5]


def test_a_step_whose_norm_nobody_knows_is_not_redone() -> None:
    member = alone()
    voting(member)
    member.handle(ev.ViewBroken(1, "b", "died"))
    committed = next_lineage(ORIGIN, digest_of(1, 0))
    unknown = replace(view(2, ["a", "c"], step=1, lineage=committed, healthy={"c"}), square_sum=0.0)
    member.handle(ev.ViewArrived(unknown))
    assert isinstance(member.activity, ev.FormRing)
    member.finish()
    assert isinstance(member.activity, ev.Heal)


def test_a_torn_state_is_loaded_anew_and_never_reported() -> None:
    member = alone()
    ahead = next_lineage(ORIGIN, digest_of(1, 0))
    member.handle(ev.ViewArrived(view(2, ["a", "b"], step=1, lineage=ahead, healthy={"b"})))
    member.finish()
    assert isinstance(member.activity, ev.Heal)
    said = len(member.said)
    member.handle(ev.ViewBroken(2, "b", "the source died"))
    assert isinstance(member.activity, ev.Reload)
    assert len(member.said) == said
    member.handle(ev.ViewArrived(view(3, ["a"])))
    assert isinstance(member.activity, ev.Reload)
    member.finish()
    assert member.said[-1].status == "ready"
    assert isinstance(member.activity, ev.FormRing)


def signed(body: bytes) -> bytes:
    return body + zlib.crc32(body).to_bytes(4, "big")


@given(st.binary(min_size=TOKEN_BYTES - 4, max_size=TOKEN_BYTES - 4))
def test_a_token_survives_the_wire(body: bytes) -> None:
    body = body[:16] + bytes(3) + body[19:]  # flags
    try:
        token = Token.decode_untrusted(signed(body))
    except ProtocolError as problem:
        assert body[19] >= 2 * max(Flag)
        assert "unknown flags" in problem.message  # noqa: PT017
        return
    assert token.encode() == signed(body)


@given(bit=st.integers(0, 8 * TOKEN_BYTES - 1))
def test_a_token_of_which_one_bit_was_turned_is_refused(bit: int) -> None:
    data = bytearray(Token(1, 2, Flag.HOLD, 0.5, b"d" * 16, b"l" * 16, 1000, 0.25, 1.0).encode())
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError, match="corrupted in transit"):
        Token.decode_untrusted(bytes(data))
