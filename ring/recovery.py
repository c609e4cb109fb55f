"""Records interruptions: how long a ring was stopped, and for what. Pure; the seed feeds it.

An interruption is the time between two commits of different views::

    last commit       first notice       view minted       ring formed      state fetched     first commit
        ├───── detect ──────┼───── agree ─────┼───── form ──────┼─── transfer ────┼───── commit ────┤

*detect*: until the seed is notified by a report or a lost link, or decides to stop the ring. This includes the part of
a step that was under way. *agree*: until the next view is durable. *form*: until rank 0 has formed the ring.
*transfer*: until the last member that lacked the state reports that it has it. *commit*: one whole step.

A lost link is no interruption if the ring continues to commit. If a view breaks before its first commit, the next view
is a further attempt within the same interruption. A pause, or the end of a job, is no interruption.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ring.view import View
from wire.job_messages import Report
from wire.records import RecoveryInfo


@dataclass(slots=True)
class _Open:
    """An interruption that has not ended. Times are monotonic seconds."""

    kind: str
    text: str
    peer_id: str
    wall: float
    word_at: float
    last_at: float | None
    certain: bool
    minted_at: float | None = None
    healed_at: float | None = None
    attempts: int = 0
    fetched_bytes: int = 0
    sources: int = 0
    waiting: set[str] = field(default_factory=set)


class Recorder:
    """Records one job's interruptions.

    Args:
        number: of the last recorded interruption.
        view: the view that runs already, if there is one.
    """

    def __init__(self, job: str, *, number: int = 0, view: View | None = None) -> None:
        self._job, self._number, self._view = job, number, view
        self._last_at: float | None = None
        self._last_step = 0
        self._open: _Open | None = None

    def lost(self, peer_id: str, reason: str, now: float, wall: float, *, left: bool) -> None:
        if self._view is None or self._view.rank_of(peer_id) is None:
            return
        kind = "left" if left else "lost"
        if self._open is None:
            self._begin(kind, reason, peer_id, now, wall, certain=left)
        elif self._open.minted_at is None and self._open.kind == "broken":
            self._open.kind, self._open.peer_id = kind, peer_id  # the cause of the break

    def reported(self, peer_id: str, report: Report, now: float, wall: float) -> None:
        view = self._view
        if view is None or report.generation != view.generation or view.rank_of(peer_id) is None:
            return
        if report.status == "broken":
            if self._open is None:
                self._begin("broken", report.reason, report.suspect, now, wall, certain=True)
            elif self._open.minted_at is None:
                self._open.certain = True
                self._open.peer_id = self._open.peer_id or report.suspect
        elif report.status in ("held", "failed", "done") and self._open is None:
            self._begin(report.status, report.reason, peer_id, now, wall, certain=True)
        elif report.status == "healed" and self._open is not None and peer_id in self._open.waiting:
            self._open.waiting.discard(peer_id)
            self._open.healed_at = now
            self._open.fetched_bytes += report.fetched_bytes
            self._open.sources = max(self._open.sources, report.sources)

    def held(self, reason: str, now: float, wall: float) -> None:
        if self._view is not None and self._open is None:
            self._begin("held", reason, "", now, wall, certain=True)

    def minted(self, view: View, now: float) -> None:
        if self._open is not None:
            self._open.minted_at, self._open.healed_at = now, None
            self._open.attempts += 1
            self._open.waiting = {member.peer_id for member in view.members if not member.healthy}
        self._view, self._last_step = view, view.step

    def committed(self, generation: int, step: int, now: float, form_s: float | None = None) -> RecoveryInfo | None:
        """Take in a committed step. Returns the record if this ends an interruption.

        Args:
            form_s: how long rank 0 took from receiving the view to forming the ring, if it reported that.
        """
        view, trouble = self._view, self._open
        if view is None or generation != view.generation or step <= max(view.step, self._last_step):
            return None  # reported before
        self._last_at, self._last_step = now, step
        if trouble is None:
            return None
        if trouble.minted_at is None:
            if not trouble.certain:
                self._open = None  # only the link to the seed was lost
            elif trouble.kind == "held":
                trouble.last_at = now  # it stops at the boundary after this step
            return None
        self._open = None
        return self._closed(trouble, trouble.minted_at, view, now, form_s)

    def abandon(self) -> None:
        self._open = self._last_at = None

    def _begin(self, kind: str, text: str, peer_id: str, now: float, wall: float, *, certain: bool) -> None:
        self._open = _Open(kind, text, peer_id, wall, now, self._last_at, certain)

    def _closed(self, trouble: _Open, minted_at: float, view: View, now: float, form_s: float | None) -> RecoveryInfo:
        self._number += 1
        began_at = trouble.last_at if trouble.last_at is not None else trouble.word_at
        word_at = min(max(trouble.word_at, began_at), minted_at)
        formed_at = min(minted_at + form_s, now) if form_s is not None else None
        healed_at = trouble.healed_at
        if formed_at is not None and healed_at is not None:
            formed_at = min(formed_at, healed_at)
        ready_at = healed_at if healed_at is not None else formed_at if formed_at is not None else minted_at
        return RecoveryInfo(
            job=self._job,
            number=self._number,
            wall=trouble.wall,
            kind=trouble.kind,
            text=trouble.text,
            peer_id=trouble.peer_id,
            generation=view.generation,
            step=view.step,
            members=view.size,
            attempts=trouble.attempts,
            detect_s=word_at - began_at if trouble.last_at is not None else None,
            agree_s=minted_at - word_at,
            form_s=formed_at - minted_at if formed_at is not None else None,
            transfer_s=None if healed_at is None else healed_at - (formed_at if formed_at is not None else minted_at),
            commit_s=now - ready_at,
            total_s=now - began_at,
            fetched_bytes=trouble.fetched_bytes,
            sources=trouble.sources,
        )
