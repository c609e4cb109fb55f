"""The seed's trackers: they copy a job's rows from the seed's records to where ``track.to`` says.

A tracker reads rows by a cursor, which is stored in the job's record after the rows are written. So the rows wait in
the records, not in memory, while a writer is slow or fails, and a restarted seed goes on where it was. Each tracker has
a thread of its own: one that hangs delays neither the seed nor the others.

Rows are written in order of their steps. A tracker waits up to ``GAP_S`` for a missing one, which a member may report
late. That a job went back to an earlier step is seen in its views: one that is newer than the row at the cursor began
before that row.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from configs.schema import Profile
from p2ptrain.core.errors import P2PTrainError, Refused, UserError
from p2ptrain.core.threads import Thread
from roles.background import Background
from roles.seed.store import Records
from roles.track.points import Point, Run, figures_of, values_of
from roles.track.writers import KEYS, WRITERS, Writer, check
from wire.records import MetricRow

if TYPE_CHECKING:
    from roles.seed.jobs import JobController
    from roles.seed.server import Seed

EVERY_S = 1.0
BATCH = 500
"""Most rows that a writer gets at a time."""
GAP_S = 10.0
STUCK_S = 120.0
"""A call of a writer that takes longer is reported, and ended if the writer can."""
RETRY_S = 30.0
LEAVE_S = 1.0
"""How long a stopping seed waits for its writers."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far a tracker is: the last step written, the newest generation among its rows, the number of its run, which
    grows when the job goes back, and whether the tracker knows that the job has ended."""

    step: int = 0
    generation: int = 0
    run: int = 1
    ended: bool = False


def rows_after(records: Records, job: str, cursor: Cursor) -> tuple[Cursor, list[MetricRow]]:
    """The next rows, and the cursor before them, which is moved back if the job went back. On the store's thread."""
    began = [step for generation, step, _ in records.begins(job) if generation > cursor.generation]
    if began and min(began) < cursor.step:
        cursor = dataclasses.replace(cursor, step=min(began), run=cursor.run + 1)
    return cursor, records.metrics(job, cursor.step, BATCH)


