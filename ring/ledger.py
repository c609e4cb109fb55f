"""The ledger of a job: which members computed which step, and the audit of it. Pure.

Each committed step has one row: the view (generation) in which it was computed, how many of the global batch's
micro-batches each member computed, in rank order, and the digest of the reduced bytes. The digests chain to the
lineage that every member holds and every view begins with. So a later change of the record contradicts the members.

A view that begins at step s takes back every later step: the rows of these steps are superseded. The *surviving* views
are those after which no view began at the same or an earlier step. Step t was computed in the newest of them that began
before t. The seed keeps rows of this history only, one per step, and folds the oldest rows into a *base*: a step and
its lineage. If a view continues from another history, that of a side which was cut off, a new ledger begins.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from p2ptrain.core.errors import ProtocolError
from ring.staleness import problem_of, unpacked_untrusted
from ring.token import next_lineage
from ring.view import View
from wire.job_messages import LedgerRow, LedgerRows
from wire.records import LedgerHead, ViewBegan

MAX_MEMBERS = 1024


def head_after(head: LedgerHead | None, view: View) -> LedgerHead:
    """The head after a view begins. The view takes back later steps. A view older than the base begins a new ledger."""
    if head is None or view.step < head.base_step:
        return begin_anew(view)
    if view.step <= head.step:
        return replace(head, step=view.step, lineage=view.lineage)
    return head


def begin_anew(view: View) -> LedgerHead:
    """The head of a new ledger, for a view that does not follow the rows of the old one.

    A side that was cut off, and trained on, may be the only one left. Then the job continues from its newest
    checkpoint, and no record says which members computed the steps up to there.
    """
    return LedgerHead(view.step, view.lineage, view.step, view.lineage)


class Begins:
    """The surviving views' first steps, for the newest 1000.

    Args:
        views: generation, step and lineage of each known view.
    """

    def __init__(self, views: Iterable[tuple[int, int, str]] = ()) -> None:
        self._begins: list[tuple[int, int, str]] = []  # step, generation, lineage; steps and generations increase
        for view in sorted(views):
            self.add(*view)

    def add(self, generation: int, step: int, lineage: str) -> None:
        while self._begins and self._begins[-1][0] >= step:
            self._begins.pop()
        self._begins.append((step, generation, lineage))
        del self._begins[:-1000]

    def superseded(self, generation: int, step: int) -> bool:
        """Whether a later view took back ``step`` of that generation, or computed it again."""
        place = bisect_left(self._begins, (step,))
        return place > 0 and generation < self._begins[place - 1][1]

    def lineage_at(self, step: int) -> str:
        """The lineage with which a view began at ``step``; empty if none did."""
        place = bisect_left(self._begins, (step + 1,))
        return self._begins[place - 1][2] if place > 0 and self._begins[place - 1][0] == step else ""


def counts_of_untrusted(counts: bytes) -> tuple[int, ...]:
    """Raises ``ProtocolError``."""
    if not 4 <= len(counts) <= 4 * MAX_MEMBERS or len(counts) % 4:
        raise ProtocolError(f"the shares of a step have an invalid length of {len(counts)} bytes")
    return struct.unpack(f"!{len(counts) // 4}I", counts)


def rows_untrusted(message: LedgerRows, *, micro_batches: int, steps_total: int) -> list[LedgerRow]:
    """The rows of a member's message: consecutive steps of the job, whose shares cover the micro-batches.

    Raises:
        ProtocolError: the message has other rows.
    """
    for number, row in enumerate(message.rows):
        if row.step != message.rows[0].step + number or row.step > steps_total:
            raise ProtocolError(f"unexpected ledger row: step {row.step}, generation {row.generation}")
        counts = counts_of_untrusted(row.counts)
        if sum(counts) != micro_batches:
            raise ProtocolError(f"the shares of step {row.step} do not cover the {micro_batches} micro-batches")
        if row.made_of:
            unpacked_untrusted(row.made_of, counts)
    return message.rows


Placed = tuple[str, LedgerRow]
"""A row and the lineage before it."""


def select_rows(view: View, begins: Begins, lineage: str, rows: Sequence[LedgerRow]) -> list[Placed]:
    """The rows that belong to the surviving history. A side that was cut off may report steps that were taken back.

    Args:
        view: the newest view. Steps after its start are its own, earlier ones belong to older views.
        begins: the surviving views.
        lineage: the lineage before the first of ``rows``, which are of consecutive steps.
    """
    lineages = accumulate((row.digest for row in rows), next_lineage, initial=lineage)
    return [
        (before, row)
        for before, row in zip(lineages, rows, strict=False)
        if (row.step <= view.step or row.generation == view.generation)
        and not begins.superseded(row.generation, row.step)
    ]


def extend_ledger(
    head: LedgerHead, view: View, begins: Begins, placed: Iterable[Placed]
) -> tuple[LedgerHead, list[LedgerRow], str]:
    """Choose the rows that continue the ledger.

    Returns:
        The new head, the rows, and in words how a row contradicts the ledger; empty if none does.
    """
    taken: list[LedgerRow] = []
    for lineage, row in placed:
        after = next_lineage(lineage, row.digest)
        if row.step == head.step + 1:
            if lineage != head.lineage:
                return head, taken, f"step {row.step} was reported with a lineage that contradicts the ledger"
            if row.generation > view.generation:
                return head, taken, f"step {row.step} was reported for the unknown generation {row.generation}"
            if begins.lineage_at(row.step) not in ("", after):
                return head, taken, f"step {row.step} was reported with a result that contradicts a view"
            head = replace(head, step=row.step, lineage=after)
            taken.append(row)
    return head, taken, ""


# --------------------------------------------------------------------------------------------------------------- audit


@dataclass(frozen=True, slots=True)
class LedgerFault:
    """What is wrong, and at which step. ``kind``: ``gap``, ``twice``, ``shares``, ``generation``, ``members``,
    ``lineage``, ``samples``, ``version``."""

    step: int
    kind: str
    text: str


def surviving_views(views: Iterable[ViewBegan]) -> list[ViewBegan]:
    """The views whose steps were not taken back, oldest first. If several began at one step, the newest counts."""
    kept: list[ViewBegan] = []
    for view in sorted(views, key=lambda item: item.generation):
        while kept and kept[-1].step >= view.step:
            kept.pop()
        kept.append(view)
    return kept


class Audit:
    """Takes the rows of a ledger in order, and stops at the first fault.

    Args:
        base_step, base_lineage: where the rows begin.
        micro_batches: number in a global batch.
        views: all known views. Steps before the oldest one are not compared with a view. In a view of several parts a
            replica's share is that of its first member.
        server: with strategy 'server': contributions in a version, and the fixed bound of their staleness or 0.

    Attributes:
        step, lineage: of the last row that was taken.
        computed: peer id → micro-batches that it computed, as far as views name the members. A worker of a replica
            computed its stage of all the replica's micro-batches. ``total``: those of the steps of these views.
        staleness: peer id → staleness → accepted contributions (strategy 'server').
    """

    def __init__(
        self,
        *,
        base_step: int,
        base_lineage: str,
        micro_batches: int,
        views: Iterable[ViewBegan],
        server: tuple[int, int] | None = None,
    ) -> None:
        self._server = server
        self._numbers = set[int]()  # of contributions
        self.staleness: dict[str, Counter[int]] = {}
        self.step, self.lineage = base_step, base_lineage
        self.computed: Counter[str] = Counter()
        self.total = 0
        self._micro_batches = micro_batches
        known = list(views)
        self._by_generation = {view.generation: view for view in known}
        self._views = surviving_views(known)
        self._next = sum(view.step < base_step for view in self._views)  # index of the first view that has not begun
        self._complete = bool(self._views) and self._views[0].step <= base_step

    def take(self, row: LedgerRow) -> LedgerFault | None:
        """Take the next row. Returns what is wrong with it, or None."""
        step = self.step + 1
        if row.step != step:
            if row.step < step:
                return LedgerFault(row.step, "twice", f"step {row.step} is in the ledger twice")
            missing = f"step {step} is" if row.step == step + 1 else f"steps {step} to {row.step - 1} are"
            return LedgerFault(step, "gap", f"{missing} missing")
        try:
            counts = counts_of_untrusted(row.counts)
        except ProtocolError as problem:
            return LedgerFault(step, "shares", f"step {step}: {problem.message}")
        if sum(counts) != self._micro_batches:
            text = f"step {step}: the members computed {sum(counts)} of {self._micro_batches} micro-batches"
            return LedgerFault(step, "shares", text)
        if fault := self._computed_by(row, counts) or self._made_of(row, counts):
            return fault
        self.step, self.lineage = step, next_lineage(self.lineage, row.digest)
        return self.begin_views()

    def finish(self, step: int, lineage: str) -> LedgerFault | None:
        if self.step != step:
            return LedgerFault(self.step + 1, "gap", f"the ledger ends with step {self.step}, expected {step}")
        if lineage != self.lineage:
            text = f"the rows lead to lineage {self.lineage}, and the ledger's last step has {lineage}"
            return LedgerFault(step, "lineage", text)
        return None

    def _made_of(self, row: LedgerRow, counts: tuple[int, ...]) -> LedgerFault | None:
        if self._server is None:
            return None
        buffer, bound = self._server
        try:
            accepted = unpacked_untrusted(row.made_of, counts)
        except ProtocolError as problem:
            return LedgerFault(row.step, "version", f"step {row.step}: {problem.message}")
        text = problem_of(accepted, row.step, buffer=buffer, bound=bound)
        view = self._by_generation.get(row.generation)
        if view is not None and len(counts) != len(view.members):
            view = None  # of the time before the views that are known
        for item in () if text else accepted:
            if counts[item.rank] != self._micro_batches // buffer:
                text = f"rank {item.rank} contributed {counts[item.rank]} micro-batches"
            elif item.number in self._numbers:
                text = f"the contribution {item.number} is part of an earlier version, too"
            elif view is not None and item.base < view.step:
                text = f"the contribution {item.number} was computed before generation {view.generation} began"
            self._numbers.add(item.number)
            if view is not None:
                self.staleness.setdefault(view.members[item.rank], Counter())[row.step - 1 - item.base] += 1
        return LedgerFault(row.step, "version", f"step {row.step}: {text}") if text else None

    def _computed_by(self, row: LedgerRow, counts: tuple[int, ...]) -> LedgerFault | None:
        if not self._next:
            if self._complete:
                return LedgerFault(row.step, "generation", f"step {row.step} was computed before the first view began")
            return None  # its view is not known any more
        view = self._views[self._next - 1]
        if row.generation != view.generation:
            text = f"step {row.step} names generation {row.generation}, but generation {view.generation} computed it"
            return LedgerFault(row.step, "generation", text)
        if len(counts) != len(view.members):
            text = f"step {row.step}: shares of {len(counts)} members, generation {view.generation} has "
            return LedgerFault(row.step, "members", f"{text}{len(view.members)}")
        self.total += self._micro_batches
        for rank, peer_id in enumerate(view.members):
            self.computed[peer_id] += counts[rank - rank % max(view.stages, 1)]
        return None

    def begin_views(self) -> LedgerFault | None:
        """Compare the lineage with the views that begin here. At the base, a view may have begun the ledger."""
        while self._next < len(self._views) and self._views[self._next].step <= self.step:
            view = self._views[self._next]
            if view.lineage != self.lineage:
                text = f"generation {view.generation} began at step {view.step} with lineage {view.lineage}, and the "
                return LedgerFault(view.step, "lineage", f"{text}rows up to there lead to {self.lineage}")
            self._next += 1
        return None
