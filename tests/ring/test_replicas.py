"""Replicas: which workers of a split model train together, and from which step. Told by hand, one case at a time."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

from p2ptrain.core.footprint import ModelSizes
from ring import coordination as co
from ring.coordination import MOST_AWAY, KnownPeer, Roster
from ring.coordinator import Coordinator
from ring.parts import assign_stages
from ring.planning.workloads import ModelShape, TrainingWorkload
from ring.replicas import newest, newest_kept
from ring.view import View
from wire.job_messages import Report

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

    def __init__(
        self, replicas: int = 1, *, training: TrainingWorkload | None = None, past: co.StoredJob | None = None
    ) -> None:
        self.now = 0.0
        options = co.JobOptions(replicas=replicas, micro_batches=4, parts=2, training=training)
        self.core = Coordinator("job", options, past=past)
        self.out: list[co.Instruction] = []

    def tell(self, event: co.Event, after_s: float = 0.0) -> list[co.Instruction]:
        self.now += after_s
        self.out = self.core.handle(event, self.now)
        self.core.validate()
        return self.out

    def comes(self, *peer_ids: str) -> None:
        for peer_id in peer_ids:
            self.tell(co.PeerOffered(co.JobWorker(peer_id, peer_id, "h", 1)))

    def says(self, peer_id: str, status: str, applied: int = 0, **more: Any) -> list[co.Instruction]:
        return self.tell(co.PeerReported(peer_id, report(status, applied, **more)))

    def ready(self, *peer_ids: str, applied: int = 0) -> None:
        for peer_id in peer_ids:
            self.says(peer_id, "ready", applied)

    def begun(self, *peer_ids: str) -> View:
        """A view of these, which has committed its first step."""
        self.comes(*peer_ids)
        self.ready(*peer_ids)
        self.tell(co.StepCommitted(1, 1.0))
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


def test_a_view_waits_for_whole_replicas_and_leaves_spares_out() -> None:
    play = Play(replicas=2)
    play.comes("a", "b", "c", "d", "e")
    assert [play.core.part_of(key) for key in "abcde"] == [0, 1, 0, 1, None]
    play.ready("a", "b", "c")
    assert play.core.view is None
    play.ready("d")
    assert (play.members, play.view.stages) == (["a", "b", "c", "d"], 2)
    assert [(m.first, m.count) for m in play.view.members] == [(0, 2), (2, 0), (2, 2), (4, 0)]


def test_what_is_left_of_two_replicas_carries_the_state_on_together() -> None:
    play = Play(replicas=2)
    view = play.begun("a", "b", "c", "d")
    play.lost("b", "c")
    assert not play.minted, "its ring may well be running"
    play.says("a", "broken", 5, generation=view.generation, suspect="b")
    assert not play.minted, "one of the view may still be training"
    play.says("d", "broken", 4, generation=view.generation, prepared=True, suspect="c")
    assert (play.minted, play.members, play.view.step, play.view.lineage) == (True, ["a", "d"], 5, L[5])
    assert [m.healthy for m in play.view.members] == [True, True]
    assert play.view.square_sum == 1.0, "who redoes the step clips with its norm"


def test_a_newcomer_replica_is_healed_stage_by_stage() -> None:
    play = Play()
    play.begun("a", "b")
    play.comes("c", "d")
    play.ready("c", "d")
    asked = {item.peer_id: [source.peer_id for source in item.sources] for item in play.of(co.SendCatchUp)}
    assert asked == {"c": ["a"], "d": ["b"]}
    play.says("c", "following", 6)
    assert not play.of(co.SendHold), "half of it follows"
    play.says("d", "following", 6)
    assert play.of(co.SendHold)


def test_newcomers_follow_one_by_one_and_come_in_as_whole_replicas() -> None:
    play = Play(replicas=2)
    play.begun("a", "b", "c", "d")
    play.comes("e", "f")
    play.ready("e", "f")
    play.says("e", "following", 6)
    play.lost("f")
    play.comes("g")
    assert play.core.part_of("g") == 1
    assert not [item for item in play.of(co.SendAssign) if item.peer_id == "e"], "it follows on"
    play.ready("g")
    assert [item.peer_id for item in play.of(co.SendCatchUp)] == ["g"]
    play.says("g", "following", 6)
    assert [item.reason for item in play.of(co.SendHold)] == ["e, g joining"]
    for key in "abcd":
        play.says(key, "held", 7, generation=1)
    assert play.members == [*"abcdeg"]


def test_a_replica_whose_contribution_is_refused_is_excluded_as_a_whole() -> None:
    play = Play(replicas=2, past=co.StoredJob(held={"a": 0, "b": 1, "c": 0, "d": 1, "e": 1}))
    play.comes(*"eabcd")
    play.ready(*"abcde")
    for key in "abcd":
        play.says(key, "broken", generation=1, suspect="d", cause="contribution")
    assert (play.members, play.view.lenient) == (["a", "b"], False), "c fed d, so e replaces neither"
    for key in "ab":
        play.says(key, "broken", generation=2, suspect="a", cause="contribution")
    assert (play.members, play.view.lenient) == ([*"abcd"], True), "the data is the cause"


def test_a_worker_is_asked_nothing_else_until_it_has_answered() -> None:
    """Else a late answer would look like the loss of its state."""
    play = Play()
    play.begun("a", "b")
    play.comes("c", "d")
    play.tell(co.Restore(1, "a", L[1]))
    for key in "ab":
        play.says(key, "held", 3, generation=1)
    assert [item.peer_id for item in play.of(co.SendAssign)] == ["a", "b"], "the others build"
    play.ready("c", applied=0)
    assert [(item.peer_id, item.restore_step) for item in play.of(co.SendAssign)] == [("c", 1)]
    play.ready("a", "b", applied=1)
    assert not play.minted, "others may load it, too"
    play.ready("c", applied=1)
    play.ready("d", applied=0)  # as it was asked first
    play.ready("d", applied=0)  # it has no such checkpoint
    assert (play.minted, play.members, play.view.step) == (True, [*"abcd"], 1)


def test_where_a_part_is_gone_it_goes_back_to_the_newest_step_of_which_all_parts_are_kept() -> None:
    play = Play()
    view = play.begun("a", "b")
    play.tell(co.CheckpointsSaved({}, of_parts(a=frozenset({4, 8, 12}), b=frozenset({4, 8}))))
    play.tell(co.StepCommitted(14, 1.0))
    play.lost("b")
    play.says("a", "broken", 14, generation=view.generation, suspect="b")
    play.comes("b")  # as a new process, which loads its newest
    play.says("b", "ready", 8)
    assert [(item.peer_id, item.restore_step) for item in play.of(co.SendAssign)] == [("a", 8), ("b", 8)]
    play.ready("a", "b", applied=8)
    assert (play.minted, play.view.step, play.members) == (True, 8, ["a", "b"])
    assert play.of(co.Mint)[0].restored


def test_the_stage_of_a_worker_outlives_its_process_and_the_seed() -> None:
    play = Play()
    view = play.begun("a", "b")
    again = Play(past=co.StoredJob(view=view, corpus="C", known_step=9, held=play.core.held))
    again.comes("b", "a")
    assert (again.core.part_of("a"), again.core.part_of("b")) == (0, 1)


def test_the_newest_step_that_all_stages_keep() -> None:
    assert newest_kept([[frozenset({4, 8})], [frozenset({4}), frozenset({8, 12})]]) == 8
    assert newest_kept([[frozenset({4, 8})], [frozenset({5})]]) == 0


def test_a_state_is_shared_where_every_stage_applied_it_or_can_redo_it() -> None:
    applied = report("broken", 5, generation=1)
    prepared = report("broken", 4, generation=1, prepared=True)
    assert newest([{"a": applied}, {"b": prepared}]) == (5, L[5])
    assert newest([{"a": prepared}, {"b": prepared}]) == (4, L[4]), "nobody applied it"
    assert newest([{"a": applied}, {"b": report("ready", 3)}]) is None


def test_of_those_who_are_away_the_newest_are_remembered() -> None:
    roster = Roster(2, peers={key: KnownPeer(seen(key)) for key in ("p0", "p3")})
    for number in range(MOST_AWAY + 10):
        roster.peers.setdefault(f"p{number}", KnownPeer(seen(f"p{number}")))
        roster.give(f"p{number}", number % 2)
        if number not in (0, 3):
            roster.forget(f"p{number}")
    assert len(roster.held) == MOST_AWAY + 2 + 1, "two who are here, and the one who is just told"
    assert set(roster.held) == {"p0", "p3", *(f"p{number}" for number in range(9, MOST_AWAY + 10))}
    assert list(roster.held)[-1] == f"p{MOST_AWAY + 9}", "the newest is the last"


# ---------------------------------------------------------------------------------------------------- memory and speed

MIB = 1 << 20
SHAPE = ModelShape.of(ModelSizes((8 * MIB,) * 12, (0,) * 12, 4 * MIB, 4 * MIB, 0), 64, 128, 256)


def training(replicas: int = 1, **more: Any) -> TrainingWorkload:
    return TrainingWorkload(SHAPE, 2, replicas, tokens=64, sequence_tokens=64, micro_batches=4, **more)


def seen(peer_id: str, memory_mib: int = 0, flops: float | None = 0.0) -> co.JobWorker:
    return co.JobWorker(peer_id, peer_id, "h", 1, memory_bytes=memory_mib * MIB, flops=flops)


class Planned(Play):
    """A job whose model's sizes are known."""

    def __init__(self, replicas: int = 1, past: co.StoredJob | None = None, **more: Any) -> None:
        super().__init__(replicas, training=training(replicas, **more), past=past)

    def come(self, *peers: co.JobWorker) -> None:
        for peer in peers:
            self.tell(co.PeerOffered(peer))

    @property
    def assigned(self) -> dict[str, int]:
        return {item.peer_id: item.stage for item in self.of(co.SendAssign)}


