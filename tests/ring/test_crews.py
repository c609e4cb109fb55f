"""Crews: which workers of a split model train together, and from which step. Told by hand, one case at a time."""

from __future__ import annotations

from typing import Any

import pytest

from ring import coordination as co
from ring.crewing import MAX_HELD, newest_kept, shared_states, spares_needed, told_stage
from ring.crews import Crews
from ring.view import View
from wire.messages import Report

L = {step: f"{step + 1:032x}" for step in range(40)}
"""The lineage of each step."""


def report(status: str, applied: int, *, generation: int = 0, prepared: bool = False, **more: Any) -> Report:
    return Report(
        "job",
        generation,
        status,
        applied,
        applied + prepared,
        more.pop("lineage", L[applied]),
        L[applied + 1] if prepared else "",
        square_sum=more.pop("square_sum", 1.0),
        corpus="C",
        **more,
    )


class Play:
    """A job of two stages, and what was done about what was told."""

    def __init__(self, crews: int = 1, **more: Any) -> None:
        self.now = 0.0
        self.core = Crews("job", co.Terms(workers=crews, micro_batches=4), 2, **more)
        self.out: list[co.Instruction] = []

    def tell(self, event: co.Event, after_s: float = 0.0) -> list[co.Instruction]:
        self.now += after_s
        self.out = self.core.handle(event, self.now)
        self.core.validate()
        return self.out

    def comes(self, *peer_ids: str) -> None:
        for peer_id in peer_ids:
            self.tell(co.PeerOffered(co.Peer(peer_id, peer_id, "h", 1, follows=True)))

    def says(self, peer_id: str, status: str, applied: int = 0, **more: Any) -> list[co.Instruction]:
        return self.tell(co.PeerReported(peer_id, report(status, applied, **more)))

    def ready(self, *peer_ids: str, applied: int = 0) -> None:
        for peer_id in peer_ids:
            self.says(peer_id, "ready", applied)

    def begun(self, *peer_ids: str) -> View:
        """A view of these, which has committed its first step."""
        self.comes(*peer_ids)
        self.ready(*peer_ids)
        self.tell(co.Progress(1, 1.0))
        return self.view

    @property
    def view(self) -> View:
        assert self.core.view is not None
        return self.core.view

    @property
    def members(self) -> list[str]:
        return [member.peer_id for member in self.view.members]

    @property
    def minted(self) -> bool:
        return any(isinstance(item, co.Mint) for item in self.out)

    def of(self, kind: type[Any]) -> list[Any]:
        return [item for item in self.out if isinstance(item, kind)]

    def lost(self, *peer_ids: str) -> None:
        for peer_id in peer_ids:
            self.tell(co.PeerLost(peer_id, "closed"))


def test_a_view_waits_for_whole_crews_and_leaves_spares_out() -> None:
    play = Play(crews=2)
    play.comes("a", "b", "c", "d", "e")
    assert [play.core.stage_of(key) for key in "abcde"] == [0, 1, 0, 1, None]
    play.ready("a", "b", "c")
    assert play.core.view is None
    play.ready("d")
    assert (play.members, play.view.stages) == (["a", "b", "c", "d"], 2)
    assert [(m.first, m.count) for m in play.view.members] == [(0, 2), (2, 0), (2, 2), (4, 0)]


def test_a_spare_builds_only_when_a_crew_is_whole_with_it() -> None:
    play = Play()
    play.comes("a")
    assert not play.of(co.SendAssign)
    play.comes("b")
    assert [(item.peer_id, item.stage, item.stages) for item in play.of(co.SendAssign)] == [("a", 0, 2), ("b", 1, 2)]


def test_what_is_left_of_two_crews_carries_the_state_on_together() -> None:
    play = Play(crews=2)
    view = play.begun("a", "b", "c", "d")
    play.lost("b", "c")
    assert not play.minted, "its ring may well be running"
    play.says("a", "broken", 5, generation=view.generation, suspect="b")
    assert not play.minted, "one of the view may still be training"
    play.says("d", "broken", 4, generation=view.generation, prepared=True, suspect="c")
    assert (play.minted, play.members, play.view.step, play.view.lineage) == (True, ["a", "d"], 5, L[5])
    assert [m.healthy for m in play.view.members] == [True, True]
    assert play.view.square_sum == 1.0, "who redoes the step clips with its norm"


def test_a_step_that_nobody_applied_is_run_again() -> None:
    play = Play()
    view = play.begun("a", "b")
    play.says("a", "broken", 4, generation=view.generation, prepared=True)
    play.says("b", "broken", 4, generation=view.generation, prepared=True)
    assert (play.minted, play.view.step) == (True, 4)


