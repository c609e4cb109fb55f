"""Who computed which step: what continues a ledger, what a view takes back, and that an audit sees every fault."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from p2ptrain.core.errors import ProtocolError
from ring.ledger import (
    Audit,
    Begins,
    LedgerFault,
    extend_ledger,
    head_after,
    rows_untrusted,
    select_rows,
    surviving_views,
)
from ring.token import Shares, next_lineage
from ring.view import View
from tests.ring.members import ORIGIN as START
from tests.ring.members import view
from wire.job_messages import LedgerRow, LedgerRows
from wire.records import LedgerHead, ViewBegan

M = 8
NONE = Begins()


def row(step: int, generation: int = 1, counts: tuple[int, ...] = (4, 4), salt: str = "") -> LedgerRow:
    digest = hashlib.blake2b(f"{step}{salt}".encode(), digest_size=16).digest()
    return LedgerRow(step, generation, digest, Shares(counts).packed())


def chained(rows: list[LedgerRow], lineage: str = START) -> str:
    for item in rows:
        lineage = next_lineage(lineage, item.digest)
    return lineage


def fitting(head: LedgerHead, newest: View, begins: Begins, lineage: str, rows: list[LedgerRow]):
    return extend_ledger(head, newest, begins, select_rows(newest, begins, lineage, rows))


# ------------------------------------------------------------------------------------------------------------- keeping


def test_rows_of_another_past_are_refused_and_told_of():
    head, _, _ = fitting(LedgerHead(0, START, 0, START), view(1, "ab"), NONE, START, [row(1)])
    same, taken, problem = fitting(head, view(1, "ab"), NONE, chained([row(1, salt="x")]), [row(2)])
    assert (same, taken) == (head, [])
    assert "a lineage that contradicts the ledger" in problem


def test_rows_that_lead_elsewhere_than_to_where_a_view_began_are_refused_and_told_of():
    begins = Begins([(1, 0, START), (2, 2, chained([row(1), row(2)])), (3, 4, "11" * 16)])
    liar = [row(1), row(2, salt="x"), row(3), row(4)]
    now = view(3, "ab", step=4, lineage="11" * 16)
    head, taken, problem = fitting(LedgerHead(0, START, 0, START), now, begins, START, liar)
    assert (taken, "a result that contradicts a view" in problem) == (liar[:1], True)
    assert fitting(head, now, begins, START, [row(1), row(2)])[1:] == (
        [row(2)],
        "",
    )


def test_of_what_views_computed_anew_the_newest_counts():
    begins = Begins([(4, 7, "d"), (1, 0, "a"), (3, 9, "c"), (2, 5, "b")])
    computed = {step: next(item for item in range(1, 6) if not begins.superseded(item, step)) for step in range(1, 13)}
    assert computed == {step: 1 if step <= 5 else 2 if step <= 7 else 4 for step in range(1, 13)}
    assert [begins.lineage_at(step) for step in (0, 4, 5, 7, 9)] == ["a", "", "b", "d", ""]
    begins.add(5, 3, "e")
    assert (begins.superseded(2, 6), begins.superseded(4, 8), begins.superseded(1, 3)) == (True, True, False)


@example([("s", 0), ("v", 0), ("s", 0), ("v", 1), ("r", 0)])
@given(st.lists(st.tuples(st.sampled_from("tvrs"), st.integers(0, 12)), max_size=40))
def test_whatever_is_told_in_whatever_order_the_ledger_stays_one_chain(acts):
    """t: a member tells rows from some step on; s: it tells nobody. v: a view begins at some step. r: late words of an
    old generation."""
    truth: list[LedgerRow] = []
    now = view(1, "ab")
    head, kept, begins = head_after(None, now), {}, Begins([(1, 0, START)])
    stale: list[list[LedgerRow]] = []
    for what, number in acts:
        if what == "v":
            stale.append(list(truth))
            truth = truth[: min(number, len(truth))]
            now = view(now.generation + 1, "ab", step=len(truth), lineage=chained(truth))
            head = head_after(head, now)
            begins.add(now.generation, now.step, now.lineage)
            kept = {step: item for step, item in kept.items() if step <= now.step}
        elif what == "r" and stale:
            old = stale[number % len(stale)]
            head, taken, _ = fitting(head, now, begins, START, old) if old else (head, [], "")
            kept.update({item.step: item for item in taken})
        else:
            truth.append(row(len(truth) + 1, now.generation, salt=str(now.generation)))
            if what == "s":
                continue
            first = min(number, len(truth) - 1)
            head, taken, problem = fitting(head, now, begins, chained(truth[:first]), truth[first:])
            assert not problem
            kept.update({item.step: item for item in taken})
        assert sorted(kept) == list(range(1, head.step + 1))
        assert chained([kept[step] for step in sorted(kept)]) == head.lineage
        assert [kept[step] for step in sorted(kept)] == truth[: head.step]


BAD = [
    LedgerRows("j", START, [row(101)]),
    LedgerRows("j", START, [row(1), row(3)]),
    LedgerRows("j", START, [row(1), row(1)]),
    LedgerRows("j", START, [row(1, counts=(4, 3))]),
    LedgerRows("j", START, [replace(row(1), counts=b"12345")]),
    LedgerRows("j", START, [replace(row(1), counts=b"")]),
]


@pytest.mark.parametrize("message", BAD)
def test_what_is_no_ledger_is_refused(message):
    with pytest.raises(ProtocolError):
        rows_untrusted(message, micro_batches=M, steps_total=100)


# --------------------------------------------------------------------------------------------------------------- audit

ROWS = [row(1), row(2), row(3, 2, (3, 3, 2)), row(4, 2, (2, 2, 4)), row(5, 4)]
VIEWS = [
    ViewBegan(1, 0, START, ("a", "b")),
    ViewBegan(2, 2, chained(ROWS[:2]), ("a", "b", "c")),
    ViewBegan(3, 4, chained(ROWS[:4]), ("c", "d")),  # broke before its first commit
    ViewBegan(4, 4, chained(ROWS[:4]), ("a", "b")),
]


def audited(rows: list[LedgerRow], views: list[ViewBegan], *, base: int = 0) -> tuple[Audit, LedgerFault | None]:
    audit = Audit(base_step=base, base_lineage=chained(ROWS[:base]), micro_batches=M, views=views)
    fault = audit.begin_views()
    for item in rows:
        fault = fault or audit.take(item)
    return audit, fault


def test_a_sound_ledger_passes_and_says_who_computed_how_much():
    audit, fault = audited(ROWS, VIEWS)
    assert fault is None
    assert audit.finish(5, chained(ROWS)) is None
    missing, other = audit.finish(6, chained(ROWS)), audit.finish(5, START)
    assert (missing and missing.kind, other and other.kind) == ("gap", "lineage")
    assert audit.computed == {"a": 8 + 5 + 4, "b": 8 + 5 + 4, "c": 6}


def test_each_worker_of_a_replica_is_due_all_that_its_replica_computed():
    """Two replicas of two parts, whose shares stand at their first parts; then one replica of three parts."""
    rows = [row(1, 1, (5, 0, 3, 0)), row(2, 1, (2, 0, 6, 0)), row(3, 2, (8, 0, 0))]
    views = [ViewBegan(1, 0, START, ("a", "b", "c", "d"), 2), ViewBegan(2, 2, chained(rows[:2]), ("c", "b", "e"), 3)]
    audit = Audit(base_step=0, base_lineage=START, micro_batches=M, views=views)
    assert [audit.begin_views(), *map(audit.take, rows)] == [None] * 4
    assert (audit.computed, audit.total) == ({"a": 7, "b": 7 + 8, "c": 9 + 8, "d": 9, "e": 8}, 3 * M)


def test_a_ledger_whose_beginning_was_folded_passes_too():
    assert audited(ROWS[3:], VIEWS, base=3)[1] is None
    assert audited(ROWS[3:], VIEWS[2:], base=3)[1] is None, "its view is forgotten"


FAULTS = {
    "gap": [*ROWS[:1], *ROWS[2:]],
    "twice": [*ROWS[:2], *ROWS[1:]],
    "shares": [*ROWS[:2], row(3, 2, (3, 3, 1)), *ROWS[3:]],
    "generation": [*ROWS[:2], row(3, 1), *ROWS[3:]],
    "members": [*ROWS[:2], row(3, 2, (4, 4)), *ROWS[3:]],
    "lineage": [ROWS[0], row(2, salt="x"), *ROWS[2:]],
}


@pytest.mark.parametrize("kind", FAULTS)
def test_every_fault_is_found_and_the_first_step_named(kind):
    fault = audited(FAULTS[kind], VIEWS)[1]
    assert fault is not None
    assert (fault.kind, fault.step) == (kind, {"gap": 2, "twice": 2, "lineage": 2}.get(kind, 3))


def test_a_base_that_no_view_vouches_for_is_a_fault():
    assert audited([], [replace(VIEWS[0], lineage="11" * 16)])[1].kind == "lineage"


def test_views_whose_course_was_taken_back_do_not_count():
    taken_back = ViewBegan(5, 2, chained(ROWS[:2]), ("x",))
    assert surviving_views([*VIEWS, taken_back]) == [VIEWS[0], taken_back]
    assert audited(ROWS, [*VIEWS, taken_back])[1].kind == "generation", "the steps after 2 are generation 5's to make"


def test_of_the_views_that_begin_at_one_step_the_newest_counts():
    """The one before it was made of a side that was cut off, whose rows nobody had told."""
    other = ViewBegan(2, VIEWS[1].step, "11" * 16, ("x",))
    newest = replace(VIEWS[1], generation=3)
    rows = [*ROWS[:2], *(row(step, 3, (2, 3, 3)) for step in (3, 4))]
    assert audited(rows, [VIEWS[0], other, newest])[1] is None
