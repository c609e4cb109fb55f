"""The diary: what a person should be able to read later, in the store and on the screens of who watches now."""

from __future__ import annotations

from collections import deque

from p2ptrain.core.errors import P2PTrainError, ProtocolError, Refused
from p2ptrain.core.world import Clock
from roles.seed.peers import clipped
from roles.seed.store import Records, Store
from roles.seed.strangers import Strangers
from roles.seed.updates import Board
from wire.address import format_address, is_loopback, told_of
from wire.records import EventInfo

MAX_KINDS_CHARS = 24
RECENT_EVENTS = 100
LEVELS = frozenset({"info", "warning", "error"})


class Diary:
    """See the module's docstring.

    Attributes:
        recent: the newest events, for who begins to watch.
    """

    def __init__(self, clock: Clock, store: Store, board: Board) -> None:
        self.recent: deque[EventInfo] = deque(maxlen=RECENT_EVENTS)
        self._clock, self._store, self._board = clock, store, board
        self._last_id = 0
        self._strangers = Strangers()

    async def load(self) -> None:
        """Go on where the store ends. Raises ``StorageError``."""
        self._last_id = await self._store.call(Records.last_event_id)
        self.recent.extend(await self._store.call(Records.events, self._last_id - RECENT_EVENTS, RECENT_EVENTS))

    def note(self, level: str, kind: str, text: str, peer: str = "", job: str = "") -> None:
        """Write it down, and show it to who watches."""
        self._last_id += 1
        level = level if level in LEVELS else "info"
        wall = self._clock.wall()
        event = EventInfo(self._last_id, wall, level, clipped(kind, MAX_KINDS_CHARS), clipped(text), peer, job)
        self._store.add(event)
        self.recent.append(event)
        self._board.add(event)

    def refused(self, problem: P2PTrainError, address: tuple[str, int]) -> None:
        """A stranger was refused, or sent nonsense."""
        if isinstance(problem, Refused | ProtocolError):
            reason = problem.message.replace(format_address(*address), "")  # the port is another one each time
            text = self._strangers.told(address[0], reason, told_of(address, problem.message), self._clock.now())
            # Commands on this machine ask in plain whether the seed is: no reason to warn anybody.
            asked = getattr(problem, "code", "") == "tls-required" and is_loopback(address[0])
            if text is not None:
                self.note("info" if asked else "warning", "refused", text, "", "")
