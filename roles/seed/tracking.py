"""The seed's trackers: they copy a job's rows from the seed's records to where ``track.to`` says.

A tracker reads rows by a cursor, which is stored in the job's record after the rows are written. So the rows wait in
the records, not in memory, while a writer is slow or fails, and a restarted seed goes on where it was. Each tracker has
a thread of its own: one that hangs delays neither the seed nor the others.

Rows are written in order of their steps. A missing one is waited for up to ``GAP_S``: a member that was cut off reports
it late. That a job went back to an earlier step is seen in its views: one that is newer than the row at the cursor
began before that row.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from configs.schema import Profile, Track
from p2ptrain.core import plugins
from p2ptrain.core.errors import P2PTrainError, StorageError
from roles.seed.jobs import JobController
from roles.seed.server import Seed
from roles.seed.store import Records
from roles.track.writers import KEYS, WRITERS, Point, TrackedRun, Writer, check
from wire.records import JobInfo, MetricRow, PeerInfo, ServingInfo

BATCH = 40
"""Most rows that a writer gets at a time. Their values and the figures are less than 1000, MLflow's limit."""
GAP_S = 30.0
RETRY_S = 30.0
MAX_NODES = 64
"""Members of a job with figures of their own: those with the lowest ranks."""
_NAMES = {"loss": "train/loss", "val_loss": "val/loss"}
_COLUMNS = [item.name for item in dataclasses.fields(MetricRow) if item.name not in ("job", "step", "wall")]


def figures_of(job: JobInfo, peers: Sequence[PeerInfo], serving: Sequence[ServingInfo]) -> dict[str, float]:
    """The present figures that belong to no step: of the job's members, and of the first verifier."""
    found: dict[str, float | None] = {}
    members = [peer for peer in peers if peer.id in job.members[:MAX_NODES]]
    for peer in members:
        found[f"node/{peer.id}/memory"] = peer.memory_bytes or None
        found[f"node/{peer.id}/staleness"] = peer.staleness if peer.accepted else None
    if accepted := sum(peer.accepted for peer in members):
        found["staleness"] = sum(peer.staleness * peer.accepted for peer in members) / accepted
    for score in job.scores[:MAX_NODES]:
        found |= {f"node/{score.peer}/distance": score.distance, f"node/{score.peer}/excluded": score.excluded}
    stats = next((info.stats for info in serving if info.role == "verifier"), {})
    found["infer/latency_ms_per_token"] = stats.get("token_ms")
    if "alpha" in stats and "token_ms" in stats:
        found |= {"spec/alpha": stats["alpha"], "spec/s_per_token": stats["token_ms"] / 1e3}
    return _drop_unknown(found)


def _drop_unknown(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}


class Cursor(NamedTuple):
    """How far a tracker is: the last step written, the newest generation among its rows, the number of its run, which
    grows when the job goes back, and whether the tracker knows that the job has ended."""

    step: int = 0
    generation: int = 0
    run: int = 1
    ended: bool = False


def cursor_of(controller: JobController, tracker: str) -> Cursor:
    return Cursor(*controller.record.tracked.get(tracker, ()))


def rows_after(records: Records, job: str, cursor: Cursor, late: float) -> tuple[Cursor, list[MetricRow]]:
    """The next rows, and the cursor before them, which is moved back if the job went back. On the store's thread. Rows
    that were recorded after ``late`` (Unix seconds) wait for those of earlier steps."""
    began = [step for generation, step, _ in records.begins(job) if generation > cursor.generation]
    if began and min(began) < cursor.step:
        cursor = cursor._replace(step=min(began), run=cursor.run + 1)
    rows, step = list[MetricRow](), cursor.step
    for row in records.metrics(job, cursor.step, BATCH):
        if row.step > step + 1 and row.wall > late:
            break
        rows.append(row)
        step = row.step
    return cursor, rows


def check_trackers(environ: Mapping[str, str], profile: Profile) -> None:
    """Raise ``Refused`` if the seed cannot write to what a new job's profile names."""
    for name in profile.track.to:
        check(name, profile, environ)


@dataclass(slots=True)
class Trackers:
    """All trackers of a seed.

    Attributes:
        directory: for all files; ``track.directory`` is in it.
        environ: the environment with the trackers' keys. They are never recorded or logged.
        every_s: between two looks for new rows. leave_s: how long a stopping seed waits for its writers.
        stopping: set when the seed stops.
    """

    seed: Seed
    directory: Path
    environ: Mapping[str, str]
    writers: Mapping[str, Callable[[Track, Mapping[str, str]], Writer]] = field(default_factory=lambda: WRITERS)
    every_s: float = 1.0
    leave_s: float = 1.0
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: dict[tuple[str, str], asyncio.Task[None]] = field(default_factory=dict)

    def is_wanted(self, controller: JobController, tracker: str) -> bool:
        """Whether the job has rows for this tracker, or may get some."""
        is_known = controller.id in self.seed.jobs.controllers  # it may be forgotten
        return is_known and (controller.live or not cursor_of(controller, tracker).ended)

    async def run(self) -> None:
        """Track jobs until cancelled. Raises ``StorageError``."""
        while True:
            for controller in self.seed.jobs.controllers.values():
                if (profile := controller.profile) is None:
                    continue
                for name in profile.track.to:
                    if (controller.id, name) not in self._tasks and self.is_wanted(controller, name):
                        tracker = Tracker(self, controller, name, profile)
                        self._tasks[controller.id, name] = asyncio.create_task(tracker.run(), name="track")
            for key in [key for key, task in self._tasks.items() if task.done()]:
                self._tasks.pop(key).result()
            await asyncio.sleep(self.every_s)

    async def close(self) -> None:
        """Write what is left, within ``leave_s``. A writer that needs longer goes on from its cursor next time."""
        self.stopping.set()
        if tasks := list(self._tasks.values()):
            done, late = await asyncio.wait(tasks, timeout=self.leave_s)
            for task in late:
                task.cancel()
            for task in done:
                task.result()


