"""Replicas: which workers of a split model train together, and from which step. Told by hand, one case at a time."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

from p2ptrain.core.footprint import ModelSizes
from ring import coordination as co
from ring.coordination import MOST_AWAY, KnownPeer, Roster
from ring.parts import assign_stages
from ring.planning.workloads import ModelShape, TrainingWorkload
from ring.replicas import RecoveryPolicy, newest
from tests.ring.desk import Desk, ids
from wire.job_messages import Report

MIB = 1 << 20
SHAPE = ModelShape.of(ModelSizes((8 * MIB,) * 12, (0,) * 12, 4 * MIB, 4 * MIB, 0), 64, 128, 256)


def training(replicas: int = 1, **more: Any) -> TrainingWorkload:
    return TrainingWorkload(SHAPE, 2, replicas, tokens=64, sequence_tokens=64, micro_batches=4, **more)


def split_job(replicas: int = 1, training: TrainingWorkload | None = None, past: co.StoredJob | None = None) -> Desk:
    """A job of two stages. ``training``: known sizes of its model."""
    return Desk(co.JobOptions(replicas=replicas, micro_batches=4, parts=2, training=training), past, slow=True)


def seen(peer_id: str, memory_mib: int = 0, flops: float | None = 0.0) -> co.JobWorker:
    return co.JobWorker(peer_id, peer_id, "h", 1, memory_bytes=memory_mib * MIB, flops=flops)


def stages_of(desk: Desk) -> dict[str, int]:
    """Those that were just assigned."""
    return {item.peer_id: item.stage for item in desk.of(co.SendAssign)}


def test_a_view_waits_for_whole_replicas_and_leaves_spares_out() -> None:
    desk = split_job(replicas=2)
    desk.offer("a", "b", "c", "d", "e")
    assert [desk.core.part_of(key) for key in "abcde"] == [0, 1, 0, 1, None]
    desk.ready("a", "b", "c")
    assert desk.core.view is None
    desk.ready("d")
    assert (ids(desk.view), desk.view.stages) == (["a", "b", "c", "d"], 2)
    assert [(m.first, m.count) for m in desk.view.members] == [(0, 2), (2, 0), (2, 2), (4, 0)]


def test_what_is_left_of_two_replicas_carries_the_state_on_together() -> None:
    desk = split_job(replicas=2)
    view = desk.run("a", "b", "c", "d")
    desk.lose("b", "c")
    assert not desk.of(co.Mint), "its ring may well be running"
    desk.report("a", "broken", 5, square_sum=1.0, suspect="b")
    assert not desk.of(co.Mint), "one of the view may still be training"
    desk.report("d", "broken", 4, prepared=5, prepared_lineage="L5", suspect="c")
    view = desk.minted()
    assert (ids(view), view.step, view.lineage) == (["a", "d"], 5, "L5")
    assert [m.healthy for m in desk.view.members] == [True, True]
    assert desk.view.square_sum == 1.0, "who redoes the step clips with its norm"


def test_a_newcomer_replica_is_healed_stage_by_stage() -> None:
    desk = split_job()
    desk.run("a", "b")
    desk.offer("c", "d")
    desk.ready("c", "d")
    asked = {item.peer_id: [source.peer_id for source in item.sources] for item in desk.of(co.SendCatchUp)}
    assert asked == {"c": ["a"], "d": ["b"]}
    desk.report("c", "following", 6)
    assert not desk.of(co.SendHold), "half of it follows"
    desk.report("d", "following", 6)
    assert desk.of(co.SendHold)


def test_newcomers_follow_one_by_one_and_come_in_as_whole_replicas() -> None:
    desk = split_job(replicas=2)
    desk.run("a", "b", "c", "d")
    desk.offer("e", "f")
    desk.ready("e", "f")
    desk.report("e", "following", 6)
    desk.lose("f")
    desk.offer("g")
    assert desk.core.part_of("g") == 1
    assert not [item for item in desk.of(co.SendAssign) if item.peer_id == "e"], "it follows on"
    desk.ready("g")
    assert [item.peer_id for item in desk.of(co.SendCatchUp)] == ["g"]
    desk.report("g", "following", 6)
    assert [item.reason for item in desk.of(co.SendHold)] == ["name-e, name-g joining"]
    for key in "abcd":
        desk.report(key, "held", 7)
    assert ids(desk.view) == [*"abcdeg"]


def test_a_replica_whose_contribution_is_refused_is_excluded_as_a_whole() -> None:
    desk = split_job(replicas=2, past=co.StoredJob(held={"a": 0, "b": 1, "c": 0, "d": 1, "e": 1}))
    desk.offer(*"eabcd")
    desk.ready(*"abcde")
    for key in "abcd":
        desk.report(key, "broken", suspect="d", cause="contribution")
    assert (ids(desk.view), desk.view.lenient) == (["a", "b"], False), "c fed d, so e replaces neither"
    for key in "ab":
        desk.report(key, "broken", suspect="a", cause="contribution")
    assert (ids(desk.view), desk.view.lenient) == ([*"abcd"], True), "the data is the cause"


def test_a_worker_is_asked_nothing_else_until_it_has_answered() -> None:
    """Else a late answer would look like the loss of its state."""
    desk = split_job()
    desk.run("a", "b")
    desk.offer("c", "d")
    desk.tell(co.Restore(1, "a", "L1"))
    for key in "ab":
        desk.report(key, "held", 3)
    assert [item.peer_id for item in desk.of(co.SendAssign)] == ["a", "b"], "the others build"
    desk.ready("c", applied=0)
    assert [(item.peer_id, item.restore_step) for item in desk.of(co.SendAssign)] == [("c", 1)]
    desk.ready("a", "b", applied=1)
    assert not desk.of(co.Mint), "others may load it, too"
    desk.ready("c", applied=1)
    desk.ready("d", applied=0)  # as it was asked first
    desk.ready("d", applied=0)  # it has no such checkpoint
    view = desk.minted()
    assert (ids(view), view.step) == ([*"abcd"], 1)


def test_where_a_part_is_gone_it_goes_back_to_the_newest_step_of_which_all_parts_are_kept() -> None:
    desk = split_job()
    view = desk.run("a", "b")
    desk.tell(co.CheckpointsSaved({}, of_parts(a=frozenset({4, 8, 12}), b=frozenset({4, 8}))))
    desk.tell(co.StepCommitted(14, 1.0))
    desk.lose("b")
    desk.report("a", "broken", 14, suspect="b")
    desk.offer("b")  # as a new process, which loads its newest
    desk.report("b", "ready", 8)
    assert [(item.peer_id, item.restore_step) for item in desk.of(co.SendAssign)] == [("a", 8), ("b", 8)]
    desk.ready("a", "b", applied=8)
    view = desk.minted()
    assert (view.step, ids(view)) == (8, ["a", "b"])
    assert desk.of(co.Mint)[0].restored


def test_the_stage_of_a_worker_outlives_its_process_and_the_seed() -> None:
    desk = split_job()
    view = desk.run("a", "b")
    again = split_job(past=co.StoredJob(view=view, corpus="C", known_step=9, held=desk.core.held))
    again.offer("b", "a")
    assert (again.core.part_of("a"), again.core.part_of("b")) == (0, 1)


def test_the_newest_step_that_all_stages_keep() -> None:
    def kept(steps: range, **by_peer: set[int]) -> list[int]:
        saved = co.CheckpointsSaved({}, {(key, roster.held[key]): frozenset(own) for key, own in by_peer.items()})
        policy = RecoveryPolicy(0, saved, None)
        return [step for step in steps if policy.has_saved(step, (), roster, in_parts=True)]

    roster = Roster(2, held={"a": 0, "b": 1, "c": 1})
    assert kept(range(13), a={4, 8}, b={4}, c={8, 12})[-1] == 8
    assert kept(range(13), a={4, 8}, b={5})[-1] == 0


def test_a_state_is_shared_where_every_stage_applied_it_or_can_redo_it() -> None:
    applied = Report("job", 1, "broken", 5, 5, "L5")
    prepared = Report("job", 1, "broken", 4, 5, "L4", "L5")
    assert newest([{"a": applied}, {"b": prepared}]) == (5, "L5")
    assert newest([{"a": prepared}, {"b": prepared}]) == (4, "L4"), "nobody applied it"
    assert newest([{"a": applied}, {"b": Report("job", 0, "ready", 3, 3, "L3")}]) is None


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


def test_stages_are_given_when_speeds_are_told_and_ways_are_measured() -> None:
    desk = split_job(training=training())
    desk.offer(seen("a", flops=None), seen("b", flops=1e9))
    assert not desk.said
    assert desk.core.next_deadline() == 30.0
    desk.tell(co.PeerTold(seen("a", flops=3e9)))
    assert [item.peer_ids for item in desk.of(co.SendSurvey)] == [("a", "b")]
    desk.tell(co.Signal.SURVEYED)
    assert [type(item) for item in desk.said] == [co.CutsChosen, co.Emit, co.SendAssign, co.SendAssign]
    (cuts,) = desk.of(co.CutsChosen)
    assert stages_of(desk) in ({"a": 0, "b": 1}, {"a": 1, "b": 0})
    mine = 12 - cuts.cuts[0] if stages_of(desk)["a"] else cuts.cuts[0]
    assert mine == 9, "three times as fast, so three times the layers"
    assert desk.core.training == training(cuts=cuts.cuts)
    desk.ready("a", "b")
    assert desk.of(co.Mint)
    assert not desk.of(co.CutsChosen)


def test_what_does_not_fit_waits_and_says_so_in_numbers_until_somebody_comes_who_fits() -> None:
    desk = split_job(training=training())
    desk.offer(seen("a", 300), seen("b", 100))
    desk.tell(co.Signal.SURVEYED)
    assert not stages_of(desk)
    assert "a 300.0 MiB, b 100.0 MiB" in desk.core.reason
    assert [item.kind for item in desk.of(co.Emit)] == ["does-not-fit"]
    desk.tell(co.Signal.TICK, after_s=1)
    assert not desk.said, "said once"
    desk.offer(seen("c", 290))
    desk.tell(co.Signal.SURVEYED)
    assert set(stages_of(desk)) == {"a", "c"}
    assert "needs" not in desk.core.reason


def test_a_spare_takes_the_stage_that_it_has_the_memory_for_and_is_told_why_not() -> None:
    desk = split_job(training=training(cuts=(3,)))
    desk.offer(seen("a", 160), seen("b", 500))
    desk.tell(co.Signal.SURVEYED)
    desk.ready("a", "b")
    desk.tell(co.StepCommitted(1, 1.0))
    desk.offer(seen("d", 20))
    assert [item.text for item in desk.of(co.Emit)] == [
        "d stays a spare: it offers 20.0 MiB, and stage 0 (layers 0 to 2) needs 142.1 MiB to train"
    ]
    desk.lose("d")
    desk.offer(seen("c", 170))
    assert not desk.of(co.Emit), "it may be of use"
    desk.lose("b")
    texts = [item.text for item in desk.of(co.Emit) if item.kind == "too-small"]
    assert any("c stays a spare: it offers 170.0 MiB, and stage 1 (layers 3 to 11)" in text for text in texts)
    assert desk.core.part_of("c") is None
    desk.offer(seen("e", 600))
    assert desk.core.part_of("e") == 1
    assert stages_of(desk) == {"e": 1}


def test_of_too_many_at_a_stage_the_one_goes_that_fits_where_somebody_lacks() -> None:
    desk = split_job(2, training(2, cuts=(3,)), co.StoredJob(held={"a": 0, "b": 1, "c": 0, "z": 0}))
    desk.offer(seen("a", 160), seen("b", 500), seen("c", 170), seen("z", 500))
    desk.ready("a", "b", "c", "z")
    assert [desk.core.part_of(key) for key in "abcz"] == [0, 1, 0, 1]


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


def far_ahead(steps: dict[str, frozenset[int]], wholes: dict[str, frozenset[int]]) -> Desk:
    """Stage 1 died with its disk beyond what is saved; c, a spare, has built that stage, and holds nothing of it."""
    desk = split_job()
    desk.run("a", "b")
    desk.offer("c")
    desk.ready("c")
    desk.tell(co.CheckpointsSaved(wholes, of_parts(**steps)))
    desk.tell(co.StepCommitted(25, 1.0))
    desk.lose("b")
    desk.report("a", "broken", 25, suspect="b")
    desk.ready("c")
    desk.tell(co.Signal.TICK, 10_000.0)
    return desk


def told(desk: Desk) -> dict[str, tuple[int, int, list[str]]]:
    """Who is told to load: stage, step, and who has the files."""
    assigned = desk.of(co.SendAssign)
    return {item.peer_id: (item.stage, item.restore_step, [peer.peer_id for peer in item.holders]) for item in assigned}


def test_a_whole_checkpoint_counts_for_a_stage_that_nobody_else_has() -> None:
    kept = {"a": frozenset({10, 20}), "b": frozenset({10, 20})}
    assert told(far_ahead(kept, {})) == {"a": (0, 0, []), "c": (1, 0, [])}, "parts alone do not help another stage"
    desk = far_ahead(kept, {"a": frozenset({10, 20}), "b": frozenset({20})})
    assert told(desk) == {"a": (0, 20, []), "c": (1, 20, ["a"])}, "b has one too, but is not here"
    desk.ready("a", "c", applied=20)
    view = desk.minted()
    assert (ids(view), view.step) == (["a", "c"], 20)


def test_parts_of_another_layout_are_given_when_the_holder_of_the_whole_is_there() -> None:
    desk = split_job()
    desk.tell(co.CheckpointsSaved({"c": frozenset({20})}))
    desk.tell(co.Restore(20, "c", "L20"))
    desk.offer("a", "b")
    assert desk.of(co.SendAssign) == []
    assert desk.core.reason == "going back to step 20: waiting for the worker that holds it"
    desk.offer("c")
    assert told(desk) == {"a": (0, 20, ["c"]), "b": (1, 20, ["c"])}


def test_where_the_files_did_not_come_the_run_goes_back_further() -> None:
    desk = far_ahead({"a": frozenset({10, 20})}, {"a": frozenset({10, 20})})
    desk.ready("a", applied=20)
    desk.ready("c", applied=0)
    desk.tell(co.Signal.TICK, 10_000.0)
    assert told(desk) == {"a": (0, 10, []), "c": (1, 10, ["a"])}
    desk.ready("a", "c", applied=10)
    assert desk.view.step == 10


def test_where_the_holder_of_the_files_came_back_meanwhile_it_tries_again() -> None:
    desk = far_ahead({"a": frozenset({10, 20})}, {"a": frozenset({10, 20})})
    desk.lose("a")
    desk.offer("a")
    desk.ready("c", applied=0)
    desk.ready("a", applied=20)
    desk.tell(co.Signal.TICK, 10_000.0)
    assert told(desk) == {"a": (0, 20, []), "c": (1, 20, ["a"])}


def test_workers_that_do_not_train_are_told_why() -> None:
    desk = split_job()
    desk.run("a", "b")
    desk.offer("c")
    text = "more workers are needed: one for each of the model's 2 parts"
    assert desk.core.kept_out() == {"c": (text, math.inf)}
    desk.tell(co.CheckpointsSaved({}, of_parts(a=frozenset({4}), b=frozenset({2, 4}), c=frozenset({2}))))
    for peer_id in ("a", "b"):
        desk.tell(co.PeerLost(peer_id, "closed"))
    desk.tell(co.Signal.TICK, 31.0)
    desk.offer("b")
    desk.ready("b", "c", applied=0)
    said = ("waiting for name-a, which may hold step 4 (newest here: step 0)", desk.now + 30.0)
    assert desk.core.kept_out() == {"b": said, "c": said}
