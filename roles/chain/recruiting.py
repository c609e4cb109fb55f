"""A crew kept up to date for a chain that is used for long: workers that come later become spares, and a chain that
lacks a stage goes on when somebody can hold it.

The seed is asked who is there now and then, more often while a stage is lacking. Who is not connected is dialled, side
by side, so that one that cannot be reached holds up none; who refuses is left in peace for longer and longer. While a
stage is lacking, those that hold none are asked again what memory they have.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from p2ptrain.core.errors import P2PTrainError
from roles.background import Background
from roles.chain.around import WorkerAt
from roles.chain.client import Chain
from roles.chain.peer import Peer
from roles.chain.plan import Ask, workers_of

LOOK_S = 5.0
"""Between two looks at who is there."""
LACK_S = 0.5
"""The same while a stage is lacking."""
GATHER_S = 0.5
"""Whoever is ready within this time of each other is told of together: two stages then go to two of them."""
AGAIN_S, MOST_AGAIN_S = 1.0, 60.0
"""Until a worker that could not be used is tried again; doubled each time."""
_NAMED = 3


@dataclass(slots=True)
class _Refused:
    """A worker that could not be used: where it was, why, and when it is tried again."""

    worker: WorkerAt
    reason: str
    wait_s: float
    due: float


class Recruiting:
    """See the module's docstring.

    Args:
        ask: of the seed, as of ``roles.chain.plan.workers_of``. Where it fails nobody is new.
    """

    def __init__(self, chain: Chain, ask: Ask) -> None:
        self._chain, self._crew, self._ask = chain, chain.crew, ask
        self._now = chain.around.world.clock.now
        self._dialling: dict[str, asyncio.Task[None]] = {}
        self._asked: dict[str, tuple[str, float]] = {}  # who is dialled: its name, and since when
        self._found: list[Peer] = []
        self._refused: dict[str, _Refused] = {}
        self._lacks = asyncio.Event()
        self._tasks = Background()
        chain.recruits, chain.coming, chain.on_lack = True, self.coming, self._lacks.set

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                await self._look()
                await self._pause(LACK_S if self._chain.lacking else LOOK_S)
        finally:
            self._chain.recruits, self._chain.coming = False, lambda: ""
            await self._tasks.stop()

    def coming(self) -> str:
        """Who is there and holds nothing yet, and what is under way with it; empty where nobody is. One that has just
        started may answer late: it loads what it computes with, and measures itself."""
        now = self._now()
        told = [f"{name} is there, and has been asked for {now - since:.0f} s" for name, since in self._asked.values()]
        told += [
            f"{refused.worker.name} cannot be used yet ({refused.reason}), and is tried again"
            for id, refused in self._refused.items()
            if id not in self._asked and id not in self._crew.peers
        ]
        return "; ".join(told[:_NAMED])

    async def _pause(self, seconds: float) -> None:
        self._lacks.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._lacks.wait()
        except TimeoutError:
            return

    async def _look(self) -> None:
        try:
            workers = await workers_of(self._ask)
        except P2PTrainError:  # the seed is away: whoever it told of may be there all the same
            workers = [peer.worker for peer in self._crew.peers.values() if peer.lost]
            workers += [refused.worker for refused in self._refused.values() if refused.worker not in workers]
        there = {worker.peer_id for worker in workers}
        self._refused = {id: refused for id, refused in self._refused.items() if id in there}
        for worker in workers:
            if self._is_wanted(worker):
                task = self._tasks.start(self._dial(worker), f"dial {worker.name}")
                self._dialling[worker.peer_id] = task
        if self._chain.lacking:
            for peer in list(self._crew.peers.values()):
                if self._may_have_room(peer):
                    self._dialling[peer.worker.peer_id] = self._tasks.start(self._renew(peer), f"ask {peer.name}")
        if self._dialling:
            await asyncio.wait(self._dialling.values(), timeout=GATHER_S)
        found, self._found = self._found, []
        if found:
            self._chain.recruit(found)

    def _is_wanted(self, worker: WorkerAt) -> bool:
        """Whether it is to be dialled now."""
        id = worker.peer_id
        peer, refused = self._crew.peers.get(id), self._refused.get(id)
        if id in self._dialling or (peer is not None and not peer.lost):
            return False
        return refused is None or refused.worker != worker or self._now() >= refused.due

    def _may_have_room(self, peer: Peer) -> bool:
        """Whether a peer that holds no stage is to be asked again what it has."""
        return not peer.lost and peer.worker.peer_id not in self._dialling and not self._chain.held_by(peer)

    async def _dial(self, worker: WorkerAt) -> None:
        if self._chain.lacking and worker.peer_id not in self._refused:
            self._chain.around.notify("info", "recruit", f"{worker.name} is there: it is asked what it can hold")
        self._asked[worker.peer_id] = worker.name, self._now()
        try:
            peer = await self._crew.admit(worker)
        except P2PTrainError as problem:
            self._later(worker, problem.message)
        else:
            self._refused.pop(worker.peer_id, None)
            self._chain.around.notify("info", "spare", f"{worker.name} is there, and may hold a stage")
            self._found.append(peer)
        finally:
            del self._dialling[worker.peer_id], self._asked[worker.peer_id]

    async def _renew(self, peer: Peer) -> None:
        id = peer.worker.peer_id
        before, refused = self._crew.offers[id], self._refused.get(id)
        try:
            offer = await self._crew.renew(peer)
        except P2PTrainError:
            return  # its end is told otherwise
        else:
            # Without more memory it is tried all the same, now and then: what kept it from loading may be over.
            if offer.memory_bytes > before.memory_bytes or refused is None or self._now() >= refused.due:
                self._later(peer.worker, "it has no room")
                self._found.append(peer)
        finally:
            del self._dialling[id]

    def _later(self, worker: WorkerAt, reason: str) -> None:
        before = self._refused.get(worker.peer_id)
        wait_s = AGAIN_S if before is None or before.worker != worker else min(2 * before.wait_s, MOST_AGAIN_S)
        self._refused[worker.peer_id] = _Refused(worker, reason, wait_s, self._now() + wait_s)