class Tracker:
    """Copies one job to one place, with a thread of its own."""

    def __init__(self, trackers: Trackers, controller: JobController, name: str, profile: Profile) -> None:
        self._trackers, self._seed, self._controller = trackers, trackers.seed, controller
        self._name, self._profile, self._cursor = name, profile, cursor_of(controller, name)
        self._thread = self._seed.world.threads.start("track")
        self._writer: Writer | None = None
        self._last_warning = ""

    async def run(self) -> None:
        """Copy until the job has ended or is forgotten, or the seed stops. Raises ``StorageError``."""
        stopping, leave = self._trackers.stopping, False
        try:
            while not leave and self._trackers.is_wanted(self._controller, self._name):
                leave = stopping.is_set()
                wait_s = await self.catch_up()
                with suppress(TimeoutError):
                    await asyncio.wait_for(stopping.wait(), wait_s)
            with suppress(Exception):
                await self._end("")
        finally:
            self._thread.close()

    async def catch_up(self) -> float:
        """Write all rows that there are, and return in how many seconds to look again."""
        try:
            while await self._write_some():
                pass
        except StorageError:  # of the seed's own records: it cannot go on without them
            raise
        except Exception as error:  # noqa: BLE001 - whatever a tracker's library raises: the seed goes on
            self._warn(error)
            with suppress(Exception):
                await self._end("")
            return RETRY_S
        self._last_warning = ""
        return self._trackers.every_s

    async def _write_some(self) -> bool:
        """Write the next rows. False if there are no more of them now."""
        controller, stopping = self._controller, self._trackers.stopping.is_set()
        ended = "" if controller.live else controller.core.state  # read before the rows
        late = math.inf if stopping and ended else self._seed.world.clock.wall() - GAP_S
        before, rows = await self._seed.store.call(rows_after, controller.id, self._cursor, late)
        if before != self._cursor:
            await self._end("")
            self._cursor = before
        if rows:
            columns = [(name, _NAMES.get(name, name)) for name in _COLUMNS]
            points = [
                Point(row.step, row.wall, _drop_unknown({shown: getattr(row, name) for name, shown in columns}))
                for row in rows
            ]
            peers, serving = self._seed.overview.peer_infos(), self._seed.overview.serving_infos()
            points[-1].values.update(figures_of(self._seed.jobs.info(controller), peers, serving))
            writer = await self._begin()
            await self._thread.submit(lambda: writer.write(points))
            generation = max(before.generation, *(row.generation or 0 for row in rows))
            self._cursor = Cursor(rows[-1].step, generation, before.run)
            await controller.save_cursor(self._name, self._cursor)
        elif ended and (before.step >= controller.core.known_step or (controller.record.finished_at or 0) < late):
            if before.step:
                await self._begin()
            await self._end(ended)
            self._cursor = before._replace(ended=True)
            await controller.save_cursor(self._name, self._cursor)
        return bool(rows)

    async def _begin(self) -> Writer:
        if self._writer is None:
            name, profile, environ = self._name, self._profile, self._trackers.environ
            check(name, profile, environ)
            plugin = partial(plugins.make, f"trackers:{name}", Writer, profile.plugins.settings_of(name))
            make: Callable[[Track, Mapping[str, str]], Writer] = self._trackers.writers.get(name, plugin)
            self._writer = await self._thread.submit(partial(make, profile.track, environ))
            await self._thread.submit(partial(self._writer.begin, self._run()))
        return self._writer

    def _run(self) -> TrackedRun:
        record, number = self._controller.record, self._cursor.run
        root = self._trackers.directory / self._profile.track.directory  # stays in it: see ``configs.schema``
        return TrackedRun(
            id=record.id if number == 1 else f"{record.id}-{number}",
            job=record.id,
            name=record.name if number == 1 else f"{record.name} ({number})",
            tags={"strategy": record.strategy, "profile": Path(record.profile).stem[:64]},
            config=self._profile.model_dump(),
            after_step=self._cursor.step,
            directory=root / f"{re.sub(r'[^A-Za-z0-9_-]', '_', record.name)}-{record.id}",
            wall=self._seed.world.clock.wall(),
        )

    async def _end(self, state: str) -> None:
        if (writer := self._writer) is not None:
            self._writer = None
            await self._thread.submit(lambda: writer.end(state))

    def _warn(self, error: Exception) -> None:
        """Note why nothing is written, once for each reason in a row, without keys."""
        text, remedy = f"{type(error).__name__}: {error}", "the rows are kept, and written when it works again"
        if isinstance(error, P2PTrainError):
            text, remedy = error.message, error.remedy or remedy
        for name in KEYS:
            if value := self._trackers.environ.get(name):
                text = text.replace(value, f"({name})").replace(repr(value)[1:-1], f"({name})")
        if text != self._last_warning:
            self._last_warning = text
            what = f"job {self._controller.record.name} is not written to {self._name}: {text}; {remedy}"
            self._seed.announcements.note("warning", "track", what, "", self._controller.id)
