"""Who tells of a step, and who does when that one cannot."""

from __future__ import annotations

from dataclasses import replace

from p2ptrain.core.training import Applied
from ring.view import View
from roles.worker.reports import KEPT, StepReporter
from tests.ring.test_recovery import view
from wire.job_messages import StepMetrics
from wire.messages import Message


class Member:
    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []
        self.teller = StepReporter(job="job", steps_total=1000, send=self._say, on_step=lambda *_: None)

    def _say(self, message: Message) -> None:
        assert isinstance(message, StepMetrics)
        self.told.append((message.generation, message.step))

    def step(self, number: int, view: View, rank: int) -> None:
        self.teller.applied(Applied(number, 2.0, 0.1, 1.0))
        self.teller.tell(number, view, rank, {"step_ms": 5.0})


def test_every_member_tells_of_what_the_seed_lacked_when_the_view_was_minted() -> None:
    first, second = Member(), Member()
    old = view(1, 0)
    for step in range(1, 6):
        first.step(step, old, 0)
        second.step(step, old, 1)
    assert first.told == [(1, step) for step in range(1, 6)]
    assert second.told == []
    second.teller.tell_beyond(replace(view(2, 4), ledger_step=2), 4)  # rank 0 may be a newcomer
    assert second.told == [(2, 3), (2, 4)], "a step beyond the view's is taken back"


def test_steps_of_a_state_that_was_replaced_are_not_told() -> None:
    member = Member()
    member.step(1, view(1, 0), 1)
    member.teller.forget()
    member.teller.tell_beyond(view(2, 1), 1)
    assert member.told == []


def test_no_more_is_remembered_than_can_be_told_at_once() -> None:
    member = Member()
    for step in range(1, KEPT + 11):
        member.step(step, view(1, 0), 1)
    member.teller.tell_beyond(view(2, KEPT + 10), KEPT + 10)
    assert [step for _, step in member.told] == list(range(11, KEPT + 11))
