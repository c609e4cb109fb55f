"""A seed that leads, among others that may: how its term begins, and how it learns that it is over.

Before it leads, a seed asks all seeds that it ever knew (the seats in its store) whether one of them leads in a higher
term; while it leads it asks those that do not follow it again and again, so that two sides learn of one another soon
after they meet. It believes a seed only: over TLS its certificate says so. A worker that has seen a higher term is not
let in, and is a reason to ask at once; it refuses this seed itself (``roles.seed_link``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from p2ptrain.core.errors import P2PTrainError, ProtocolError, Refused, UserError
from p2ptrain.core.ids import is_id
from p2ptrain.core.world import World
from roles.seed.followers import SEATS_FACT, Followers, Seat, seats_of, seats_text, with_seat
from roles.seed.peers import check_numbers
from roles.seed.standby import CLUSTER_FACT, TERM_FACT, Marker
from roles.seed.store import SCHEMA_VERSION, Records, Store
from roles.seed.succession import SEATS, next_term
from wire.address import format_address, parse_address
from wire.handshake import RefusalCode, dial, local_hello
from wire.messages import MAX_TERM, Hello, Refuse

ASK_S = 5.0
"""Between two rounds of asking; each of the seeds may take as long to answer."""

Address = tuple[str, int]


class Deposed(UserError):
    """Another seed leads, in a higher term."""


@dataclass(frozen=True, slots=True)
class Rival:
    """A seed that leads."""

    term: int
    address: str

    def deposes(self) -> Deposed:
        text = f"this seed leads no more: the one at {self.address} does, since term {self.term}"
        return Deposed(text, remedy=f"let it follow that one: p2ptrain seed --standby {self.address}")


async def leading_among(world: World, places: Collection[Address], hello: Hello) -> Rival | None:
    """Who leads in the highest term above that of ``hello``, in the same cluster, of those that answer."""

    async def ask(place: Address, *, further: bool = True) -> Rival | None:
        try:
            connection, welcome = await dial(world.network, *place, hello, timeout_s=ASK_S, expect_role="seed")
        except Refused as refused:
            if refused.code == RefusalCode.STANDBY and further and refused.elsewhere:
                with suppress(UserError):
                    return await ask(parse_address(refused.elsewhere[0]), further=False)
            return None
        except P2PTrainError:
            return None
        connection.abort()
        if welcome.cluster_id != hello.cluster or not hello.term < welcome.term < MAX_TERM:
            return None
        return Rival(welcome.term, format_address(*place))

    found = await asyncio.gather(*(ask(place) for place in places))
    return max((rival for rival in found if rival), key=lambda rival: rival.term, default=None)


# ------------------------------------------------------------------------------------------------- a term that begins


def term_and_seats(records: Records) -> tuple[int, list[Seat]]:
    """On the store's thread. Raises ``StorageError``."""
    return int(records.known_fact(TERM_FACT) or 0), seats_of(records.known_fact(SEATS_FACT))


async def begin(world: World, store: Store, state_dir: Path) -> int:
    """Be sure that this store may lead; a standby's begins a term. Returns the term.

    Raises:
        Deposed: another one leads. UserError: it was a standby whose copy was never whole. StorageError.
    """
    marker = Marker.load(world.disk, state_dir)
    term, seats = await store.call(term_and_seats)
    cluster = await store.call(Records.known_fact, CLUSTER_FACT)
    was_standby = marker is not None and marker.following
    if was_standby and not cluster:
        text = f"{state_dir} is that of a standby which never had a whole copy"
        raise UserError(text, remedy="start it with --standby, or use another --state")
    own = marker.seat if marker and was_standby else term % SEATS
    places = {(seat.host, seat.port) for seat in seats if seat.number != own}
    if marker is not None and marker.leader and was_standby:
        places.add(parse_address(marker.leader))
    if places:
        # A standby's own term is to be higher than its leader's: who leads in the same one is in its way as well.
        hello = local_hello(
            peer_id=cluster, name="", roles=["seed"], purpose="probe", cluster=cluster, term=term - int(was_standby)
        )
        if rival := await leading_among(world, places, hello):
            raise rival.deposes()
    if marker is None or not was_standby:
        return term
    new = next_term(term, marker.seat)
    if marker.leader:
        seats = with_seat(seats, Seat(term % SEATS, "", *parse_address(marker.leader)))
    await store.call(_began, new, seats)
    replace(marker, following=False).save(world.disk, state_dir)
    return new


def _began(records: Records, term: int, seats: list[Seat]) -> None:
    """The term last: what is without it is a standby's copy."""
    records.set_fact(SEATS_FACT, seats_text(seats))
    records.set_fact(TERM_FACT, str(term))


# --------------------------------------------------------------------------------------------------- a term that ends


class Rivals:
    """Whether somebody else leads in a higher term.

    Attributes:
        found: set as soon as that is known; then this seed mints nothing any more.
    """

    def __init__(self, term: int) -> None:
        self.found: asyncio.Future[Rival] = asyncio.get_running_loop().create_future()
        self._term = term
        self._ask = asyncio.Event()

    def judge(self, hello: Hello, cluster: str, host: str) -> Refuse | None:
        """Why a caller is not let in: it has seen a higher term."""
        if hello.cluster != cluster or not self._term < hello.term < MAX_TERM:
            return None
        if "seed" in hello.roles and hello.purpose == "probe":  # over TLS the handshake has seen its certificate
            self.depose(Rival(hello.term, format_address(hello.host or host, hello.port)))
        self._ask.set()
        text = f"this seed is of term {self._term}, and the caller has seen term {hello.term}"
        return Refuse(RefusalCode.STALE_TERM, text, "use the seed that leads")

    def depose(self, rival: Rival) -> None:
        if not self.found.done():
            self.found.set_result(rival)

    async def watch(self, ask: Callable[[], Awaitable[Rival | None]]) -> None:
        """Ask the others, again and again. Raises ``Deposed``."""
        asking = asyncio.create_task(self._watch(ask), name="ask the other seeds")
        try:
            both: set[asyncio.Future[Any]] = {asking, self.found}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if self.found.done():
                raise self.found.result().deposes()
            await asking
        finally:
            asking.cancel()

    async def _watch(self, ask: Callable[[], Awaitable[Rival | None]]) -> None:
        while True:
            if rival := await ask():
                self.depose(rival)
                return
            try:
                async with asyncio.timeout(ASK_S):
                    await self._ask.wait()
            except TimeoutError:
                pass
            self._ask.clear()


async def others_lead(world: World, followers: Followers, hello: Hello) -> Rival | None:
    """Ask, and so tell, the seeds that were here and do not follow now."""
    places = followers.absent()
    return await leading_among(world, places, hello) if places else None


def refused_as_standby(hello: Hello, cluster: str, *, full: bool) -> Refuse | None:
    """Why a caller is no standby of this seed."""
    check_numbers(hello)
    if not is_id(hello.peer_id) or not 0 < hello.port < 65536 or len(hello.host) > 255:
        raise ProtocolError("a standby without a name or a port")
    if hello.cluster not in ("", cluster):
        text = f"this standby holds a copy of another cluster ({hello.cluster[:64]})"
        return Refuse(RefusalCode.WRONG_JOB, text, "give it another --state")
    if hello.capabilities.get("schema") != SCHEMA_VERSION:
        return Refuse(RefusalCode.VERSION, "this standby keeps other tables", "use the same release of p2ptrain")
    if full:
        return Refuse(RefusalCode.FULL, "as many standbys are here as there may be", "stop one of them")
    return None
