"""The pool's planner: stability of the matching, and moves that end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ring.planning.matching import NEEDS, POLICIES, PoolMove, PoolTask, apportion, match_stably, plan_pool

MEMBERS = [f"m{index}" for index in range(8)]
STRENGTHS = st.dictionaries(st.sampled_from(MEMBERS), st.sampled_from([0.25, 0.5, 1.0, 2.0]))


def task(id: str, *members: str, least: int = 1, most: int = 8, **more: object) -> PoolTask:
    made = PoolTask(id, "train", id, 1.0, least, most, frozenset(members), dict.fromkeys(MEMBERS, 1.0), {})
    return replace(made, **more)  # type: ignore[arg-type]


@st.composite
def pools(draw: st.DrawFn) -> tuple[list[PoolTask], list[str]]:
    homes = draw(st.lists(st.integers(0, 4), min_size=len(MEMBERS), max_size=len(MEMBERS)))
    tasks = []
    for index in range(draw(st.integers(1, 4))):
        strengths = draw(STRENGTHS)
        there = frozenset(member for member, home in zip(MEMBERS, homes, strict=True) if home == index)
        there &= strengths.keys()
        least, unit = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2]))
        tasks.append(
            PoolTask(
                str(index), draw(st.sampled_from(list(NEEDS))), "",
                draw(st.sampled_from([0.5, 1.0, 3.0])), least * unit,
                max(least * unit, len(there)) + draw(st.integers(0, 4)), there, strengths,
                draw(st.dictionaries(st.sampled_from(MEMBERS), st.sampled_from([0.0, 20.0, 900.0]))), unit=unit,
                fixed=frozenset(draw(st.sets(st.sampled_from(sorted(there)))) if there else ()),
                floor=draw(st.integers(0, 1)), pause_s=draw(st.sampled_from([0.0, 5.0])),
                left_s=draw(st.sampled_from([10.0, math.inf])),
            )
        )  # fmt: skip
    placed = {member for item in tasks for member in item.members}
    return tasks, [member for member in MEMBERS if member not in placed]


def after(tasks: Sequence[PoolTask], moves: Sequence[PoolMove]) -> list[PoolTask]:
    home = {member: item.id for item in tasks for member in item.members} | {move.member: move.task for move in moves}
    return [replace(item, members=frozenset(key for key, id in home.items() if id == item.id)) for item in tasks]


@given(
    st.dictionaries(st.sampled_from(MEMBERS), st.permutations("abc").flatmap(
        lambda order: st.integers(0, 3).map(lambda size: order[:size]))),
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 3)), st.data(),
)  # fmt: skip
def test_no_member_and_task_prefer_each_other(
    wishes: dict[str, list[str]], places: dict[str, int], data: st.DataObject
) -> None:
    ranks = {name: {member: (data.draw(st.sampled_from([1.0, 2.0])), False, member) for member in MEMBERS}
             for name in "abc"}  # fmt: skip
    ranks["a"].pop("m0")  # task a cannot use it
    found = match_stably(wishes, ranks, places)
    assert found == match_stably(dict(reversed(wishes.items())), ranks, places)
    for member, name in found.items():
        assert name in wishes[member]
        assert member in ranks[name]
    for name, count in places.items():
        got = sorted(ranks[name][member] for member, task in found.items() if task == name)
        assert len(got) <= count
        for member, order in wishes.items():
            prefers = name in order and (member not in found or order.index(name) < order.index(found[member]))
            if prefers and member in ranks[name] and count:
                assert len(got) == count, "a place is free"
                assert got[0] > ranks[name][member], "a blocking pair"


@given(pools(), st.sampled_from(POLICIES))
def test_plans_obey_what_members_can_and_tasks_use(pool: tuple[list[PoolTask], list[str]], policy: str) -> None:
    tasks, free = pool
    moves = plan_pool(policy, tasks, free)
    assert moves == plan_pool(policy, tasks, free)
    assert len({move.member for move in moves}) == len(moves)
    by_id = {item.id: item for item in tasks}
    for move in moves:
        assert move.member in by_id[move.task].strengths
        assert not move.source or move.member in by_id[move.source].members - by_id[move.source].fixed
        assert move.source or move.member in free
    for before, item in zip(tasks, after(tasks, moves), strict=True):
        assert len(item.members) <= max(item.most, len(before.members))
        assert len(item.members) >= min(item.floor, len(before.members))
    assert policy != "fifo" or not any(move.source for move in moves)


@given(pools(), st.sampled_from(POLICIES))
def test_moves_gain_and_end(pool: tuple[list[PoolTask], list[str]], policy: str) -> None:
    tasks, free = pool
    tasks, total = after(tasks, plan_pool(policy, tasks, free, moves=False)), -1.0
    for _ in range(20):
        placed = {member for item in tasks for member in item.members}
        moves = plan_pool(policy, tasks, [member for member in MEMBERS if member not in placed])
        if not moves:
            return
        before, tasks = sum(item.utility(item.members) for item in tasks), after(tasks, moves)
        total = sum(item.utility(item.members) for item in tasks)
        assert total > before or not any(move.source for move in moves)
    raise AssertionError("moves do not end")


def test_places_are_apportioned_by_need_then_weight() -> None:
    tasks = [task("a", least=2, weight=2.0), task("b", least=2), task("c", least=5)]
    none = {item.id: set[str]() for item in tasks}
    assert apportion(tasks, MEMBERS[:3], none) == {"a": 3, "b": 0, "c": 0}
    assert apportion(tasks, MEMBERS, none) == {"a": 6, "b": 2, "c": 0}
    assert apportion([*tasks[:2], task("c", least=5, weight=3.0)], MEMBERS, none) == {"a": 3, "b": 0, "c": 5}


def test_new_job_gets_its_share_and_only_if_that_repays() -> None:
    old, new = task("old", *MEMBERS[:6], least=2, floor=1), task("new", least=2)
    moves = plan_pool("matching", [old, new], [])
    assert [(move.source, move.task) for move in moves] == [("old", "new")] * 3
    assert plan_pool("score", [old, new], []) == [], "no single member gains, as the new job needs two"
    assert plan_pool("score", [old, replace(new, least=1)], [])
    assert plan_pool("fifo", [old, new], []) == []
    far = replace(new, start_s=dict.fromkeys(MEMBERS, 900.0))
    assert plan_pool("matching", [old, far], []) == []
    ending = replace(old, settled=old.members, left_s=5.0, pause_s=9.0)
    assert plan_pool("matching", [ending, new], []) == [], "the old one ends anyway"
    assert plan_pool("matching", [replace(old, least=6), new], []) == [], "the old one needs all"


@pytest.mark.parametrize("policy", POLICIES)
def test_member_alone_waits_at_the_first_job_for_others(policy: str) -> None:
    assert plan_pool(policy, [task("a", least=2), task("b", least=2)], ["m0"]) == [PoolMove("m0", "a")]


def test_heavy_model_gets_the_members_of_a_job_down_to_its_floor() -> None:
    job, model = task("job", "m0", "m1", least=2, floor=1), task("model", most=1, kind="serve")
    assert plan_pool("matching", [job, model], []) == []
    [move] = plan_pool("matching", [job, replace(model, weight=2.0)], [])
    assert (move.source, move.task) == ("job", "model")
    assert plan_pool("matching", [job, replace(model, weight=99.0, least=2, most=2)], []) == [], "one is the floor"


def test_drafts_give_their_member_back() -> None:
    drafts = task("drafts", "m1", most=1, kind="draft")
    [move] = plan_pool("matching", [task("job"), drafts], [])
    assert (move.member, move.task) == ("m1", "job")
    assert plan_pool("matching", [task("job"), replace(drafts, weight=9.0)], []) == []
    job = task("job", "m0", least=2)
    [move] = plan_pool("matching", [job, drafts], [])
    assert (move.member, move.task, move.source) == ("m1", "job", "drafts")
    assert plan_pool("matching", [replace(job, members=frozenset({"m0", "m2"})), drafts], []) == []