def test_a_worker_that_is_silent_while_the_others_stand_is_struck_off() -> None:
    play = Play(crews=2)
    view = play.begun("a", "b", "c", "d")
    for key in "abc":
        play.says(key, "broken", 3, generation=view.generation, suspect="d")
    assert [item.peer_id for item in play.of(co.Doubt)] == ["d"]
    assert not play.minted
    play.tell(co.Tick(), after_s=29)
    assert not play.minted
    play.tell(co.Tick(), after_s=2)
    assert (play.minted, play.members) == (True, ["a", "b"])
    assert [item.peer_id for item in play.of(co.SendRelease)] == ["d"]


def test_a_lost_link_is_not_a_death() -> None:
    play = Play()
    view = play.begun("a", "b")
    play.lost("a")
    play.tell(co.Tick(), after_s=20)
    play.tell(co.PeerReturned(co.Peer("a", "a", "h", 1), view.generation))
    play.says("a", "training", 9, generation=view.generation)
    play.tell(co.Tick(), after_s=100)
    assert (play.core.state, play.view) == ("running", view)


def test_who_stays_away_while_the_ring_runs_has_it_stopped() -> None:
    play = Play()
    view = play.begun("a", "b")
    play.lost("a")
    play.tell(co.Tick(), after_s=31)
    assert [item.peer_ids for item in play.of(co.SendHold)] == [("b",)]
    play.comes("c")
    play.says("b", "held", 7, generation=view.generation)
    assert play.core.stage_of("c") == 0


def test_a_newcomer_crew_is_healed_stage_by_stage() -> None:
    play = Play()
    play.begun("a", "b")
    play.comes("c", "d")
    play.ready("c", "d")
    asked = {item.peer_id: [donor.peer_id for donor in item.donors] for item in play.of(co.SendCatchUp)}
    assert asked == {"c": ["a"], "d": ["b"]}
    play.says("c", "following", 6)
    assert not play.of(co.SendHold), "half of it follows"
    play.says("d", "following", 6)
    assert play.of(co.SendHold)


def test_the_rest_of_a_lost_crew_keeps_its_stage_and_comes_in_with_a_spare() -> None:
    play = Play(crews=2)
    view = play.begun("a", "b", "c", "d")
    play.lost("d")
    for key in "abc":
        play.says(key, "broken", 3, generation=view.generation, suspect="d")
    assert (play.minted, play.members) == (True, ["a", "b"])
    play.comes("e")
    assert [(item.peer_id, item.stage) for item in play.of(co.SendAssign)] == [("e", 1)]
    play.ready("e")
    generation = play.view.generation
    for key in "ce":
        play.says(key, "following", 4)
    for key in "ab":
        play.says(key, "held", 4, generation=generation)
    assert play.members == ["a", "b", "c", "e"]


def test_a_crew_that_holds_nothing_is_withdrawn_before_the_last_that_could_heal_it() -> None:
    play = Play()
    view = play.begun("a", "b")
    play.comes("c", "d")
    play.ready("c")
    play.says("d", "ready", 3)  # they share no state
    play.lost("a")
    play.says("b", "broken", 9, generation=view.generation)
    play.lost("b")
    play.tell(co.Tick(), after_s=700)
    assert not play.minted or play.view.step == 0


def test_where_a_part_is_gone_it_goes_back_to_the_newest_step_of_which_all_parts_are_kept() -> None:
    play = Play()
    view = play.begun("a", "b")
    play.tell(co.Saved({}, {"a": frozenset({4, 8, 12}), "b": frozenset({4, 8})}))
    play.tell(co.Progress(14, 1.0))
    play.lost("b")
    play.says("a", "broken", 14, generation=view.generation, suspect="b")
    play.comes("b")  # as a new process, which loads its newest
    play.says("b", "ready", 8)
    assert [(item.peer_id, item.restore_step) for item in play.of(co.SendAssign)] == [("a", 8), ("b", 8)]
    play.ready("a", "b", applied=8)
    assert (play.minted, play.view.step, play.members) == (True, 8, ["a", "b"])
    assert play.of(co.Mint)[0].restored


def test_it_waits_for_who_is_away_before_it_goes_back() -> None:
    play = Play()
    view = play.begun("a", "b")
    play.tell(co.Saved({}, {"a": frozenset({4, 8}), "b": frozenset({4, 8})}))
    play.tell(co.Progress(10, 5.0))
    play.lost("b")
    play.says("a", "broken", 10, generation=view.generation, suspect="b")
    play.comes("c")
    play.ready("c")
    play.tell(co.Tick(), after_s=29)
    assert not play.of(co.SendAssign)
    play.comes("b")
    play.says("b", "ready", 8)
    assert {item.restore_step for item in play.of(co.SendAssign)} == {8}


