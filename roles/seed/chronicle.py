"""What the seed writes down of a job beside its metrics: who computed each step, how long the ring stood still."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from p2ptrain.core.world import Clock
from ring import coordination as co
from ring.coordination import ENDED, Phase
from ring.recovery import Recorder
from ring.view import View
from roles.seed.ledger import Ledger
from roles.seed.peers import clipped, whole
from roles.seed.store import Records, Store
from roles.seed.updates import Board
from wire.job_messages import LedgerRows, StepMetrics
from wire.records import LedgerHead, RecoveryInfo

_STANDING = frozenset({str(phase) for phase in (*ENDED, Phase.PAUSED)})


@dataclass(frozen=True, slots=True)
class Known:
    """What the store has of it."""

    head: LedgerHead | None = None
    begins: Sequence[tuple[int, int, str]] = ()
    view: View | None = None
    recoveries: int = 0


def known(records: Records, job: str) -> Known:
    """On the store's thread."""
    newest = records.recoveries(job, 1)
    begins, number = records.begins(job), newest[-1].number if newest else 0
    return Known(records.ledger_head(job), begins, records.last_view(job), number)


class Chronicle:
    """One job's. ``note``: (level, kind, text) into the diary."""

    def __init__(
        self, job: str, past: Known, *, clock: Clock, store: Store, board: Board, note: Callable[[str, str, str], None]
    ) -> None:
        self.ledger = Ledger(job, past.head, past.begins)
        self.recoveries = Recorder(job, number=past.recoveries, view=past.view)
        self._job, self._clock, self._store, self._board, self._note = job, clock, store, board, note

    def happened(self, event: co.Event) -> None:
        """Before the coordinator is told."""
        now, wall = self._clock.now(), self._clock.wall()
        match event:
            case co.PeerLost(peer_id, reason, left):
                self.recoveries.lost(peer_id, reason, now, wall, left=left)
            case co.PeerReported(peer_id, report):
                self.recoveries.reported(peer_id, report, now, wall)

    def decided(self, instruction: co.Instruction) -> None:
        """What the coordinator had done."""
        match instruction:
            case co.SendHold(reason=reason):
                self.recoveries.held(reason, self._clock.now(), self._clock.wall())
            case co.SetState(state=state) if state in _STANDING:
                self.recoveries.abandon()
            case co.Mint(view=view):
                self.recoveries.minted(view, self._clock.now())

    def minting(self, view: View) -> None:
        """A view is about to be announced: later steps are taken back."""
        self.ledger.view_began(view)

    def began_anew(self, view: View) -> None:
        """The store found that a view has another past than the ledger's."""
        self.ledger.began_anew(view)
        text = f"generation {view.generation} begins at step {view.step} with another past than the ledger's, which "
        self._note("warning", "ledger", f"{text}begins anew there: who computed the steps before is not on record")

    def committed(self, message: StepMetrics) -> None:
        """Rank 0 told of a step."""
        form_ms = message.values.get("form_ms")
        form_s = form_ms / 1e3 if form_ms is not None and math.isfinite(form_ms) and form_ms >= 0 else None
        ended = self.recoveries.committed(message.generation, message.step, self._clock.now(), form_s)
        if ended is not None:
            self._recovered(ended)

    def told(self, message: LedgerRows, view: View | None, *, micro_batches: int, steps_total: int) -> None:
        """A member told who computed some steps. Raises ``ProtocolError``."""
        if view is None:
            return
        entries, problem = self.ledger.take_untrusted(
            message, view, micro_batches=micro_batches, steps_total=steps_total
        )
        for entry in entries:
            self._store.add(entry)
        if problem:
            self._note("warning", "ledger", problem)

    def shares(self, view: View) -> list[int]:
        """Micro-batches of each member in the newest step of a view, or as it began."""
        ledger = self.ledger
        if ledger.generation == view.generation and len(ledger.counts) == view.size:
            return list(ledger.counts)
        return [member.count for member in view.members]

    def _recovered(self, ended: RecoveryInfo) -> None:
        record = dataclasses.replace(ended, text=clipped(ended.text), fetched_bytes=whole(ended.fetched_bytes))
        self._store.add(record)
        self._board.add(record)
