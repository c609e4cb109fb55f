"""Feeds the store from the seed, over one operator connection that is dialled again when it ends.

A seed tells a subscriber all its records, then its log, which is never empty, and then each change. Older events and
the history of the job in view are fetched beside that; ``model.Series`` takes rows in any order.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple

from p2ptrain.core.errors import ConnectionLost, P2PTrainError, ProtocolError, Refused, first_error
from p2ptrain.core.texts import printable
from p2ptrain.core.world import Clock, LoopClock
from tui.model import MAX_EVENTS, LinkPhase, RecordStore, SeedConnection
from wire.client import SeedClient

REQUEST_TIMEOUT_S = 10.0
PING_S = 5.0
"""Interval of requests that show whether a silent seed is still there."""
FIRST_RETRY_S = 0.5
LONGEST_RETRY_S = 10.0
Messages = list[dict[str, str]]  # role and content of each turn

Connect = Callable[[], AbstractAsyncContextManager[SeedClient]]
"""Opens an operator's connection to the seed. Raises ``P2PTrainError``."""


class OperatorActions(NamedTuple):
    """What the app does over connections of its own; each may raise ``P2PTrainError``."""

    profiles: Callable[[], dict[str, str]]  # those that ship, by name: a line about each
    create_job: Callable[[str, str], Awaitable[str]]  # name of one or "", a text with a path or overrides → id
    stream: Callable[[str, str, Messages], AsyncGenerator[str, None]]  # model, id of a verifier, → pieces


def backoff_s(attempt: int) -> float:
    return float(min(LONGEST_RETRY_S, FIRST_RETRY_S * 2 ** min(attempt, 16)))


class SeedSource:
    """Owned by the task that calls ``run``. ``address``: of the seed, for messages."""

    def __init__(self, connect: Connect, address: str, actions: OperatorActions) -> None:
        self.store = RecordStore()
        self.address, self.actions = address, actions
        self._connect = connect
        self.clock: Clock = LoopClock()
        self._client: SeedClient | None = None
        self._watched = ""
        self._watch_changed = asyncio.Event()
        self._synced: set[str] = set()  # jobs whose history this connection has fetched

    def watch(self, job: str) -> None:
        """Fetch the history of this job."""
        if job == self._watched:
            return
        if job not in self.store.series:  # never fetched, or dropped to make room for others
            self._synced.discard(job)
        self._watched = job
        self._watch_changed.set()

    async def request(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """Ask the seed to do something. Raises ``Refused``, ``ConnectionLost`` or ``DeadlineExceeded``."""
        if self._client is None or self.store.link.phase is not LinkPhase.LIVE:
            remedy = "it is dialled again automatically; try again when the header says live"
            raise ConnectionLost(f"there is no connection to the seed at {self.address}", remedy=remedy)
        return await self._client.request(method, params, timeout_s=75.0)  # it may verify a checkpoint

    async def run(self) -> None:
        """Feed the store until cancelled."""
        self.store.set_link(SeedConnection(LinkPhase.CONNECTING, since=self.clock.now()))
        attempt = 0
        while True:
            problem = await self._watch_until_lost()
            attempt = 0 if self.store.link.phase is LinkPhase.LIVE else attempt
            delay_s, now = backoff_s(attempt), self.clock.now()
            attempt += 1
            self.store.lost(problem, now, now + delay_s)
            await asyncio.sleep(delay_s)
            self.store.set_link(dataclasses.replace(self.store.link, retry_at=None))

    async def _watch_until_lost(self) -> P2PTrainError:
        problem: P2PTrainError = ConnectionLost(f"the seed at {self.address} ended the connection")
        known = max(self.store.events, default=0)
        try:
            async with self._connect() as client:
                self._client = client
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._follow(client))
                    tasks.create_task(self._keep_asking(client))
                    tasks.create_task(self._load_events(client, known))
                    tasks.create_task(self._load_histories(client))
        except* P2PTrainError as errors:
            problem = first_error(errors)
        finally:
            self._client = None
            self._synced.clear()
        return problem

    async def _follow(self, client: SeedClient) -> None:
        await client.request("subscribe", timeout_s=REQUEST_TIMEOUT_S)
        self.store.begin()
        async for update in client.updates():
            try:
                self.store.apply(update.topic, update.items, self.clock.now())
            except ProtocolError as error:  # it is counted; the other items are still worth showing
                self._note(error)
            if update.topic == "events" and self.store.link.phase is not LinkPhase.LIVE:
                self.store.settle()
                rtt_ms = self.store.link.rtt_ms
                self.store.set_link(SeedConnection(LinkPhase.LIVE, since=self.clock.now(), rtt_ms=rtt_ms))

    def _note(self, error: P2PTrainError) -> None:
        link = dataclasses.replace(self.store.link, problem=printable(error.message), remedy=printable(error.remedy))
        self.store.set_link(link)

    async def _keep_asking(self, client: SeedClient) -> None:
        while True:
            asked_at = self.clock.now()
            await client.request("probe.clock", timeout_s=REQUEST_TIMEOUT_S)
            rtt_ms = (self.clock.now() - asked_at) * 1000
            self.store.set_link(dataclasses.replace(self.store.link, rtt_ms=rtt_ms))
            await asyncio.sleep(PING_S)

    async def _load_events(self, client: SeedClient, known: int) -> None:
        newest = max([event.id for event in await client.events(-1, 1)], default=0)
        async for event in client.all_events(max(known, newest - MAX_EVENTS)):
            self.store.take(event, self.clock.now())

    async def _load_histories(self, client: SeedClient) -> None:
        while True:
            self._watch_changed.clear()
            if self._watched and self._watched not in self._synced:
                await self._load_history(client, self._watched)
            else:
                await self._watch_changed.wait()

    async def _load_history(self, client: SeedClient, job: str) -> None:
        try:
            async for row in client.all_metrics(job):
                self.store.take(row, self.clock.now())
        except Refused as error:  # the job was forgotten
            self._note(error)
        self._synced.add(job)