class Tracker:
    """Copies one job to one place."""

    def __init__(self, trackers: Trackers, controller: JobController, name: str, profile: Profile) -> None:
        self._trackers, self._seed, self._controller = trackers, trackers.seed, controller
        self._name, self._profile = name, profile
        self._cursor = Cursor(*controller.record.tracked.get(name, ()))
        self._thread: Thread | None = None
        self._writer: Writer | None = None
        self._gap_at: float | None = None
        self._retry_at = 0.0
        self._told = ""
        self.busy = False

    @property
    def due(self) -> bool:
        waiting = self._controller.live or not self._cursor.ended
        return waiting and not self.busy and self._seed.world.clock.now() >= self._retry_at

    async def catch_up(self, *, leave: bool = False) -> None:
        """Write all rows that there are. ``leave``: then end, for the seed stops."""
        self.busy = True
        try:
            while await self._write_some(leave=leave):
                pass
            if leave:
                await self._end("")
            self._told = ""
        except Exception as error:  # noqa: BLE001 - whatever a tracker's library raises: the seed goes on
            self._tell(error)
            self._retry_at = self._seed.world.clock.now() + RETRY_S
            if self._writer is not None:
                self._writer.abandon()
            self._writer = None
        finally:
            self.busy = False

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()

    async def _write_some(self, *, leave: bool) -> bool:
        """Write the next rows. False if there are no more of them now."""
        ended = "" if self._controller.live else self._controller.core.state  # read before the rows
        before, rows = await self._seed.store.call(rows_after, self._controller.id, self._cursor)
        if before != self._cursor:
            await self._end("")
            await self._keep(before)
        rows = [row for place, row in enumerate(rows) if row.step == rows[0].step + place]  # up to a missing one
        if self._is_missing(rows[0].step - 1 if rows else self._controller.core.known_step) and not (leave and ended):
            return False
        if rows:
            await self._begin()
            points = [Point(row.step, row.wall, values_of(row)) for row in rows]
            peers, serving = self._seed.peer_infos(), self._seed.services.infos()
            points[-1].values.update(figures_of(self._controller.info(), peers, serving))
            await self._call(lambda writer: writer.write(points))
            generation = max(self._cursor.generation, *(row.generation or 0 for row in rows))
            await self._keep(Cursor(rows[-1].step, generation, self._cursor.run))
            self._gap_at = None
        elif ended and not self._cursor.ended:
            if self._cursor.step:
                await self._begin()
            await self._end(ended)
            await self._keep(dataclasses.replace(self._cursor, ended=True))
        return bool(rows)

    def _is_missing(self, step: int) -> bool:
        """Whether a row up to this step is missing, and may still come from a member."""
        if step <= self._cursor.step:
            self._gap_at = None
            return False
        now = self._seed.world.clock.now()
        self._gap_at = now if self._gap_at is None else self._gap_at
        return now < self._gap_at + GAP_S

    async def _begin(self) -> None:
        if self._writer is not None:
            return
        track, record, number = self._profile.track, self._controller.record, self._cursor.run
        check(self._name, track, self._trackers.environ)
        root = Path(track.directory) if track.directory else self._trackers.directory
        run = Run(
            id=record.id if number == 1 else f"{record.id}-{number}",
            job=record.id,
            name=record.name if number == 1 else f"{record.name} ({number})",
            tags={"strategy": record.strategy, "profile": Path(record.profile).stem[:64]},
            config=self._profile.model_dump(),
            after_step=self._cursor.step,
            directory=root / f"{re.sub(r'[^A-Za-z0-9_-]', '_', record.name)}-{record.id}",
        )
        self._writer = self._trackers.writers[self._name](track, self._trackers.environ)
        await self._call(lambda writer: writer.begin(run))

    async def _end(self, state: str) -> None:
        if self._writer is not None:
            await self._call(lambda writer: writer.end(state))
        self._writer = None

    async def _call(self, call: Callable[[Writer], None]) -> None:
        writer = self._writer
        assert writer is not None
        self._thread = self._thread or self._seed.world.threads.start("track")
        working = self._thread.submit(lambda: call(writer))
        done, _ = await asyncio.wait([working], timeout=STUCK_S)
        if not done:
            self._tell(P2PTrainError(f"it has not answered for {STUCK_S:g} s"))
            writer.abandon()
        await working  # its rows may still be written: until then no others are

    async def _keep(self, cursor: Cursor) -> None:
        self._cursor = cursor
        await self._controller.keep_tracked(self._name, dataclasses.astuple(cursor))

    def _tell(self, error: Exception) -> None:
        """Note why nothing is written, once for each reason in a row, without keys."""
        text, remedy = f"{type(error).__name__}: {error}", "the rows are kept, and written when it works again"
        if isinstance(error, P2PTrainError):
            text, remedy = error.message, error.remedy or remedy
        for name in KEYS:
            if value := self._trackers.environ.get(name):
                text = text.replace(value, f"({name})").replace(repr(value)[1:-1], f"({name})")
        if text != self._told:
            self._told = text
            what = f"job {self._controller.record.name} is not written to {self._name}: {text}; {remedy}"
            self._seed.note("warning", "track", what, job=self._controller.id)


class Trackers:
    """All trackers of a seed.

    Args:
        directory: for the files of jobs without ``track.directory``.
        environ: the environment with the trackers' keys. They are never recorded or logged.
    """

    def __init__(self, seed: Seed, directory: Path, environ: Mapping[str, str]) -> None:
        self.seed, self.directory, self.writers = seed, directory, WRITERS
        self.environ = {name: value.strip() for name, value in environ.items()}  # a key from a file ends with a newline
        self._trackers: dict[tuple[str, str], Tracker] = {}
        self._tasks = Background()

    def check(self, profile: Profile) -> None:
        """Raise ``Refused`` if the seed cannot write to what a new job's profile names."""
        for name in profile.track.to:
            try:
                check(name, profile.track, self.environ)
            except UserError as problem:
                raise Refused("bad-spec", problem.message, remedy=problem.remedy) from problem

    async def run(self) -> None:
        """Look for new rows until cancelled."""
        while True:
            for controller in self.seed.controllers.values():
                if (profile := controller.profile) is not None:
                    for name in profile.track.to:
                        if (controller.id, name) not in self._trackers:
                            self._trackers[controller.id, name] = Tracker(self, controller, name, profile)
            for (job, to), tracker in list(self._trackers.items()):
                if job not in self.seed.controllers and not tracker.busy:  # it was forgotten
                    tracker.close()
                    del self._trackers[job, to]
                elif tracker.due:
                    self._tasks.start(tracker.catch_up(), "track")
            await asyncio.sleep(EVERY_S)

    async def close(self) -> None:
        """Write what is left, within ``LEAVE_S``. A writer that needs longer goes on from its cursor next time."""
        for tracker in self._trackers.values():
            if not tracker.busy:
                self._tasks.start(tracker.catch_up(leave=True), "track")
        await self._tasks.settle(timeout_s=LEAVE_S)
        await self._tasks.stop()
        for tracker in self._trackers.values():
            tracker.close()
