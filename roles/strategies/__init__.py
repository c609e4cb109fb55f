"""What happens between two commits of the step transaction. One file a strategy; a new one touches nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from p2ptrain.core.errors import ConfigError
from ring.session import RingSession
from roles.compute_thread import ComputeThread
from roles.engine import Applied, Engine


@dataclass(frozen=True, slots=True)
class Contribution:
    """What a member says of the reduced bytes: their digest (16 bytes) and its part of the squared gradient norm."""

    digest: bytes
    part: float


class Strategy(Protocol):
    """The three activities of a step. Each is cancelled when the ring breaks; only ``commit`` runs to its end.

    Attributes:
        progress: called after every piece of work, so that the heartbeat can tell a slow peer from a stuck one.
    """

    async def compute(self, step: int, first: int, count: int) -> None:
        """This member's share of step ``step``: micro-batches ``range(first, first + count)``."""
        ...

    async def reduce(self, session: RingSession, *, patience_s: float) -> Contribution:
        """Bring the members' contributions together; afterwards all hold the same bytes."""
        ...

    async def commit(self, step: int, square_sum: float) -> Applied:
        """Apply the reduced bytes. Must give the same bits on every member."""
        ...


Factory = Callable[[Engine, ComputeThread, Callable[[], None]], Strategy]


def strategy_named(name: str) -> Factory:
    """The factory of a strategy. Raises ``ConfigError`` where there is none of that name."""
    from roles.strategies.sync import SyncStrategy

    factories: dict[str, Factory] = {"sync": SyncStrategy}
    try:
        return factories[name]
    except KeyError:
        known = ", ".join(sorted(factories))
        raise ConfigError(f"unknown strategy {name!r} in [job]", remedy=f"this version knows: {known}") from None
