"""Measurements of the links between workers: the seed asks workers to measure, and keeps the results for a while.

- A ready worker measures its links to the other workers of its job before the job takes it in. This takes ``START_S``
  at most, so that missing measurements do not hold up a view.
- When a view has begun, its members measure missing or old links, one member after the other. The results serve the
  next view; they do not end the present one.
- Answers are checked: a worker may report only the peers that it was asked for, with plausible numbers.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from itertools import permutations
from typing import Annotated, Any

from p2ptrain.core.background import start_in
from p2ptrain.core.errors import P2PTrainError, ProtocolError
from p2ptrain.core.world import Clock
from ring.planning.measurements import LinkQuality, Links
from roles.seed.peers import ConnectedPeer
from wire.schema import Bound, Declared, Id, instance_untrusted

START_S = 2.0
"""Longest wait of a job's start for measurements."""
ANSWER_S = 0.2
"""Part of a request's timeout that is left for the answer's way back."""
FRESH_S = 300.0
"""Older measurements are repeated after the next view."""
MAX_AT_ONCE = 16
"""Limit of peers in one request. Workers accept no more."""
MAX_PAIRS = 128 * 128

CAPABILITY = "measures"
"""Capability in the ``Hello`` of a worker that can measure links."""


class LinkTable:
    """The newest measurement of each link, for ``MAX_PAIRS`` pairs at most. Pure. ``known``: (from, to) → quality;
    replaced on a change, never mutated. ``changes`` grows whenever it is replaced."""

    def __init__(self) -> None:
        self.known: Links = {}
        self.changes = 0
        self._at: dict[tuple[str, str], float] = {}  # the oldest first

    def put(self, origin: str, found: Mapping[str, LinkQuality], now: float) -> None:
        known = dict(self.known)
        for target, quality in found.items():
            known[origin, target] = quality
            self._at.pop((origin, target), None)
            self._at[origin, target] = now
        while len(known) > MAX_PAIRS:
            oldest = next(iter(self._at))
            del self._at[oldest], known[oldest]
        self.known = known
        self.changes += 1

    def forget(self, ends: Collection[str]) -> None:
        """Forget the measurements between two peers: their link takes another path now."""
        old = self._at.keys() & set(permutations(ends))
        self.known = {pair: quality for pair, quality in self.known.items() if pair not in old}
        self._at = {pair: at for pair, at in self._at.items() if pair not in old}
        self.changes += bool(old)

    def to_measure(self, origin: str, others: Collection[str], now: float) -> list[str]:
        """The peers to which ``origin`` should measure its link: unknown links first, then the oldest."""
        measured_at = {other: self._at.get((origin, other), -math.inf) for other in others if other != origin}
        stale = [other for other, at in measured_at.items() if now - at > FRESH_S]
        return sorted(stale, key=lambda other: (measured_at[other], other))