def test_stages_are_given_when_speeds_are_told_and_ways_are_measured() -> None:
    play = Planned()
    play.come(seen("a", flops=None), seen("b", flops=1e9))
    assert not play.out
    assert play.core.next_deadline() == 30.0
    play.tell(co.PeerTold(seen("a", flops=3e9)))
    assert [item.peer_ids for item in play.of(co.SendSurvey)] == [("a", "b")]
    play.tell(co.Signal.SURVEYED)
    assert [type(item) for item in play.out] == [co.CutsChosen, co.Emit, co.SendAssign, co.SendAssign]
    (cuts,) = play.of(co.CutsChosen)
    assert play.assigned in ({"a": 0, "b": 1}, {"a": 1, "b": 0})
    mine = 12 - cuts.cuts[0] if play.assigned["a"] else cuts.cuts[0]
    assert mine == 9, "three times as fast, so three times the layers"
    assert play.core.training == training(cuts=cuts.cuts)
    play.ready("a", "b")
    assert play.minted
    assert not play.of(co.CutsChosen)


def test_what_does_not_fit_waits_and_says_so_in_numbers_until_somebody_comes_who_fits() -> None:
    play = Planned()
    play.come(seen("a", 300), seen("b", 100))
    play.tell(co.Signal.SURVEYED)
    assert not play.assigned
    assert "a 300.0 MiB, b 100.0 MiB" in play.core.reason
    assert [item.kind for item in play.of(co.Emit)] == ["does-not-fit"]
    play.tell(co.Signal.TICK, after_s=1)
    assert not play.out, "said once"
    play.come(seen("c", 290))
    play.tell(co.Signal.SURVEYED)
    assert set(play.assigned) == {"a", "c"}
    assert "needs" not in play.core.reason


