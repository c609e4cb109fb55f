"""The timeline of an interruption: which words begin it, which end it, and that its phases add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ring.recovery import Recorder
from tests.ring.members import view
from wire.job_messages import Report
from wire.records import PHASES, RecoveryInfo, percentile, recovery_spread


def report(status: str, generation: int = 1, **values: object) -> Report:
    return Report("job", generation, status, 5, 5, "00" * 16, **values)  # type: ignore[arg-type]


def running() -> Recorder:
    """Generation 1 runs, and committed step 5 at 10.0 s."""
    recorder = Recorder("job", number=7)
    recorder.minted(view(1, "abc"), 1.0)
    assert recorder.committed(1, 5, 10.0) is None
    return recorder


def test_a_death_from_the_last_commit_to_the_next():
    recorder = running()
    recorder.lost("b", "reset", 10.5, 1000.0, left=False)
    recorder.reported("a", report("broken", suspect="b", reason="lost b"), 10.6, 1000.1)
    recorder.minted(view(2, "acd", step=5, healthy=set("ac")), 11.0)
    recorder.reported("d", report("healed", 2, fetched_bytes=100, sources=2), 12.5, 1002.0)
    found = recorder.committed(2, 6, 13.0, form_s=0.25)
    assert found == RecoveryInfo(
        job="job", number=8, wall=1000.0, kind="lost", text="reset", peer_id="b", generation=2, step=5, members=3,
        attempts=1, detect_s=0.5, agree_s=0.5, form_s=0.25, transfer_s=1.25, commit_s=0.5, total_s=3.0,
        fetched_bytes=100, sources=2,
    )  # fmt: skip
    assert sum(seconds for _, seconds in found.phases()) == found.total_s
    assert recorder.committed(2, 7, 14.0) is None


def test_who_died_explains_a_break_that_was_heard_of_first():
    recorder = running()
    recorder.reported("a", report("broken", reason="lost b"), 10.5, 0.0)
    recorder.lost("b", "reset", 10.6, 0.0, left=False)
    recorder.minted(view(2, "ac", step=5), 11.0)
    found = recorder.committed(2, 6, 12.0)
    assert (found.kind, found.peer_id, found.text, found.detect_s) == ("lost", "b", "lost b", 0.5)
    assert (found.form_s, found.transfer_s, found.commit_s) == (None, None, 1.0)


def test_a_lost_link_to_the_seed_alone_is_no_interruption():
    recorder = running()
    recorder.lost("b", "reset", 10.5, 0.0, left=False)
    assert recorder.committed(1, 6, 11.0) is None
    recorder.held("d joining", 20.0, 0.0)
    recorder.minted(view(2, "abcd", step=6), 21.0)
    found = recorder.committed(2, 7, 22.0)
    assert (found.kind, found.text, found.detect_s) == ("held", "d joining", 9.0)


def test_a_view_that_breaks_before_its_first_commit_is_a_further_attempt():
    recorder = running()
    recorder.lost("b", "reset", 10.5, 0.0, left=False)
    recorder.minted(view(2, "ac", step=5), 11.0)
    recorder.reported("a", report("broken", 2, suspect="c"), 12.0, 0.0)
    recorder.minted(view(3, "a", step=5), 12.5)
    found = recorder.committed(3, 6, 13.0)
    assert (found.attempts, found.agree_s, found.kind) == (2, 2.0, "lost")


def test_what_a_person_asked_for_is_no_interruption():
    recorder = running()
    recorder.held("the job is pausing", 10.5, 0.0)
    recorder.abandon()
    recorder.minted(view(2, "abc", step=5), 500.0)
    assert recorder.committed(2, 6, 501.0) is None


ACTS = st.sampled_from(["lost", "left", "broken", "held", "mint", "heal", "commit", "abandon"])


@given(st.lists(st.tuples(ACTS, st.sampled_from("abcd"), st.floats(0, 10)), max_size=60), st.floats(0, 20))
def test_phases_are_never_negative_and_add_up_to_the_whole(acts, form_s):
    recorder, now, number = Recorder("job"), 0.0, 0
    generation, step = 1, 0
    recorder.minted(view(1, "abc"), now)
    for what, peer_id, after_s in acts:
        now += after_s
        match what:
            case "lost" | "left":
                recorder.lost(peer_id, what, now, now, left=what == "left")
            case "broken" | "heal":
                status = "healed" if what == "heal" else what
                recorder.reported(peer_id, report(status, generation), now, now)
            case "held":
                recorder.held(what, now, now)
            case "mint":
                generation += 1
                recorder.minted(view(generation, "abcd", step=step, healthy=set("a")), now)
            case "abandon":
                recorder.abandon()
            case "commit":
                step += 1
                found = recorder.committed(generation, step, now, form_s)
                if found is not None:
                    number += 1
                    assert found.number == number
                    assert all(seconds >= 0 for _, seconds in found.phases())
                    assert sum(seconds for _, seconds in found.phases()) == pytest.approx(found.total_s)


def test_percentiles_are_values_that_occurred():
    assert percentile([], 0.5) is None
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([float("nan"), *range(1, 101)], 0.99) == 99
    recorder = running()
    recorder.lost("b", "reset", 10.5, 0.0, left=False)
    recorder.minted(view(2, "ac", step=5), 11.0)
    spread = recovery_spread([recorder.committed(2, 6, 12.0)])
    assert spread == {"detect": (0.5, 0.5), "agree": (0.5, 0.5), "commit": (1.0, 1.0), "total": (2.0, 2.0)}
    assert set(spread) <= {*PHASES, "total"}
