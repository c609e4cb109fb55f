"""The rows that a member keeps of the steps that it applied."""

from __future__ import annotations

import pytest

from p2ptrain.core.training import Applied
from ring.token import first_lineage, next_lineage
from ring.view import View
from roles.worker.reports import BATCH_BYTES, LEDGER_FILE_BYTES, ROWS, StepReporter, WorkerLedger
from wire.codec import encode
from wire.frame import CONTROL_FRAME_BYTES
from wire.job_messages import LedgerRow, LedgerRows, StepMetrics

ORIGIN = first_lineage("spec")


class Told:
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
    told = Told(5)
    assert told.beyond(0) == [1, 2, 3, 4, 5]
    assert told.beyond(3) == [4, 5]
    assert told.beyond(5) == told.beyond(9) == []
    told.said.clear()
    told.ledger.tell_last()
    assert [(message.lineage, message.rows[0].step) for message in told.said] == [(told.lineages[4], 5)]


def test_messages_and_memory_are_bounded() -> None:
    told = Told(ROWS + 10, members=100)
    assert told.beyond(0) == list(range(11, ROWS + 11))
    sizes = [len(encode(message)) for message in told.said]
    assert max(sizes) < CONTROL_FRAME_BYTES
    assert min(sizes[:-1]) > BATCH_BYTES // 2


def test_rows_come_back_from_the_checkpoint_that_they_were_saved_with() -> None:
    told, again = Told(5), Told()
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
    told, again = Told(), Told()
    for step in range(1, ROWS + 10):
        told.apply(step, members, generation=2 + step % 2)  # no two rows have the same head
    (file,) = told.ledger.files()
    assert file.size_bytes <= LEDGER_FILE_BYTES
    again.ledger.loaded_untrusted(ROWS + 9, told.lineages[-1], b"".join(map(bytes, file.parts)))  # type: ignore[arg-type]
    assert again.ledger.first_row(ROWS + 9, told.lineages[-1]) == ROWS + 10 - kept


def test_rows_of_a_past_that_was_given_up_are_dropped() -> None:
    told = Told(5)
    told.ledger.stands_at(3, told.lineages[3])
    assert told.beyond(0) == [1, 2, 3]
    told.lineages = told.lineages[:4]
    told.apply(4, generation=2)
    assert told.beyond(0) == [1, 2, 3, 4]
    assert told.said[0].rows[-1].generation == 2
    told.ledger.stands_at(4, "ab" * 16)
    assert told.beyond(0) == []


def test_a_state_from_elsewhere_begins_anew() -> None:
    told = Told(3)
    told.lineages = ["cd" * 16] * 8
    told.ledger.add(LedgerRow(8, 2, b"x" * 16, bytes(8)), "cd" * 16)
    assert told.beyond(0) == [8]
    told.ledger.stands_at(8, "00" * 16)
    told.ledger.tell_last()
    assert told.beyond(0) == []


def test_metrics_go_on_from_a_checkpoint_and_are_told_to_a_seed_that_lacks_them() -> None:
    said = list[StepMetrics]()

    def reporter() -> StepReporter:
        return StepReporter(job="job", steps_total=9, send=said.append, on_step=lambda *step: None)  # type: ignore[arg-type]

    view = View("job", 3, (), 5, "ab" * 16, ledger_step=2)
    before, after = reporter(), reporter()
    for step in range(1, 6):
        before.applied(Applied(step, loss=step / 2, lr=0.5, grad_norm=1.0))
    (file,) = before.files()
    after.loaded_untrusted(4, b"".join(map(bytes, file.parts)))  # type: ignore[arg-type]
    after.tell_beyond(view, 9)
    assert [(row.step, row.values["loss"]) for row in said] == [(3, 1.5), (4, 2.0)], "of the steps that the state has"