def test_a_spare_takes_the_stage_that_it_has_the_memory_for_and_is_told_why_not() -> None:
    play = Planned(cuts=(3,))
    play.come(seen("a", 160), seen("b", 500))
    play.tell(co.Signal.SURVEYED)
    play.ready("a", "b")
    play.tell(co.StepCommitted(1, 1.0))
    play.come(seen("d", 20))
    assert [item.text for item in play.of(co.Emit)] == [
        "d stays a spare: it offers 20.0 MiB, and stage 0 (layers 0 to 2) needs 142.1 MiB to train"
    ]
    play.lost("d")
    play.come(seen("c", 170))
    assert not play.of(co.Emit), "it may be of use"
    play.lost("b")
    texts = [item.text for item in play.of(co.Emit) if item.kind == "too-small"]
    assert any("c stays a spare: it offers 170.0 MiB, and stage 1 (layers 3 to 11)" in text for text in texts)
    assert play.core.part_of("c") is None
    play.come(seen("e", 600))
    assert play.core.part_of("e") == 1
    assert play.assigned == {"e": 1}


def test_of_too_many_at_a_stage_the_one_goes_that_fits_where_somebody_lacks() -> None:
    play = Planned(2, past=co.StoredJob(held={"a": 0, "b": 1, "c": 0, "z": 0}), cuts=(3,))
    play.come(seen("a", 160), seen("b", 500), seen("c", 170), seen("z", 500))
    play.ready("a", "b", "c", "z")
    assert [play.core.part_of(key) for key in "abcz"] == [0, 1, 0, 1]


def brute_force_replicas(counts: list[int], able: list[set[int]], most: int) -> int:
    """As many replicas as any way of giving stages to the pool makes."""
    best = 0
    for assigned in itertools.product(*[[None, *stages] for stages in able]):
        total = [count + assigned.count(stage) for stage, count in enumerate(counts)]
        best = max(best, min(total))
    return min(best, max(most, min(counts)))


