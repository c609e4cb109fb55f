"""The queue of passes: who is computed together, and in which order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from roles.pass_queue import PassQueue
from tests.invariants import check_invariants

ROOM = 100
adds = st.tuples(st.integers(0, 7), st.integers(1, 150), st.booleans(), st.integers(0, 1))
actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), adds),
        st.tuples(st.just("drop"), st.integers(0, 7)),
        st.tuples(st.just("take"), st.tuples(st.integers(0, 3), st.frozensets(st.integers(0, 7)))),
    ),
    max_size=40,
)


@given(actions)
def test_batches_are_bounded_and_first_come_first_served(actions: list[tuple[str, object]]) -> None:
    queue: PassQueue[int] = PassQueue()
    waiting: dict[int, tuple[int, bool, int]] = {}  # session -> positions, prefill, priority; in the order of arrival
    for action, what in actions:
        if action == "add":
            session, positions, prefill, priority = what  # type: ignore[misc]
            queue.add(session, positions, prefill=prefill, priority=priority)
            waiting.setdefault(session, (positions, prefill, priority))
        elif action == "drop":
            queue.drop(what)  # type: ignore[arg-type]
            waiting.pop(what, None)  # type: ignore[call-overload]
        else:
            most, blocked = what  # type: ignore[misc]
            batch = queue.take(lambda s: s not in blocked, most_sessions=most, most_prompt_positions=ROOM)  # noqa: B023
            ready = {session: facts for session, facts in waiting.items() if session not in blocked}
            taken = {session: waiting.pop(session) for session in batch}
            assert len(taken) == len(batch)
            assert not blocked & taken.keys()
            assert bool(batch) == bool(ready)
            assert sum(not prefill for _, prefill, _ in taken.values()) <= (most or 8)
            prompts = [positions for positions, prefill, _ in taken.values() if prefill]
            assert len(prompts) <= 1 or sum(prompts) <= ROOM
            for session in taken:  # no writing session is passed over by a later one of its priority or a lower one
                _, prefill, priority = taken[session]
                before = list(ready)[: list(ready).index(session)]
                passed = [other for other in before if other not in taken and ready[other][1] == prefill]
                assert prefill or all(ready[other][2] > priority for other in passed)
        check_invariants(queue)
        assert {session for session in range(8) if session in queue} == waiting.keys()


def test_prompt_keeps_its_place_until_it_is_computed() -> None:
    queue: PassQueue[str] = PassQueue()
    queue.add("first", 80, prefill=True)
    queue.add("second", 80, prefill=True)
    for _ in range(2):
        assert queue.take(most_prompt_positions=ROOM) == ["first"]
        queue.add("first", 80, prefill=True)
    queue.drop("first")
    queue.add("first", 20, prefill=True)
    assert queue.take(most_prompt_positions=ROOM) == ["second", "first"]


def test_session_that_wrote_goes_to_the_end() -> None:
    queue: PassQueue[str] = PassQueue()
    for name in "abc":
        queue.add(name, 1, prefill=False)
    assert queue.take(most_sessions=2, most_prompt_positions=ROOM) == ["a", "b"]
    for name in "ab":
        queue.add(name, 1, prefill=False)
    assert queue.take(most_sessions=2, most_prompt_positions=ROOM) == ["c", "a"]


def test_session_whose_prompt_is_computed_waits_behind_those_that_write() -> None:
    queue: PassQueue[str] = PassQueue()
    queue.add("new", 80, prefill=True)
    assert queue.take(most_prompt_positions=ROOM) == ["new"]
    for name in ("writes", "new"):
        queue.add(name, 1, prefill=False)
    assert queue.take(most_sessions=1, most_prompt_positions=ROOM) == ["writes"]


def test_short_prompt_does_not_overtake_a_long_one() -> None:
    queue: PassQueue[str] = PassQueue()
    queue.add("short", 20, prefill=True)
    queue.add("long", 500, prefill=True)
    queue.add("later", 20, prefill=True)
    queue.add("urgent", 10, prefill=True, priority=-1)
    assert queue.take(most_prompt_positions=ROOM) == ["urgent", "short"]
    assert queue.take(most_prompt_positions=ROOM) == ["long"], "a long one goes alone"
