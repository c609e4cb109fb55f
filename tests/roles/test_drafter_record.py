"""How often a drafter is right: counted from its drafts and the verdicts, whichever comes first."""

from __future__ import annotations

from roles.speculation.events import Tell
from roles.verifier.drafter_record import HOPELESS_AFTER, DraftRecord, SeatRecord


def tell(start: int, *tokens: int) -> Tell:
    return Tell(1, 1, start, tokens, 8, 0)


def test_a_verdict_counts_what_it_finds_right_up_to_what_it_finds_wrong() -> None:
    seat = SeatRecord(10)
    assert not seat.drafted(0, 10, [1, 2, 3])
    assert seat.judged(tell(11, 2, 9, 5)) == (2, True)
    assert not seat.drafted(0, 13, [4]), "of a line that was contradicted"
    assert not seat.drafted(1, 14, [6, 7])
    assert seat.judged(tell(14, 6)) == (1, False)
    assert seat.judged(tell(15, 7, 8)) == (1, False)


def test_a_verdict_of_what_was_not_drafted_counts_nothing() -> None:
    seat = SeatRecord(10)
    assert seat.judged(tell(10, 1, 2, 3)) == (0, False)
    seat.drafted(0, 12, [3, 4])  # the first of these was on its way when it was told
    assert seat.judged(tell(13, 4)) == (1, False)


def test_a_line_that_is_taken_back_was_wrong() -> None:
    seat = SeatRecord(10)
    seat.drafted(0, 10, [1, 2])
    assert seat.judged(tell(11)) == (1, False)
    assert seat.drafted(1, 11, [3])
    assert not seat.drafted(1, 12, [4])


def test_the_cost_of_a_right_token_decides() -> None:
    good, poor, far = DraftRecord(), DraftRecord(), DraftRecord()
    for record in (good, poor, far):
        record.step_s = 0.005
    for _ in range(20):
        good.count(9, wrong=True)
        far.count(9, wrong=True)
        poor.count(0, wrong=True)
    far.latency_s = 0.1
    assert 0.88 < good.alpha < 0.92
    assert not poor.hopeless, "too few"
    for _ in range(HOPELESS_AFTER):
        poor.count(0, wrong=True)
    assert poor.hopeless
    assert not good.hopeless
    assert good.cost_s(0) < good.cost_s(1) < far.cost_s(0) < poor.cost_s(0)
    for _ in range(100):
        poor.count(1, wrong=False)
    assert not poor.hopeless, "the last hundred decide"