class Survey:
    """Requests measurements from workers."""

    def __init__(self, clock: Clock, peers: Mapping[str, ConnectedPeer]) -> None:
        self.table = LinkTable()
        self._clock, self._peers = clock, peers
        self._tasks: asyncio.TaskGroup | None = None
        self._waiting: dict[str, asyncio.Task[None]] = {}  # peer id → measurements before its job takes it in
        self._later: dict[str, asyncio.Task[None]] = {}  # job → measurements during its view

    def start(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks

    def measure_before(self, peer: ConnectedPeer, others: Collection[str], then: Callable[[], object]) -> bool:
        """Measure from ``peer`` to ``others``, then call ``then``, at the latest after ``START_S``; never after
        ``drop``. Returns False, and does not call ``then``, if there is nothing to measure."""
        to_measure = self._peers_to_measure(peer, others)
        if not to_measure:
            return False

        async def measure() -> None:
            await self._ask(peer, to_measure[:MAX_AT_ONCE], START_S)
            del self._waiting[peer.id]
            then()

        if task := self._start(measure(), f"measure {peer.id}"):
            self._waiting[peer.id] = task
        return task is not None

    def measure_all_before(self, peer_ids: Sequence[str], then: Callable[[], object]) -> None:
        """Measure all links between these peers, each from one side, then call ``then``, at most ``START_S`` later."""

        async def measure() -> None:
            await self.measure_among(peer_ids)
            then()

        self._start(measure(), "measure for a plan")

    async def measure_among(self, peer_ids: Sequence[str]) -> None:
        workers = [peer for peer_id in sorted(peer_ids) if (peer := self._peers.get(peer_id)) is not None]
        requests = []
        for index, peer in enumerate(workers):
            if to_measure := self._peers_to_measure(peer, [other.id for other in workers[index + 1 :]]):
                requests.append(self._ask(peer, to_measure[:MAX_AT_ONCE], START_S))
        await asyncio.gather(*requests)

    def drop(self, peer_id: str) -> None:
        """Cancel the measurements of ``measure_before`` for a peer that left, reported again, or was assigned anew."""
        if task := self._waiting.pop(peer_id, None):
            task.cancel()

    def view_began(self, job: str, members: Sequence[str]) -> None:
        """Measure missing or old links while the ring runs."""
        if before := self._later.pop(job, None):
            before.cancel()
        if len(members) > 1 and (task := self._start(self._measure_later(job, members), f"measure for {job}")):
            self._later[job] = task

    async def _measure_later(self, job: str, members: Sequence[str]) -> None:
        for peer_id, right in zip(members, [*members[1:], *members[:1]], strict=True):
            # Of a ring that is too large for the table only its own links are measured.
            others = members if len(members) ** 2 <= MAX_PAIRS else [right]
            peer = self._peers.get(peer_id)
            to_measure = self._peers_to_measure(peer, others) if peer is not None else []
            for first in range(0, len(to_measure), MAX_AT_ONCE):
                if peer is not None and self._peers.get(peer_id) is peer:
                    # 20 s: enough for 16 links over a satellite while the ring runs.
                    await self._ask(peer, to_measure[first : first + MAX_AT_ONCE], 20.0)
        del self._later[job]

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None] | None:
        assert self._tasks is not None
        return start_in(self._tasks, work, name)

    def _peers_to_measure(self, peer: ConnectedPeer, others: Collection[str]) -> list[ConnectedPeer]:
        if peer.hello.capabilities.get(CAPABILITY) is not True:
            return []
        here = [other for other in others if other in self._peers]
        return [self._peers[other] for other in self.table.to_measure(peer.id, here, self._clock.now())]

    async def _ask(self, peer: ConnectedPeer, others: Sequence[ConnectedPeer], timeout_s: float) -> None:
        peers = [{"peer": other.id, "host": other.host, "port": other.port} for other in others]
        params = {"peers": peers, "deadline_s": timeout_s - ANSWER_S}
        with suppress(P2PTrainError):
            result = await peer.ask("links.measure", params, timeout_s=timeout_s)
            self.table.put(peer.id, measured_untrusted(result, {other.id for other in others}), self._clock.now())


class MeasuredLink(Declared):
    peer: Id
    latency_s: Annotated[float, Bound(0, 60)]
    bandwidth_bps: Annotated[float, Bound(1e2, 1e14)] | None


class MeasuredLinks(Declared):
    """A worker's answer to ``links.measure``."""

    links: Annotated[list[MeasuredLink], Bound(0, MAX_AT_ONCE)]


def measured_untrusted(result: dict[str, Any], asked: Collection[str]) -> dict[str, LinkQuality]:
    """Parse a worker's answer: peer id → quality of the link to it. Raises ``ProtocolError`` if it is invalid."""
    links = instance_untrusted(MeasuredLinks, result, lenient=True).links
    found = {link.peer: LinkQuality(link.latency_s, link.bandwidth_bps) for link in links}
    if len(found) < len(links) or not found.keys() <= set(asked):
        raise ProtocolError("a measured link was not requested, or is repeated")
    return found
