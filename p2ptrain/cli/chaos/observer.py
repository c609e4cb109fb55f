"""What a seed tells of one job, kept with the time of its arrival, across restarts of the seed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from p2ptrain.cli.chaos.judge import Row, Seen
from p2ptrain.core.errors import DeadlineExceeded, P2PTrainError
from wire.client import SeedClient
from wire.records import FINISHED_STATES, CheckpointInfo, EventInfo, JobInfo, MetricRow, PeerInfo

AGAIN_S = 0.1
"""Between two tries to reach a seed that is down: what is measured after its return is as exact as that."""


@dataclass(frozen=True, slots=True)
class Told:
    """A line of the diary, and when it arrived here (monotonic)."""

    at_s: float
    event: EventInfo


class Observer:
    """Follows a job.

    Args:
        connect: opens a connection of an operator.

    Attributes:
        rows, views, told: in order of arrival; a row that is told again is not kept again.
        metrics: of each step, as it was told last.
        saved: by id.
        peers: by name, as the present connection has told.
        checkpoints: step → names of the peers that hold one.
        first_rtt_ms: the first round trip that was told of each worker's connection: most likely the one that the seed
            measured as it joined, from which its deadlines follow. Later ones are the worker's own.
    """

    def __init__(self, connect: Callable[[], Awaitable[SeedClient]]) -> None:
        self.job: JobInfo | None = None
        self.rows: list[Row] = []
        self.views: list[Seen] = []
        self.told: list[Told] = []
        self.metrics: dict[int, MetricRow] = {}
        self.saved: dict[str, CheckpointInfo] = {}
        self.peers: dict[str, PeerInfo] = {}
        self.checkpoints: dict[int, set[str]] = {}
        self.names: dict[str, str] = {}
        self.first_rtt_ms: dict[tuple[str, float], float] = {}
        self._connect = connect
        self._client: SeedClient | None = None
        self._job_id = ""
        self._seen_rows: set[tuple[int, int]] = set()
        self._last_event = 0
        self._news = asyncio.Event()

    # --------------------------------------------------------------------------------------------------- what is known

    @property
    def step(self) -> int:
        return self.rows[-1].step if self.rows else 0

    @property
    def generation(self) -> int:
        return self.job.generation if self.job else 0

    @property
    def members(self) -> tuple[str, ...]:
        """Ids of a running view, in rank order; empty while there is none."""
        return tuple(self.job.members) if self.job and self.job.state == "running" else ()

    @property
    def finished(self) -> bool:
        return self.job is not None and self.job.state in FINISHED_STATES

    def id_of(self, name: str) -> str:
        return next((peer for peer, known in self.names.items() if known == name), "")

    async def until(self, test: Callable[[], bool], timeout_s: float) -> bool:
        """Whether it became true in time. Looked at whenever something is told."""
        try:
            async with asyncio.timeout(timeout_s):
                while not test():
                    await self._news.wait()
        except TimeoutError:
            return test()
        return True

    def wake(self) -> None:
        """Have all who wait look again."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """A request over the present connection. Raises ``P2PTrainError``, ``DeadlineExceeded`` where there is none."""
        if self._client is None:
            raise DeadlineExceeded("the seed is away")
        return await self._client.request(method, params)

    # -------------------------------------------------------------------------------------------------------- its task

    async def run(self, job: str) -> None:
        """Follow ``job`` until cancelled."""
        self._job_id = job
        while True:
            try:
                client = await self._connect()
            except P2PTrainError:
                await asyncio.sleep(AGAIN_S)
                continue
            self._client = client
            try:
                await client.request("subscribe")
                async for update in client.updates():
                    self._take(update.topic, update.items, time.monotonic())
                    self.wake()
            except P2PTrainError:
                await asyncio.sleep(AGAIN_S)
            finally:
                self._client = None
                self.peers.clear()
                await client.close()

    def _take(self, topic: str, items: list[dict[str, Any]], now: float) -> None:
        for item in items:
            match topic:
                case "jobs" if item.get("id") == self._job_id:
                    self._take_job(JobInfo.from_map_untrusted(item), now)
                case "metrics" if item.get("job") == self._job_id:
                    self._take_row(MetricRow.from_map_untrusted(item), now)
                case "events":
                    event = EventInfo.from_map_untrusted(item)
                    if event.id > self._last_event:
                        self._last_event = event.id
                        self.told.append(Told(now, event))
                case "peers":
                    peer = PeerInfo.from_map_untrusted(item)
                    self.peers[peer.name], self.names[peer.id] = peer, peer.name
                    self.first_rtt_ms.setdefault((peer.id, peer.joined_at), peer.rtt_ms or 0.0)
                case "checkpoints" if item.get("job") == self._job_id:
                    saved = CheckpointInfo.from_map_untrusted(item)
                    self.saved.setdefault(saved.id, saved)  # what came first has the time of its end
                    self.checkpoints.setdefault(saved.step, set()).add(saved.peer_name)

    def _take_job(self, job: JobInfo, now: float) -> None:
        self.job = job
        members = tuple(job.members)
        new = not self.views or (self.views[-1].generation, self.views[-1].members) != (job.generation, members)
        if job.state == "running" and members and new:
            self.views.append(Seen(now, job.generation, members))

    def _take_row(self, row: MetricRow, now: float) -> None:
        self.metrics[row.step] = row
        key = (row.step, row.generation or 0)
        if key not in self._seen_rows:
            self._seen_rows.add(key)
            self.rows.append(Row(now, *key))
