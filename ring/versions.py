"""A member of strategy 'server' (``ring.staleness``): its steps are the versions of a server. Pure.

Rules (those of ``ring.job_member`` hold, too)
-----
1. Rank 0 of a view is the server. It alone makes versions, applies and saves them. It waits for nobody's vote.
2. The others, its workers, pull versions: a worker that took over the state of a version has applied it.
3. A worker that is asked to stop, or whose server stops, stops after what it has under way. A server that waits for
   contributions stops at once. In a view that begins with the last version a worker pulls that first: if it were held
   before, because others are done at once, the next view would be the same.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

from ring import member_events as ev
from ring.job_member import COMMON, ENTERS, LEAVES, STOPS, JobMember, LeadsTo, MemberPhase, RingRequests, Table
from ring.token import Flag, next_lineage
from ring.view import View
from wire.job_messages import LedgerRow

_P = MemberPhase
_TRAINS: LeadsTo = {_P.COMPUTING: (ev.Collect, ev.ExchangeWithServer), _P.BOUNDARY: ev.Boundary, **STOPS}

VERSIONS: Table = {
    (_P.FORMING, ev.ActivityFinished): ("start", {**_TRAINS, **LEAVES}),
    (_P.COMPUTING, ev.VersionCombined): ("apply", {_P.APPLYING: ev.Apply, **LEAVES}),  # rule 1
    (_P.COMPUTING, ev.VersionPulled): ("adopt", {_P.APPLYING: ev.Adopt, **STOPS}),  # rule 2; or the next exchange
    (_P.COMPUTING, ev.ActivityFinished): ("stop_without_version", {_P.BOUNDARY: ev.Boundary}),  # rule 3
    (_P.COMPUTING, ev.FlagRequested): ("request_and_end", {}),  # rule 3
    (_P.APPLYING, ev.ActivityFinished): ("finish_change", {**_TRAINS, **ENTERS, **LEAVES}),
    (_P.BOUNDARY, ev.ActivityFinished): ("go_on", _TRAINS),
}


class VersionMember(JobMember):
    """The server or a worker: the view decides."""

    TABLE: ClassVar[Table] = COMMON | VERSIONS

    def __init__(self, **job: Any) -> None:
        super().__init__(**job)
        self._next: ev.VersionCombined | ev.VersionPulled | None = None  # what is applied, or adopted

    @property
    def is_server(self) -> bool:
        return self.view is not None and self.view.rank_of(self.peer_id) == 0

    def begin_view(self, view: View) -> list[Any]:
        return self._begin(_P.FORMING, ev.FormRing, view)

    def forget(self) -> None:
        self._next = None

    def _start(self, _: ev.ActivityFinished) -> list[Any]:
        view = self._current
        if self.is_server and (self.torn or (self.applied, self.lineage) != (view.step, view.lineage)):
            return self._break_off(ev.ViewBroken(view.generation, "", "the server does not hold the view's state"))
        return self.begin_step()

    def _request_before_ring(self, event: ev.FlagRequested) -> list[Any]:
        """Rule 3."""
        return self._request(event) if self._current.step >= self.steps_total else super()._request_before_ring(event)

    def begin_step(self) -> list[Any]:
        if not self.is_server:
            if self._requests.asks_to_stop and self._current.step < self.steps_total:
                return self._stop(_P.HELD)
            return self._begin(_P.COMPUTING, ev.ExchangeWithServer)
        if self.applied >= self.steps_total:
            return self._begin_boundary(save=True)
        if self._requests.asks_to_stop:
            return self._stop_without_version()
        return self._begin(_P.COMPUTING, ev.Collect, self.applied)

    def _stop_without_version(self, _: ev.ActivityFinished | None = None) -> list[Any]:
        self._requests = RingRequests(granted=self._requests.waiting)
        return self._begin_boundary(save=Flag.SAVE in self._requests.granted)

    # ------------------------------------------------------------------------------------------------------ the server

    def _apply(self, event: ev.VersionCombined) -> list[Any]:
        view = self._current
        if not math.isfinite(event.square_sum):
            reason = f"{view.members[0].name} (rank 0) combined contributions that are not finite"
            return self._break_off(ev.ViewBroken(view.generation, self.peer_id, reason, "contribution"))
        self._next = event
        return self._begin(_P.APPLYING, ev.Apply, self.applied, event.square_sum)

    def _request_and_end(self, event: ev.FlagRequested) -> list[Any]:
        self._request(event)
        return [ev.EndCollect()] if self.is_server and self._requests.asks_to_stop else []

    def _apply_version(self, version: ev.VersionCombined) -> list[Any]:
        row = LedgerRow(self.applied + 1, self._current.generation, version.digest, version.counts, version.made_of)
        record = ev.RecordStep(row, self.lineage)
        self.applied, self.square_sum = self.applied + 1, version.square_sum
        self.lineage = next_lineage(self.lineage, version.digest)
        self._requests = RingRequests(granted=self._requests.waiting | (Flag.STOP if version.stop else Flag(0)))
        return [record]

    # -------------------------------------------------------------------------------------------------------- a worker

    def _adopt(self, event: ev.VersionPulled) -> list[Any]:
        if (event.applied, event.lineage) == (self.applied, self.lineage):
            return self._after_pull(event)
        self._next = event
        return self._begin(_P.APPLYING, ev.Adopt, event.applied, event.lineage)

    def _after_pull(self, version: ev.VersionPulled) -> list[Any]:
        if version.last:
            return self._stop(_P.DONE)
        return self._stop(_P.HELD) if version.over else self.begin_step()

    # ------------------------------------------------------------------------------------------------------------ both

    def _finish_change(self, _: ev.ActivityFinished) -> list[Any]:
        version, self._next = self._next, None
        record: list[Any] = []
        if isinstance(version, ev.VersionCombined):
            record, ends = self._apply_version(version), self.stopping
        elif version is not None:
            self.applied, self.lineage, self.square_sum = version.applied, version.lineage, version.square_sum
            ends = version.last
        else:
            raise self._invalid("no version was to be applied")
        if following := self._follow_postponed(stops=ends):
            return record + following
        if isinstance(version, ev.VersionPulled):
            return self._after_pull(version)
        return record + self._begin_boundary(save=self._is_checkpoint_due)
