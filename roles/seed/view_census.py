"""Which view the members of a job are in, when the seed was restored from a backup that may lack the newest views.

The members report their view when they connect. The job decides nothing before all members of the newest view are here,
or ``SETTLE_S`` is over. Until then messages about its steps wait.
"""

from __future__ import annotations

import asyncio

from p2ptrain.core.errors import ProtocolError
from ring.view import View
from roles.seed.peers import PeerTable
from wire.job_messages import LedgerRows

SETTLE_S = 30.0
"""How long a restored seed waits for the members of a job: as long as they may be away from a running seed."""
MAX_EARLY_ROWS = 1024
"""Messages with ledger rows that wait for the end of the census."""


class ViewCensus:
    """The views that the members of one job report.

    Attributes:
        settled: set once the job goes on. It is set from the start unless the seed was restored.
        changed: set when a member connected, or reported its view.
    """

    def __init__(self, job: str, peers: PeerTable, *, minted_below: int, unsettled: bool) -> None:
        self.settled, self.changed = asyncio.Event(), asyncio.Event()
        self.early_rows: list[LedgerRows] = []
        self._job, self._peers, self._minted_below = job, peers, minted_below
        self._reported: dict[str, View] = {}
        if not unsettled:
            self.settled.set()

    @property
    def has_room(self) -> bool:
        """Whether ``early_rows`` may take another message."""
        return not self.settled.is_set() and len(self.early_rows) < MAX_EARLY_ROWS

    def report(self, peer_id: str, view: View) -> None:
        """Take in a view that an earlier term minted. Raises ``ProtocolError`` if no such view can exist."""
        if view.job != self._job or view.rank_of(peer_id) is None or view.generation > self._minted_below:
            raise ProtocolError(f"{peer_id} reported a view that the seed never minted: generation {view.generation}")
        self._reported[peer_id] = view
        self.changed.set()

    async def wait(self, known: View | None) -> View | None:
        """Wait until all members of the newest view are here, for ``SETTLE_S`` at most.

        Returns the newest view that the members reported; None if none is newer than ``known``, which is stored.
        """
        try:
            async with asyncio.timeout(SETTLE_S):
                while not self._is_complete(known):
                    await self.changed.wait()
                    self.changed.clear()
        except TimeoutError:
            pass
        return self.newest_view(known)

    def newest_view(self, known: View | None) -> View | None:
        reported = [view for peer_id, view in self._reported.items() if self._peers.in_job(peer_id, self._job)]
        newest = max(reported, key=lambda view: view.generation, default=None)
        return newest if newest is not None and newest.generation > (known.generation if known else 0) else None

    def _is_complete(self, known: View | None) -> bool:
        """A member that reports an older view was lost before the newest view was announced to it."""
        view, here = self.newest_view(known) or known, self._peers.of_job(self._job)
        return (
            view is not None
            and {member.peer_id for member in view.members} <= {peer.id for peer in here}
            and all(peer.hello.generation <= view.generation for peer in here)
        )
