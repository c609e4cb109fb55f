"""The sides of ``bench speculate``, each told what to do by orders: in a member's process, or here on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from p2ptrain.cli.bench import speculated, timed_chain
from p2ptrain.cli.bench.members import Answer, Interrupted
from p2ptrain.cli.bench.place import Place, in_memory
from wire.memory import MemoryNetwork

if TYPE_CHECKING:
    from p2ptrain.cli.bench.speculated_exact import Exactly


class Sides(Protocol):
    """What ``Members`` is to who measures."""

    def __len__(self) -> int: ...

    async def all(self, do: str, *, seconds: float = 0.0, **arguments: Any) -> list[Answer]: ...


Start = Callable[[int], AbstractAsyncContextManager[Sides]]
"""So many sides, that are there until the block ends."""


class Side:
    """Whatever it is told to be. ``rank``: its number among those that are started with it."""

    def __init__(self, rank: int, place: Place) -> None:
        self._rank, self._place = rank, place
        self._is: speculated.DrafterSide | speculated.VerifierSide | timed_chain.StageSide | Exactly | None = None

    async def carry_out(self, part: str, arguments: dict[str, Any]) -> Answer:
        """``be drafter``, ``be stage``, ``be verifier`` and ``be exact`` open a side, the last one both; ``assisted``
        needs none; others are its methods. Raises ``P2PTrainError``."""
        match part:
            case "assisted":
                return await speculated.assisted(**arguments)
            case "be drafter":
                self._is = speculated.DrafterSide(self._place)
            case "be stage":
                self._is, arguments["number"] = timed_chain.StageSide(self._place), self._rank
            case "be verifier":
                self._is = speculated.VerifierSide(self._place)
            case "be exact":
                from p2ptrain.cli.bench.speculated_exact import Exactly

                self._is = Exactly()
        does: Callable[..., Awaitable[Answer]] = getattr(self._is, "open" if part.startswith("be ") else part)
        return await does(**arguments)


class _Here:
    """Sides on the hosts of one network. ``stop``: another loop's; it is looked at before each order."""

    def __init__(self, sides: Sequence[Side], stop: asyncio.Event) -> None:
        self._sides, self._stop = sides, stop

    def __len__(self) -> int:
        return len(self._sides)

    async def all(self, do: str, *, seconds: float = 0.0, **arguments: Any) -> list[Answer]:
        """As of ``Members``. Raises ``P2PTrainError``, ``Interrupted``."""
        if self._stop.is_set():
            raise Interrupted
        part = arguments.pop("part")
        return [await side.carry_out(part, dict(arguments)) for side in self._sides]


def here(stop: asyncio.Event) -> Start:
    """On virtual time; their network is one."""
    network, numbers = MemoryNetwork(), count(1)

    @asynccontextmanager
    async def start(sides: int) -> AsyncIterator[Sides]:
        hosts = [f"host-{next(numbers)}" for _ in range(sides)]
        try:
            yield _Here([Side(rank, in_memory(network, host)) for rank, host in enumerate(hosts)], stop)
        finally:
            for host in hosts:
                network.crash(host)

    return start
