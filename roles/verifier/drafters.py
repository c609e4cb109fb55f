"""The drafters that a verifier's sessions draft with: those that the seed tells of, and a look-up of its own.

A session has seats at the best few drafters: those that a right token costs least at, which counts how far away they
are, how fast, how often right, and how many sessions they draft for already. A drafter that comes later is made use of
by sessions that have fewer than they may; one that is of no use gives its place to another; one that says what no
correct drafter says loses its places at once.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from p2ptrain.core.errors import ProtocolError
from p2ptrain.core.serving import Sampling
from roles.background import Background
from roles.chain.around import Around
from roles.speculation.events import DrafterLost, DrafterReady, Latency, Tell
from roles.speculation.received import FULL
from roles.verifier.drafter_link import DrafterLink, Tokens
from roles.verifier.drafting_source import Connected, DrafterFacts, Drafting, DraftingEvent
from roles.verifier.look_up import LookUp
from roles.verifier.seat import Beginning, Seat
from roles.verifier.standing import Standing
from wire.speculation_messages import DrafterAt

SEATS = 2
"""Drafters of one session, besides the look-up."""
LOOK_UP = "n-gram look-up"
MAX_LINKS = 16
"""Drafters that a verifier is connected to, or dials."""
MAX_STANDINGS = 256
"""Peers that are remembered, the last ones."""


class Drafters:
    """A ``roles.verifier.drafting_source.DrafterSource`` over the network. It needs a running loop.

    Args:
        tokens: of the verifier's model.
        seats: drafters of one session, at most.
        look_up: whether each session has a look-up in this process, too.
    """

    def __init__(self, around: Around, tokens: Tokens, *, seats: int = SEATS, look_up: bool = True) -> None:
        self._around = around
        self._tokens = tokens
        self._seats = seats
        self._look_up = look_up
        self._links: dict[str, DrafterLink] = {}  # by peer id
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._listed: dict[str, DrafterAt] = {}  # by the seed, and of use
        self._standings: OrderedDict[str, Standing] = OrderedDict()  # by peer id
        self._sessions: set[_SessionDrafting] = set()
        self._tasks = Background()
        self._closed = False
        self.now = around.world.clock.now

    def here(self, drafters: Iterable[DrafterAt]) -> None:
        """All drafters that there are now, as the seed says. One that it tells of no more is kept while it lives."""
        self._listed = {at.peer_id: at for at in drafters if self._fits(at)}
        for peer_id, link in list(self._links.items()):
            at = self._listed.get(peer_id)
            if (at is not None and at != link.at) or (at is None and not link.there):
                self._let_go(peer_id)
        self._dial()

    def open(
        self,
        ids: Sequence[int],
        *,
        prompt: int,
        positions: int,
        sampling: Sampling,
        depth: int,
        on_event: Callable[[DraftingEvent], None],
    ) -> Drafting:
        """As of ``DrafterSource``."""
        beginning = Beginning(tuple(ids), prompt, positions, sampling, depth)
        self._dial()  # by now it may be known who is of no use
        session = _SessionDrafting(self, beginning, on_event, self._seats)
        self._sessions.add(session)
        if self._look_up:
            session.look_up(self._tokens.vocab_size)
        session.fill()
        return session

    def connected(self) -> list[Connected]:
        """As of ``DrafterSource``."""
        found = [link for link in self._links.values() if link.there and not link.never]
        return [
            Connected(link.at.peer_id, link.record.alpha if link.record.counted else None, link.record.latency_s)
            for link in found
        ]

    async def close(self) -> None:
        """Let go of all drafters. Never raises."""
        self._closed = True
        for session in list(self._sessions):
            session.close()
        await self._tasks.stop()

    # ---------------------------------------------------------------------------------------------------- for sessions

    def candidates(self, but: Iterable[DrafterLink]) -> list[DrafterLink]:
        """Drafters that can be asked for a seat, the best first."""
        free = [link for link in self._links.values() if link.free and link not in set(but)]
        return sorted(free, key=lambda link: (link.record.hopeless, link.record.cost_s(len(link.seats))))

    def forget(self, session: _SessionDrafting) -> None:
        self._sessions.discard(session)

    # ------------------------------------------------------------------------------------------------------- internals

    def _dial(self) -> None:
        """As many as there may be. Who is struck takes no place; who is of no use gives its place to one that was not
        tried."""
        if self._closed:
            return
        now = self.now()
        others = [at for peer_id, at in self._listed.items() if peer_id not in self._links]
        others.sort(key=lambda at: self._standing(at.peer_id).of_no_use)
        for at in others:
            standing = self._standing(at.peer_id)
            taken = [link for link in self._links.values() if link.standing.struck_until <= now]
            if len(taken) >= MAX_LINKS:
                useless = next((link for link in taken if link.record.hopeless), None)
                if useless is None or standing.of_no_use:
                    return
                useless.standing.of_no_use = True
                self._let_go(useless.at.peer_id)
            link = DrafterLink(self._around, at, self._tokens, standing, on_change=self._changed)
            self._links[at.peer_id] = link
            self._lives[at.peer_id] = self._tasks.start(link.run(), f"drafter {at.name}")

    def _standing(self, peer_id: str) -> Standing:
        standing = self._standings.pop(peer_id, None) or Standing()
        self._standings[peer_id] = standing
        while len(self._standings) > MAX_STANDINGS:
            self._standings.popitem(last=False)
        return standing

    def _fits(self, at: DrafterAt) -> bool:
        """Whether it drafts the same tokens. A look-up has no tokenizer: it takes any."""
        if at.tokenizer in ("", self._tokens.tokenizer):
            return True
        if self._standing(at.peer_id).unfit_is_news(at.tokenizer, self.now()):
            text = f"drafter {at.name} is of no use here: {at.model} has another tokenizer"
            self._around.notify("warning", "other-tokenizer", f"{text}; draft with a model of the same family")
        return False

    def _let_go(self, peer_id: str) -> None:
        self._lives.pop(peer_id).cancel()
        del self._links[peer_id]

    def _changed(self, link: DrafterLink) -> None:
        peer_id = link.at.peer_id
        if not link.there:
            if peer_id not in self._listed and self._links.get(peer_id) is link:
                self._let_go(peer_id)
            self._dial()
        for session in list(self._sessions):
            session.fill()


class _SessionDrafting:
    """One session's seats: a ``roles.verifier.drafting_source.Drafting``."""

    def __init__(
        self, drafters: Drafters, beginning: Beginning, on_event: Callable[[DraftingEvent], None], most: int
    ) -> None:
        self._drafters = drafters
        self._beginning = beginning
        self._on_event = on_event
        self._most = most
        self._last = 0  # number of a drafter
        self._seats: dict[int, Seat] = {}  # by drafter
        self._tried: set[DrafterLink] = set()  # refused this session: they are not asked again
        self._was_ready: list[Seat] = []
        self._local: LookUp | None = None
        self._closed = False

    def look_up(self, vocab_size: int) -> None:
        """Have a look-up of this process draft, too."""
        self._last += 1
        self._local = LookUp(self._last, self._beginning, vocab_size, self._tell_event)

    def fill(self) -> None:
        """Take a seat wherever one may be had, up to as many as the session may have, but for those that take long."""
        if self._closed:
            return
        now = self._drafters.now()
        taken = [seat.link for seat in self._seats.values()]
        for link in self._drafters.candidates([*taken, *self._tried]):
            if sum(not seat.slow(now) for seat in self._seats.values()) >= self._most:
                break
            self._sit(link)

    def _sit(self, link: DrafterLink) -> None:
        self._last += 1
        self._seats[self._last] = link.seat(
            self._last,
            self._beginning,
            on_ready=self._ready,
            on_drafted=lambda seat, drafted: self._tell_event(drafted),
            on_latency=lambda seat: self._tell_event(Latency(seat.drafter, seat.link.record.latency_s)),
            on_lost=self._lost,
        )

    def _ready(self, seat: Seat) -> None:
        self._was_ready.append(seat)
        record, at = seat.link.record, seat.link.at
        name = f"{at.peer_id} {at.tokenizer} {at.model}"
        known = len(self._beginning.ids)
        self._tell_event(DrafterReady(seat.drafter, known, record.latency_s, record.step_s, name))

    def _lost(self, seat: Seat) -> None:
        self._seats.pop(seat.drafter, None)
        if seat.refused not in ("", FULL):
            self._tried.add(seat.link)
        self._tell_event(DrafterLost(seat.drafter))
        self.fill()

    def _tell_event(self, event: DraftingEvent) -> None:
        if not self._closed:
            self._on_event(event)

    # -------------------------------------------------------------------------------------------------------- Drafting

    def tell(self, tell: Tell) -> None:
        if self._local is not None and tell.drafter == self._local.drafter:
            self._local.tell(tell)
            return
        seat = self._seats.get(tell.drafter)
        if seat is None:
            return
        seat.tell(tell)
        if seat.link.record.hopeless and self._better():
            asyncio.get_running_loop().call_soon(self._replace, seat)

    def drop(self, drafter: int, reason: str) -> None:
        """This drafter said what none says that is right: it loses its places."""
        seat = self._seats.pop(drafter, None)
        if seat is not None:
            seat.leave()
            seat.link.strike(ProtocolError(f"it drafts what cannot be: {reason}"))
            asyncio.get_running_loop().call_soon(self.fill)

    def facts(self) -> list[DrafterFacts]:
        found = [
            DrafterFacts(
                seat.drafter,
                seat.link.at.peer_id,
                seat.link.name,
                seat.link.at.model,
                seat.link.record.latency_s,
                seat.bytes_in,
                seat.bytes_out,
                seat.frames,
            )
            for seat in self._was_ready
        ]
        if self._local is not None:
            found.append(DrafterFacts(self._local.drafter, "", "here", LOOK_UP, 0.0, 0, 0))
        return sorted(found, key=lambda facts: facts.drafter)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._drafters.forget(self)
        if self._local is not None:
            self._local.close()
        for seat in self._seats.values():
            seat.leave()
        self._seats.clear()

    def _better(self) -> list[DrafterLink]:
        """Drafters without a seat in this session that are not known to be of no use."""
        taken = [seat.link for seat in self._seats.values()]
        return [link for link in self._drafters.candidates([*taken, *self._tried]) if not link.record.hopeless]

    def _replace(self, seat: Seat) -> None:
        """Give the place of a drafter that is of no use to one that may be."""
        better = self._better()
        if better and not seat.over and not self._closed:
            seat.leave()
            del self._seats[seat.drafter]
            self._tell_event(DrafterLost(seat.drafter))
            self._sit(better[0])
