"""Who computed which step: what members tell the seed, and what a seed answers an audit."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from p2ptrain.cli.audit import page_untrusted, views_untrusted
from p2ptrain.core.errors import ProtocolError
from ring.ledger import MAX_MEMBERS, counts_of_untrusted, pack_counts
from ring.view import View
from roles.seed.ledger import Ledger
from wire.job_messages import LedgerRow, LedgerRows, MemberRecord

from .engine import Target
from .strategies import FREE, made, mostly

START = "ab" * 16
_VIEW = View("j", 2, 3, START, (MemberRecord("a", "a", "h", 1, 0, 4, healthy=True),))
_COUNTS = st.sampled_from([pack_counts([4]), pack_counts([1, 3]), b"", b"123", pack_counts([2**32 - 1] * 9)])


@st.composite
def _told(draw: st.DrawFn) -> LedgerRows:
    first = draw(st.integers(-1, 6))
    likely = {"generation": st.integers(0, 3), "digest": mostly(st.just(bytes(16)), st.binary(max_size=20))}
    rows = [
        draw(made(LedgerRow, step=st.just(first + number) | st.integers(0, 12), counts=_COUNTS, **likely))
        for number in range(draw(st.integers(0, 5)))
    ]
    return draw(made(LedgerRows, rows=st.just(rows), lineage=mostly(st.just(START), st.text(max_size=40))))


def _check_told(message: LedgerRows) -> None:
    ledger = Ledger("j")
    ledger.view_began(View("j", 1, 0, START, _VIEW.members))
    before = ledger.step
    try:
        entries, _ = ledger.take_untrusted(message, _VIEW, micro_batches=4, steps_total=10)
    except ProtocolError:
        assert ledger.step == before
        return
    assert [entry.row.step for entry in entries] == list(range(before + 1, ledger.step + 1))
    for entry in entries:
        assert sum(counts_of_untrusted(entry.row.counts)) == 4
        assert 1 <= entry.row.step <= 10


TOLD = Target(
    "ledger-rows",
    _told() | made(LedgerRows),
    _check_told,
    (
        "ring.ledger.rows_untrusted",
        "ring.ledger.counts_of_untrusted",
        "roles.seed.ledger.Ledger.take_untrusted",
    ),
    peak_bytes=256 << 10,
)

_RUN = st.fixed_dictionaries(
    {
        "first": mostly(st.integers(1, 9), FREE),
        "generation": mostly(st.integers(1, 9), FREE),
        "counts": mostly(st.lists(mostly(st.integers(0, 9), FREE), max_size=4), FREE),
        "digests": mostly(st.sampled_from(["00" * 16, "00" * 48, "0" * 31, "x" * 32]), FREE),
    }
)
_HEAD = st.fixed_dictionaries(
    {
        "base_step": mostly(st.integers(0, 9), FREE),
        "base_lineage": mostly(st.just(START), FREE),
        "step": mostly(st.integers(0, 9), FREE),
        "lineage": mostly(st.just(START), FREE),
    }
)
_PAGE = st.fixed_dictionaries(
    {},
    optional={
        "head": st.none() | mostly(_HEAD, FREE),
        "runs": mostly(st.lists(mostly(_RUN, FREE), max_size=3), FREE),
        "windows": mostly(st.integers(0, 99), FREE),
    },
)
_BEGAN = st.fixed_dictionaries(
    {
        "generation": mostly(st.integers(1, 9), FREE),
        "step": mostly(st.integers(0, 9), FREE),
        "lineage": mostly(st.just(START), FREE),
        "members": mostly(st.lists(mostly(st.just("a"), FREE), max_size=3), FREE),
    }
)
_VIEWS = st.fixed_dictionaries({}, optional={"views": mostly(st.lists(mostly(_BEGAN, FREE), max_size=3), FREE)})


def _check_answers(case: tuple[dict[str, Any], dict[str, Any]]) -> None:
    page, views = case
    try:
        found = page_untrusted(page)
    except ProtocolError:
        pass
    else:
        assert found.windows >= 0
        assert all(row.step >= 1 and len(row.digest) == 16 and len(row.counts) <= 4 * MAX_MEMBERS for row in found.rows)
    try:
        began = views_untrusted(views, 0)
    except ProtocolError:
        return
    generations = [view.generation for view in began]
    assert generations == sorted(set(generations))


ANSWERS = Target(
    "ledger-answers",
    st.tuples(_PAGE, _VIEWS),
    _check_answers,
    (
        "p2ptrain.cli.audit.page_untrusted",
        "p2ptrain.cli.audit._head_untrusted",
        "p2ptrain.cli.audit._rows_untrusted",
        "p2ptrain.cli.audit.views_untrusted",
    ),
    peak_bytes=256 << 10,
)

TARGETS = (TOLD, ANSWERS)