def test_a_crew_of_old_states_does_not_outdo_what_all_stages_have_saved_since() -> None:
    """Whoever was away for long comes back with an old checkpoint, before those who have the newest."""
    play = Play()
    view = play.begun("a", "b")
    saved = {key: frozenset({4, 8}) for key in "ab"} | {key: frozenset({3}) for key in "cd"}
    play.tell(co.Saved({}, saved))
    play.comes("c", "d")
    play.ready("c", "d", applied=3)
    play.lost("c", "d")
    play.tell(co.Progress(10, 1.0))
    play.lost("a")
    play.says("b", "broken", 10, generation=view.generation, suspect="a")
    play.comes("c", "d")
    play.ready("c", "d", applied=3)
    assert not play.minted, "somebody may bring more"
    play.comes("a")
    play.ready("a", applied=8)
    assert {(item.peer_id, item.restore_step) for item in play.of(co.SendAssign)} == {(key, 8) for key in "abcd"}
    play.ready("c", "d", applied=3)
    play.ready("a", "b", applied=8)
    assert (play.minted, play.view.step, play.members[:2]) == (True, 8, ["a", "b"])


def test_the_stage_of_a_worker_outlives_its_process_and_the_seed() -> None:
    play = Play()
    view = play.begun("a", "b")
    past = co.Past(view=view, corpus="C", known_step=9)
    again = Play(past=past, held=play.core.held)
    again.comes("b", "a")
    assert (again.core.stage_of("a"), again.core.stage_of("b")) == (0, 1)


def test_after_a_restart_of_the_seed_a_running_ring_is_taken_back() -> None:
    play = Play(crews=2)
    view = play.begun("a", "b", "c", "d")
    again = Play(crews=2, past=co.Past(view=view, corpus="C", known_step=9), held=play.core.held)
    for key in "abcd":
        again.tell(co.PeerReturned(co.Peer(key, key, "h", 1), view.generation))
        again.says(key, "training", 9, generation=view.generation)
    again.tell(co.Tick(), after_s=60)
    assert (again.core.state, again.core.view) == ("running", view)


def test_a_worker_of_too_many_takes_a_stage_that_nobody_holds() -> None:
    play = Play()
    play.comes("a", "b")
    play.ready("a", "b")
    play.comes("c", "d")
    play.ready("c", "d")
    view = play.view
    play.lost("a", "c")
    play.says("b", "broken", 0, generation=view.generation)
    assert (play.core.stage_of("b"), play.core.stage_of("d")) == (1, 0)


def test_a_worker_with_other_data_is_let_go_alone() -> None:
    play = Play()
    play.comes("a", "b")
    play.ready("a")
    play.tell(co.PeerReported("b", Report("job", 0, "ready", 0, 0, L[0], corpus="D")))
    assert [item.peer_id for item in play.of(co.SendRelease)] == ["b"]
    assert play.core.peer_ids == {"a"}
    assert not play.core.wants("b")


def test_the_job_fails_where_everybody_failed() -> None:
    play = Play()
    play.comes("a", "b")
    for key in "ab":
        play.tell(co.PeerReported(key, Report("job", 0, "failed", 0, 0, "", reason="out of memory")))
    assert (play.core.state, play.core.reason) == ("failed", "out of memory")


@pytest.mark.parametrize(
    ("counts", "spares", "most", "expected"),
    [
        ([0, 0], 1, 9, [0, 0]),
        ([0, 0], 3, 9, [1, 1]),
        ([1, 0], 1, 9, [0, 1]),
        ([2, 1], 1, 9, [0, 1]),
        ([3, 1], 1, 9, [0, 1]),
        ([1, 1], 5, 2, [1, 1]),
    ],
)
def test_spares_are_given_to_stages_that_make_crews_whole(
    counts: list[int], spares: int, most: int, expected: list[int]
) -> None:
    assert spares_needed(counts, spares, most) == expected


def test_the_newest_step_that_all_stages_keep() -> None:
    assert newest_kept([[frozenset({4, 8})], [frozenset({4}), frozenset({8, 12})]]) == 8
    assert newest_kept([[frozenset({4, 8})], [frozenset({5})]]) == 0


def test_a_state_is_shared_where_every_stage_applied_it_or_can_redo_it() -> None:
    applied = report("broken", 5, generation=1)
    prepared = report("broken", 4, generation=1, prepared=True)
    assert shared_states([{"a": applied}, {"b": prepared}]) == [(5, L[5])]
    assert shared_states([{"a": prepared}, {"b": prepared}]) == [(4, L[4])], "nobody applied it"
    assert shared_states([{"a": applied}, {"b": report("ready", 3)}]) == []


def test_of_those_who_are_away_the_newest_are_remembered() -> None:
    held: dict[str, int] = {}
    for number in range(MAX_HELD + 10):
        held = told_stage(held, f"p{number}", number % 2, here=["p0", "p3"])
    assert len(held) == MAX_HELD + 2 + 1, "two who are here, and the one who is just told"
    assert set(held) == {"p0", "p3", *(f"p{number}" for number in range(9, MAX_HELD + 10))}
    held = told_stage(held, "p9", 0, here=[])
    assert held["p9"] == 0, "its stage is another one"
    assert list(held)[-1] == "p9", "and it is the newest"
    assert len(held) == MAX_HELD + 1
