"""Who computed which step: what members tell the seed."""

from __future__ import annotations

from hypothesis import strategies as st

from p2ptrain.core.errors import ProtocolError
from ring.ledger import counts_of_untrusted, pack_counts
from ring.view import View
from roles.seed.ledger import Ledger
from wire.job_messages import LedgerRow, LedgerRows, MemberRecord

from .engine import Target
from .strategies import made, mostly

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

TARGETS = (TOLD,)
