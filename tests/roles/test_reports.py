"""What a worker reports of its steps: their rows of the ledger, their metrics and their times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2ptrain.core.training import Applied
from ring.token import first_lineage, next_lineage
from ring.view import View
from roles.worker.reports import BATCH_BYTES, KEPT, LEDGER_FILE_BYTES, ROWS, StepClock, StepReporter, WorkerLedger
from tests.ring.members import view
from wire.codec import encode
from wire.frame import CONTROL_FRAME_BYTES
from wire.job_messages import LedgerRow, LedgerRows, StepMetrics
from wire.messages import Message

ORIGIN = first_lineage("spec")


class ToldLedger:
    """A ledger, and what it said."""

    def __init__(self, steps: int = 0, members: int = 2) -> None:
        self.said: list[LedgerRows] = []
        self.ledger = WorkerLedger("job", self.said.append)
        self.lineages = [ORIGIN]
        for step in range(1, steps + 1):
            self.apply(step, members)

    def apply(self, step: int, members: int = 2, generation: int = 1) -> None:
        row = LedgerRow(step, generation, bytes([step % 256, generation]) * 8, bytes(4 * members))
        self.ledger.add(row, self.lineages[-1])
        self.lineages.append(next_lineage(self.lineages[-1], row.digest))

    def beyond(self, step: int) -> list[int]:
        self.said.clear()
        self.ledger.tell_beyond(step)
        for message in self.said:
            assert message.lineage == self.lineages[message.rows[0].step - 1]
        return [row.step for message in self.said for row in message.rows]


def test_rows_are_told_from_where_the_seed_has_none() -> None:
    told = ToldLedger(5)
    assert told.beyond(0) == [1, 2, 3, 4, 5]
    assert told.beyond(3) == [4, 5]
    assert told.beyond(5) == told.beyond(9) == []
    told.said.clear()
    told.ledger.tell_last()
    assert [(message.lineage, message.rows[0].step) for message in told.said] == [(told.lineages[4], 5)]


def test_messages_and_memory_are_bounded() -> None:
    told = ToldLedger(ROWS + 10, members=100)
    assert told.beyond(0) == list(range(11, ROWS + 11))
    sizes = [len(encode(message)) for message in told.said]
    assert max(sizes) < CONTROL_FRAME_BYTES
    assert min(sizes[:-1]) > BATCH_BYTES // 2


def test_rows_come_back_from_the_checkpoint_that_they_were_saved_with() -> None:
    told, again = ToldLedger(5), ToldLedger()
    (file,) = told.ledger.files()
    assert again.ledger.files() == []
    again.ledger.loaded_untrusted(5, told.lineages[5], b"".join(map(bytes, file.parts)))  # type: ignore[arg-type]
    again.lineages = told.lineages
    assert again.ledger.first_row(5, told.lineages[5]) == 1
    assert again.beyond(2) == [3, 4, 5]
    assert again.ledger.files() == [file]
    assert again.ledger.first_row(7, "ab" * 16) == 8, "they do not lead to that state"


@pytest.mark.parametrize(("members", "kept"), [(2, ROWS), (1024, LEDGER_FILE_BYTES // (192 + 12 * 1024))])
def test_the_file_is_bounded_and_has_the_newest_rows(members: int, kept: int) -> None:
    told, again = ToldLedger(), ToldLedger()
    for step in range(1, ROWS + 10):
        told.apply(step, members, generation=2 + step % 2)  # no two rows have the same head
    (file,) = told.ledger.files()
    assert file.size_bytes <= LEDGER_FILE_BYTES
    again.ledger.loaded_untrusted(ROWS + 9, told.lineages[-1], b"".join(map(bytes, file.parts)))  # type: ignore[arg-type]
    assert again.ledger.first_row(ROWS + 9, told.lineages[-1]) == ROWS + 10 - kept


def test_rows_of_a_past_that_was_given_up_are_dropped() -> None:
    told = ToldLedger(5)
    told.ledger.stands_at(3, told.lineages[3])
    assert told.beyond(0) == [1, 2, 3]
    told.lineages = told.lineages[:4]
    told.apply(4, generation=2)
    assert told.beyond(0) == [1, 2, 3, 4]
    assert told.said[0].rows[-1].generation == 2
    told.ledger.stands_at(4, "ab" * 16)
    assert told.beyond(0) == []


def test_a_state_from_elsewhere_begins_anew() -> None:
    told = ToldLedger(3)
    told.lineages = ["cd" * 16] * 8
    told.ledger.add(LedgerRow(8, 2, b"x" * 16, bytes(8)), "cd" * 16)
    assert told.beyond(0) == [8]
    told.ledger.stands_at(8, "00" * 16)
    told.ledger.tell_last()
    assert told.beyond(0) == []


class Reporting:
    """A member's reports of steps: (generation, step)."""

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
    first, second = Reporting(), Reporting()
    old = view(1, "abc")
    for step in range(1, 6):
        first.step(step, old, 0)
        second.step(step, old, 1)
    assert first.told == [(1, step) for step in range(1, 6)]
    assert second.told == []
    second.teller.tell_beyond(replace(view(2, "abc", step=4), ledger_step=2), 4)  # rank 0 may be a newcomer
    assert second.told == [(2, 3), (2, 4)], "a step beyond the view's is taken back"


def test_steps_and_their_metrics_go_on_from_a_checkpoint_of_their_state() -> None:
    before, after = Reporting(), Reporting()
    for step in range(1, 6):
        before.step(step, view(1, "abc"), 1)
    (file,) = before.teller.files()
    after.teller.loaded_untrusted(4, b"".join(map(bytes, file.parts)))  # type: ignore[arg-type]
    after.teller.tell_beyond(replace(view(3, "abc", step=5), ledger_step=2), 9)
    assert after.told == [(3, 3), (3, 4)], "of the steps that the state has"
    after.teller.forget()
    after.told.clear()
    after.teller.tell_beyond(view(4, "abc", step=5), 9)
    assert after.told == [], "the state was replaced"


def test_no_more_is_remembered_than_can_be_told_at_once() -> None:
    member = Reporting()
    for step in range(1, KEPT + 11):
        member.step(step, view(1, "abc"), 1)
    member.teller.tell_beyond(view(2, "abc", step=KEPT + 10), KEPT + 10)
    assert [step for _, step in member.told] == list(range(11, KEPT + 11))


def test_the_parts_of_a_step_are_those_of_its_last_view() -> None:
    now = 100.0
    clock = StepClock(lambda: now)
    with clock.phase("compute"):
        now += 5.0
    clock.waited(1.0)
    clock.begin_view()
    for _ in range(2):  # a step takes nothing over from the one before
        with clock.phase("compute"):
            now += 2.0
        with clock.phase("communicate"):
            now += 0.5
        clock.waited(0.125)
        clock.exchanged(exposed_s=0.25, communicating_s=1.0)
        with clock.phase("compute"):
            now += 0.25
        assert clock.step_done() == pytest.approx(
            {"step_ms": 2750, "compute_ms": 2250, "communicate_ms": 375, "wait_ms": 125, "hidden_ms": 750}
        )
    assert clock.longest_s == pytest.approx(2.75)
