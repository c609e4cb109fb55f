"""Feeds the store from the seed, over one operator connection that is dialled again when it ends.

Order on every connection: ``subscribe`` first, then the lists, then the updates that queued up meanwhile. So no change
is missed, and a newer update always follows a stale one. Histories are fetched page by page beside the live updates;
``model.Series`` takes rows in any order.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any, Protocol

from p2ptrain.core.errors import ConnectionLost, P2PTrainError, ProtocolError, Refused, first_error
from p2ptrain.core.texts import printable
from p2ptrain.core.world import LoopClock, Network
from tui.model import Link, Phase, Store
from wire.client import SeedClient

CONNECT_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 10.0
PING_S = 5.0
"""Interval of requests that show whether a silent seed is still there."""
PAGE = 200
FIRST_RETRY_S = 0.5
LONGEST_RETRY_S = 10.0


class Source(Protocol):
    store: Store
    address: str

    async def run(self) -> None:
        """Feed the store until cancelled."""

    async def request(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """Ask the seed to do something. Raises ``Refused``, ``ConnectionLost`` or ``DeadlineExceeded``."""

    def watch(self, job: str) -> None:
        """Fetch the history of this job."""


class SeedAccess(Protocol):
    """How to reach the seed, and how to keep the right to do so."""

    async def connect(self) -> SeedClient:
        """Dial the seed. Raises ``P2PTrainError``."""

    async def keep_fresh(self, client: SeedClient) -> None:
        """Renew over this connection the credentials for the next one, until cancelled. Raises ``P2PTrainError``."""


class PlainAccess:
    """Access without encryption, on a network without authentication."""

    def __init__(self, network: Network, host: str, port: int) -> None:
        self._network, self._host, self._port = network, host, port

    async def connect(self) -> SeedClient:
        return await SeedClient.connect(self._network, self._host, self._port, name="tui", timeout_s=CONNECT_TIMEOUT_S)

    async def keep_fresh(self, client: SeedClient) -> None:
        await client.connection.closed.wait()


def backoff_s(attempt: int) -> float:
    return float(min(LONGEST_RETRY_S, FIRST_RETRY_S * 2 ** min(attempt, 16)))


class SeedSource:
    """The real source, owned by the task that calls ``run``. ``address``: of the seed, for messages."""

    def __init__(self, way: SeedAccess, address: str) -> None:
        self.store = Store()
        self.address = address
        self._way = way
        self._clock = LoopClock()
        self._client: SeedClient | None = None
        self._watched = ""
        self._watch_changed = asyncio.Event()
        self._synced: set[str] = set()  # jobs whose history this connection has fetched
        self._resume: dict[str, tuple[int, int]] = {}  # job → its generation, and the step to continue from

    def watch(self, job: str) -> None:
        if job == self._watched:
            return
        if job not in self.store.series:  # never fetched, or dropped to make room for others
            self._synced.discard(job)
            self._resume.pop(job, None)
        self._watched = job
        self._watch_changed.set()

    async def request(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        if self._client is None or self.store.link.phase is not Phase.LIVE:
            raise ConnectionLost(
                f"there is no connection to the seed at {self.address}",
                remedy="it is dialled again automatically; try again when the header says live",
            )
        return await self._ask(method, **params)

    async def run(self) -> None:
        self.store.set_link(Link(Phase.CONNECTING, since=self._clock.now()))
        attempt = 0
        while True:
            problem = await self._one_connection()
            now = self._clock.now()
            if self.store.link.phase is Phase.LIVE:
                attempt = 0
            delay_s = backoff_s(attempt)
            attempt += 1
            self.store.lost(problem, now, now + delay_s)
            await asyncio.sleep(delay_s)
            self.store.set_link(dataclasses.replace(self.store.link, retry_at=None))

    async def _one_connection(self) -> P2PTrainError:
        try:
            client = await self._way.connect()
        except P2PTrainError as error:
            return error
        self._client = client
        problem: P2PTrainError = ConnectionLost(f"the seed at {self.address} ended the connection")
        try:
            await self._ask("subscribe")
            await self._load_lists()
            self.store.set_link(Link(Phase.LIVE, since=self._clock.now(), rtt_ms=self.store.link.rtt_ms))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow(client))
                tasks.create_task(self._keep_asking())
                tasks.create_task(self._load_events())
                tasks.create_task(self._load_histories())
                tasks.create_task(self._way.keep_fresh(client))
        except* P2PTrainError as errors:
            problem = first_error(errors)
        finally:
            self._client = None
            self._note_how_far()
            await client.close()
        return problem

    # ------------------------------------------------------------------------------------------------------- updates

    async def _follow(self, client: SeedClient) -> None:
        async for update in client.updates():
            self._apply(update.topic, update.items)
        raise ConnectionLost(f"the seed at {self.address} ended the updates")

    def _apply(self, topic: str, items: list[Any], *, whole: bool = False) -> None:
        """Apply an update. A malformed item is counted and reported; the other items are still worth showing."""
        try:
            (self.store.replace if whole else self.store.apply)(topic, items, self._clock.now())
        except ProtocolError as error:
            self._note(error)

    def _note(self, error: P2PTrainError) -> None:
        link = dataclasses.replace(self.store.link, problem=printable(error.message), remedy=printable(error.remedy))
        self.store.set_link(link)

    # --------------------------------------------------------------------------------------------- requests of the TUI

    async def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        assert self._client is not None
        return await self._client.request(method, params, timeout_s=REQUEST_TIMEOUT_S)

    async def _page(self, method: str, key: str, **params: Any) -> list[Any]:
        items = (await self._ask(method, **params)).get(key)
        if not isinstance(items, list):
            raise ProtocolError(f"the answer to {method} has no list of {key}")
        return items

    async def _ask_cluster(self) -> None:
        asked_at = self._clock.now()
        info = await self._ask("cluster.info")
        rtt_ms = (self._clock.now() - asked_at) * 1000
        self._apply("cluster", [info.get("cluster", info)])
        self.store.set_link(dataclasses.replace(self.store.link, rtt_ms=rtt_ms))

    async def _keep_asking(self) -> None:
        while True:
            await asyncio.sleep(PING_S)
            await self._ask_cluster()

    async def _load_lists(self) -> None:
        await self._ask_cluster()
        for topic in ("peers", "jobs", "checkpoints"):
            self._apply(topic, await self._page(f"{topic}.list", topic), whole=True)
        for topic in ("parts", "serving"):
            try:
                self._apply(topic, await self._page(f"{topic}.list", topic), whole=True)
            except Refused as error:  # an older seed has no such list
                self._note(error)

    async def _load_events(self) -> None:
        async for _ in self._pages("events.list", "events", "id", "after_id", max(self.store.events, default=0)):
            pass  # ``_pages`` applies each page

    async def _load_histories(self) -> None:
        while True:
            self._watch_changed.clear()
            if self._watched and self._watched not in self._synced:
                await self._load_history(self._watched)
            else:
                await self._watch_changed.wait()

    async def _load_history(self, job: str) -> None:
        generation, after = self._resume.get(job, (0, 0))
        known = self.store.jobs.get(job)
        if known is None or known.generation != generation:
            after = 0  # it may have been restored from a checkpoint meanwhile
        async for last in self._pages("metrics.history", "rows", "step", "after_step", after, job=job):
            self._resume[job] = (known.generation if known else 0, last)
        self._synced.add(job)

    async def _pages(
        self, method: str, items_key: str, place_key: str, after_key: str, after: int, **params: Any
    ) -> AsyncIterator[int]:
        topic = {"rows": "metrics"}.get(items_key, items_key)
        least = 1 if topic == "events" else PAGE  # of any page but the last; long events fill one sooner
        while True:
            try:
                items = await self._page(method, items_key, **params, **{after_key: after, "limit": PAGE})
            except Refused as error:
                self._note(error)
                return
            self._apply(topic, [{**params, **item} if isinstance(item, dict) else item for item in items])
            if len(items) < least:
                return
            places = [item.get(place_key) for item in items if isinstance(item, dict)]
            last = max((place for place in places if isinstance(place, int)), default=after)
            if last <= after:  # else it would be requested for ever
                raise ProtocolError(f"a page of {len(items)} items does not go beyond {place_key} {after}")
            after = last
            yield after

    def _note_how_far(self) -> None:
        for job in self._synced:
            if job in self.store.jobs and job in self.store.series:
                self._resume[job] = (self.store.jobs[job].generation, self.store.series[job].last_step)
        self._synced.clear()
        self._resume = {job: place for job, place in self._resume.items() if job in self.store.jobs}