def test_as_many_replicas_as_possible_are_formed() -> None:
    for number in range(300):
        rng = random.Random(number)
        stages, size = rng.randint(2, 3), rng.randint(0, 5)
        counts, needs = ([rng.randint(0, 2) for _ in range(stages)] for _ in range(2))
        memory = {f"w{index}": rng.randint(0, 3) for index in range(size)}
        able = [{stage for stage in range(stages) if needs[stage] <= room} for room in memory.values()]
        homes = {key: rng.choice(sorted(stages)) for key, stages in zip(memory, able, strict=True)
                 if stages and rng.random() < 0.3}  # fmt: skip
        limit = rng.randint(1, 4)
        assigned = assign_stages(
            counts, list(memory), homes, limit, lambda key, stage, m=memory, n=needs: n[stage] <= m[key]
        )
        assert all(needs[stage] <= memory[key] for key, stage in assigned.items())
        total = [count + list(assigned.values()).count(stage) for stage, count in enumerate(counts)]
        assert min(min(total), max(limit, min(counts))) == brute_force_replicas(counts, able, limit), number
        if assigned:
            assert all(total[stage] == min(total) for stage in assigned.values()), "given away for nothing"


def of_parts(**steps: frozenset[int]) -> dict[tuple[str, int], frozenset[int]]:
    """Checkpoints of the parts that these workers have in ``begun``: part 1 for b, part 0 for others."""
    return {(peer_id, int(peer_id == "b")): kept for peer_id, kept in steps.items()}


def far_ahead(steps: dict[str, frozenset[int]], wholes: dict[str, frozenset[int]]) -> Play:
    """Stage 1 died with its disk beyond what is saved; c, a spare, has built that stage, and holds nothing of it."""
    play = Play()
    view = play.begun("a", "b", "c")
    play.tell(co.CheckpointsSaved(wholes, of_parts(**steps)))
    play.tell(co.StepCommitted(25, 1.0))
    play.lost("b")
    play.says("a", "broken", 25, generation=view.generation, suspect="b")
    play.ready("c")
    play.tell(co.Signal.TICK, 10_000.0)
    return play


def told(play: Play) -> dict[str, tuple[int, int, list[str]]]:
    """Who is told to load: stage, step, and who has the files."""
    assigned = play.of(co.SendAssign)
    return {item.peer_id: (item.stage, item.restore_step, [peer.peer_id for peer in item.holders]) for item in assigned}


def test_a_whole_checkpoint_counts_for_a_stage_that_nobody_else_has() -> None:
    kept = {"a": frozenset({10, 20}), "b": frozenset({10, 20})}
    assert told(far_ahead(kept, {})) == {"a": (0, 0, []), "c": (1, 0, [])}, "parts alone do not help another stage"
    play = far_ahead(kept, {"a": frozenset({10, 20}), "b": frozenset({20})})
    assert told(play) == {"a": (0, 20, []), "c": (1, 20, ["a"])}, "b has one too, but is not here"
    play.ready("a", "c", applied=20)
    assert (play.minted, play.members, play.view.step) == (True, ["a", "c"], 20)


def test_parts_of_another_layout_are_given_when_the_holder_of_the_whole_is_there() -> None:
    play = Play()
    play.tell(co.CheckpointsSaved({"c": frozenset({20})}))
    play.tell(co.Restore(20, "c", "L20"))
    play.comes("a", "b")
    assert play.of(co.SendAssign) == []
    assert play.core.reason == "going back to step 20: waiting for the worker that holds it"
    play.comes("c")
    assert told(play) == {"a": (0, 20, ["c"]), "b": (1, 20, ["c"])}


def test_where_the_files_did_not_come_the_run_goes_back_further() -> None:
    play = far_ahead({"a": frozenset({10, 20})}, {"a": frozenset({10, 20})})
    play.ready("a", applied=20)
    play.ready("c", applied=0)
    play.tell(co.Signal.TICK, 10_000.0)
    assert told(play) == {"a": (0, 10, []), "c": (1, 10, ["a"])}
    play.ready("a", "c", applied=10)
    assert play.view.step == 10


def test_where_the_holder_of_the_files_came_back_meanwhile_it_tries_again() -> None:
    play = far_ahead({"a": frozenset({10, 20})}, {"a": frozenset({10, 20})})
    play.lost("a")
    play.comes("a")
    play.ready("c", applied=0)
    play.ready("a", applied=20)
    play.tell(co.Signal.TICK, 10_000.0)
    assert told(play) == {"a": (0, 20, []), "c": (1, 20, ["a"])}


def test_workers_that_do_not_train_are_told_why() -> None:
    play = Play()
    play.begun("a", "b")
    play.comes("c")
    text = "more workers are needed: one for each of the model's 2 parts"
    assert play.core.kept_out() == {"c": (text, math.inf)}
    play.tell(co.CheckpointsSaved({}, of_parts(a=frozenset({4}), b=frozenset({2, 4}), c=frozenset({2}))))
    for peer_id in ("a", "b"):
        play.tell(co.PeerLost(peer_id, "closed"))
    play.tell(co.Signal.TICK, 31.0)
    play.comes("b")
    play.ready("b", "c", applied=0)
    said = ("waiting for a, which may hold step 4 (newest here: step 0)", play.now + 30.0)
    assert play.core.kept_out() == {"b": said, "c": said}
