"""Who computed the steps that this member applied: kept until the seed has it in its own ledger, and told to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice

from ring.token import next_lineage
from wire.job_messages import LedgerRow, LedgerRows

ROWS = 4096
"""Newest ones kept: a seed that was away for so many steps does not learn of older ones."""
BATCH_BYTES = 32 << 10
"""Of one message, half of what a control frame may have."""
ROW_BYTES = 96
"""Of a row beside its counts, at most: keys, numbers, digest."""


class Ledger:
    """One job's rows, in order and without a gap, each with the lineage before it.

    Args:
        say: to the seed, which keeps one of each.
    """

    def __init__(self, job: str, say: Callable[[LedgerRows], None]) -> None:
        self._job, self._say = job, say
        self._rows: deque[tuple[str, LedgerRow]] = deque(maxlen=ROWS)

    def add(self, row: LedgerRow, lineage: str) -> None:
        """A step was applied to a state of ``lineage``."""
        self.stands_at(row.step - 1, lineage)
        self._rows.append((lineage, row))

    def stands_at(self, applied: int, lineage: str) -> None:
        """The state may be another one than that which the rows led to: rows of another past say nothing of it."""
        while self._rows and self._rows[-1][1].step > applied:
            self._rows.pop()
        if self._rows:
            before, row = self._rows[-1]
            if row.step != applied or next_lineage(before, row.digest) != lineage:
                self._rows.clear()

    def tell_last(self) -> None:
        """The newest row, as it is committed."""
        if self._rows:
            lineage, row = self._rows[-1]
            self._say(LedgerRows(self._job, lineage, [row]))

    def tell_beyond(self, step: int) -> None:
        """All rows of later steps than ``step``, in messages of bounded size."""
        skipped = sum(row.step <= step for _, row in self._rows)
        batch: list[LedgerRow] = []
        first_lineage, size_bytes = "", 0
        for lineage, row in islice(self._rows, skipped, None):
            row_bytes = ROW_BYTES + len(row.counts)
            if batch and size_bytes + row_bytes > BATCH_BYTES:
                self._say(LedgerRows(self._job, first_lineage, batch))
                batch, size_bytes = [], 0
            if not batch:
                first_lineage = lineage
            batch.append(row)
            size_bytes += row_bytes
        if batch:
            self._say(LedgerRows(self._job, first_lineage, batch))
