"""What the seed knows of the links between workers: it asks them to measure, and keeps what they say for a while.

A worker that is ready is asked for the ways to the other workers of its job before it is let in, for ``START_S`` at
most: what is not known by then does not hold up a view. When a view has begun, its members are asked one after the
other for what is missing or old; that ends no ring, it is there for the next view. What a worker says is checked: it
speaks only of peers that it was asked for, in numbers that can be.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from p2ptrain.core.errors import P2PTrainError, ProtocolError
from p2ptrain.core.world import Clock
from ring.order import LinkQuality, Links
from roles.background import started_in
from roles.seed.peers import Link, host_seen_from

START_S = 2.0
"""A job's start waits no longer than this for measurements."""
ANSWER_S = 0.2
"""Of the time that a worker is waited for: its answer's way back."""
FRESH_S = 300.0
"""What is older is measured again, after the next view."""
MAX_AT_ONCE = 16
"""Peers in one request; a worker takes no more."""
MAX_PAIRS = 128 * 128
MIN_BPS, MAX_BPS = 1e2, 1e14

CAPABILITY = "measures"
"""In the ``Hello`` of a worker that can be asked."""


class LinkTable:
    """(from, to) → what was measured last, ``MAX_PAIRS`` at most. Pure; ``now`` is passed in.

    Attributes:
        known: replaced, never changed: whoever has it may keep it.
        changes: grows whenever ``known`` is another.
    """

    def __init__(self) -> None:
        self.known: Links = {}
        self.changes = 0
        self._at: dict[tuple[str, str], float] = {}  # the oldest first

    def put(self, here: str, found: Mapping[str, LinkQuality], now: float) -> None:
        known = dict(self.known)
        for there, link in found.items():
            known[here, there] = link
            self._at.pop((here, there), None)
            self._at[here, there] = now
        while len(known) > MAX_PAIRS:
            oldest = next(iter(self._at))
            del self._at[oldest], known[oldest]
        self.known = known
        self.changes += 1

    def wanted(self, here: str, others: Collection[str], now: float) -> list[str]:
        """To whom ``here`` should measure the way, what is not known at all first, then the older ones."""
        ages = {other: self._at.get((here, other), -math.inf) for other in others if other != here}
        stale = [other for other, at in ages.items() if now - at > FRESH_S]
        return sorted(stale, key=lambda other: (ages[other], (other, here) in self.known, other))


class Survey:
    """Asks, and waits for the answers. One for the seed.

    Args:
        links: the workers that are connected. changed: told of the peers whose links are known better now.
    """

    def __init__(self, clock: Clock, links: Mapping[str, Link], changed: Callable[[Collection[str]], None]) -> None:
        self.table = LinkTable()
        self._clock = clock
        self._links = links
        self._changed = changed
        self._tasks: asyncio.TaskGroup | None = None
        self._waiting: dict[str, asyncio.Task[None]] = {}  # peer id → the measurements before it is let in
        self._later: dict[str, asyncio.Task[None]] = {}  # job → those of its view

    def start(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks

    def before(self, link: Link, others: Collection[str], then: Callable[[], object]) -> bool:
        """Call ``then`` when the ways from ``link`` to ``others`` are measured, and ``START_S`` from now in any case;
        never after ``drop``. False where there is nothing to measure: then it is not called at all."""
        wanted = self._askable(link, others)
        if not wanted or self._tasks is None:
            return False

        async def measure() -> None:
            await self._ask(link, wanted[:MAX_AT_ONCE], START_S)
            del self._waiting[link.id]
            then()

        task = started_in(self._tasks, measure(), f"measure {link.id}")
        if task is not None:
            self._waiting[link.id] = task
        return task is not None

    def among(self, peer_ids: Sequence[str], then: Callable[[], object]) -> None:
        """Measure the ways between these, each from one side, and call ``then``: after ``START_S`` in any case."""
        task = None
        if self._tasks is not None:
            task = started_in(self._tasks, self.measure_among(peer_ids, then), "measure for a plan")
        if task is None:
            then()

    async def measure_among(self, peer_ids: Sequence[str], then: Callable[[], object]) -> None:
        here = [link for peer_id in sorted(peer_ids) if (link := self._links.get(peer_id)) is not None]
        asked = []
        for at, link in enumerate(here):
            wanted = self._askable(link, [other.id for other in here[at + 1 :]])
            if wanted:
                asked.append(self._ask(link, wanted[:MAX_AT_ONCE], START_S))
        await asyncio.gather(*asked)
        then()

    def drop(self, peer_id: str) -> None:
        """What it said is no longer so: it is gone, or says something else, or was told to begin anew."""
        task = self._waiting.pop(peer_id, None)
        if task is not None:
            task.cancel()

    def view_began(self, job: str, members: Sequence[str]) -> None:
        """Measure what is missing or old, while the ring runs."""
        before = self._later.pop(job, None)
        if before is not None:
            before.cancel()
        if self._tasks is not None and len(members) > 1:
            task = started_in(self._tasks, self._measure_later(job, members), f"measure for {job}")
            if task is not None:
                self._later[job] = task

    async def _measure_later(self, job: str, members: Sequence[str]) -> None:
        for peer_id in members:
            link = self._links.get(peer_id)
            wanted = self._askable(link, members) if link is not None else []
            for first in range(0, len(wanted), MAX_AT_ONCE):
                if link is not None and self._links.get(peer_id) is link:
                    # For a worker's measurements while a ring runs: 16 ways over a satellite.
                    await self._ask(link, wanted[first : first + MAX_AT_ONCE], 20.0)
        del self._later[job]

    def _askable(self, link: Link, others: Collection[str]) -> list[Link]:
        if link.hello.capabilities.get(CAPABILITY) is not True:
            return []
        here = [other for other in others if other in self._links]
        return [self._links[other] for other in self.table.wanted(link.id, here, self._clock.now())]

    async def _ask(self, link: Link, others: Sequence[Link], timeout_s: float) -> None:
        peers = [
            {"id": other.id, "host": host_seen_from(link.host, other.host), "port": other.port} for other in others
        ]
        params = {"peers": peers, "deadline_s": timeout_s - ANSWER_S}
        with suppress(P2PTrainError):
            result = await link.ask("links.measure", params, timeout_s=timeout_s)
            found = measured_untrusted(result, {other.id for other in others})
            self.table.put(link.id, found, self._clock.now())
            self._changed([link.id, *found])


def measured_untrusted(result: dict[str, Any], asked: Collection[str]) -> dict[str, LinkQuality]:
    """Peer id → what a worker says of the way to it. Raises ``ProtocolError`` where it says what cannot be."""
    links = result.get("links")
    if not isinstance(links, list) or len(links) > len(asked):
        raise ProtocolError("links.measure is answered by a list of links, one for each peer at most")
    found: dict[str, LinkQuality] = {}
    for item in links:
        if not isinstance(item, list) or len(item) != 3:
            raise ProtocolError("a link is a peer, a latency and a bandwidth")
        peer_id, latency_s, bandwidth_bps = item
        if not isinstance(peer_id, str) or peer_id not in asked or peer_id in found:
            raise ProtocolError("a link to a peer that was not asked for")
        if not _within(latency_s, 0, 60.0):
            raise ProtocolError("a latency that cannot be")
        if bandwidth_bps is not None and not _within(bandwidth_bps, MIN_BPS, MAX_BPS):
            raise ProtocolError("a bandwidth that cannot be")
        found[peer_id] = LinkQuality(latency_s, bandwidth_bps)
    return found


def _within(value: object, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
