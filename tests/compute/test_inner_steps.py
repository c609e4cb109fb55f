"""Which inner steps the contributions of a member hold."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.compute.gradients import InnerSteps

STEPS = st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=20)


@given(fragments=st.integers(1, 3), overlap=st.booleans(), steps=STEPS)
def test_each_inner_step_is_sent_once_and_again_after_an_aborted_step(
    fragments: int, overlap: bool, steps: list[tuple[int, bool]]
) -> None:
    counts, step = InnerSteps(96, 96, fragments=fragments, overlap=overlap), 0
    unsent = [0] * fragments
    for taken, is_committed in steps:
        if counts.begin_step(step, has_losses=True):
            unsent = [0] * fragments
        before = unsent[step % fragments]
        sent = counts.send() if counts.is_ready else None
        for _ in range(taken):
            counts.count(1)
        unsent = [number + taken for number in unsent]
        if sent is None:
            sent, before = counts.send(), 0 if counts.waits else unsent[step % fragments]
        assert sent == before
        if is_committed:
            assert counts.take_up(step)
            unsent[step % fragments] -= sent
            step += 1
    assert not counts.take_up(step + 1), "a member that took no part begins with a new copy"
    assert counts.begin_step(step + 1, has_losses=False)
