"""The drafters of a verifier's sessions, as the seed lists them.

A session is opened at the best drafter, as the cost model ranks them. When that drafter is lost or refuses, another one
gets the session. A new drafter is used by sessions that have none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from p2ptrain.core.errors import ProtocolError
from roles.background import Background
from roles.drafter.events import DrafterReady, SendVerdict, Signal, VerifierEvent
from roles.serving.worker_peer import Context
from roles.verifier.drafter_link import Connected, DrafterFacts, DrafterLink, DraftSession, Opening, Tokens
from wire.text_messages import MAX_DRAFTERS, DrafterAt

USUAL_PASS_S = 0.05
"""Assumed time of a verifier's pass, for the comparison of drafters."""


class Drafters:
    """The drafters of a verifier. Needs a running loop.

    Args:
        tokens: vocabulary of the verifier's model.
    """

    def __init__(self, context: Context, tokens: Tokens) -> None:
        self._context, self._tokens = context, tokens
        self._links: dict[str, DrafterLink] = {}  # by peer id
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._listed: set[str] = set()
        self._unfit = ""  # the peer with another tokenizer that was reported last
        self.sessions: set[SessionDrafters] = set()
        self._tasks = Background()
        self._closed = False

    def here(self, drafters: Iterable[DrafterAt]) -> None:
        """Update the list of drafters from the seed. A connected drafter that is no longer listed is kept while it
        lives."""
        listed = {at.peer_id: at for at in list(drafters)[:MAX_DRAFTERS] if self._fits(at)}
        self._listed = set(listed)
        for peer_id, at in listed.items():
            if self._closed:
                return
            link = self._links.get(peer_id)
            if link is None:
                link = self._links[peer_id] = DrafterLink(self._context, at, self._tokens, on_change=self._changed)
                self._lives[peer_id] = self._tasks.start(link.run(), f"drafter {at.name}")
            link.at = at  # address of the next dial
        for peer_id in self._links.keys() - listed.keys():
            self._let_go(self._links[peer_id])

    def open(self, opening: Opening, on_event: Callable[[VerifierEvent], None]) -> SessionDrafters:
        """Open a session at drafters, without waiting for them. ``on_event`` gets their events on the event loop, never
        from within ``open`` or ``tell``."""
        session = SessionDrafters(self, opening, on_event)
        self.sessions.add(session)
        session.fill()
        return session

    def connected(self) -> list[Connected]:
        found = [link for link in self._links.values() if link.there]
        return [
            Connected(link.at.peer_id, link.model.alpha if link.model.known else None, link.model.latency_s)
            for link in found
        ]

    async def close(self) -> None:
        """Disconnect all drafters. Never raises."""
        self._closed = True
        for session in list(self.sessions):
            session.close()
        await self._tasks.stop()

    def best(self) -> list[DrafterLink]:
        """Drafters at which a session may be opened, best first. Sessions that a drafter has already count as delay."""
        there = [link for link in self._links.values() if link.there]
        return sorted(there, key=lambda link: link.model.token_s(USUAL_PASS_S, sessions=link.sessions))

    def _fits(self, at: DrafterAt) -> bool:
        if at.tokenizer == self._tokens.tokenizer:
            return True
        if at.peer_id != self._unfit:
            self._unfit = at.peer_id
            text = f"drafter {at.name} cannot be used here: {at.model} has another tokenizer"
            self._context.notify("warning", "other-tokenizer", f"{text}; draft with a model of the same family")
        return False

    def _let_go(self, link: DrafterLink) -> None:
        """Stop dialling a drafter that is neither connected nor listed. One that misbehaved is kept until its wait
        ends, so that it cannot come back at once."""
        if not link.there and link.not_before <= self._context.world.clock.now():
            self._links.pop(link.at.peer_id, None)
            self._lives.pop(link.at.peer_id).cancel()

    def _changed(self, link: DrafterLink) -> None:
        if link.there:
            for session in list(self.sessions):
                session.fill()
        elif link.at.peer_id not in self._listed:
            self._let_go(link)


class SessionDrafters:
    """The drafters of one session, one at a time. Its methods neither block nor raise."""

    def __init__(self, drafters: Drafters, opening: Opening, on_event: Callable[[VerifierEvent], None]) -> None:
        self._drafters, self._opening, self._on_event = drafters, opening, on_event
        self._session: DraftSession | None = None
        self._tried: set[DrafterLink] = set()  # each link is asked once per session
        self._were_ready: list[DraftSession] = []
        self._closed = False

    def fill(self) -> None:
        link = next((link for link in self._drafters.best() if link not in self._tried), None)
        if link is not None and self._session is None and not self._closed:
            self._tried.add(link)
            self._session = link.open(self._opening, self._take)

    def _take(self, event: VerifierEvent) -> None:
        if self._closed:
            return
        assert self._session is not None
        match event:
            case DrafterReady():
                self._were_ready.append(self._session)
            case Signal.LOST:
                link, self._session = self._session.link, None
                if not link.there:  # otherwise the drafter refused this session
                    self._tried.discard(link)
                asyncio.get_running_loop().call_soon(self.fill)
        self._on_event(event)

    def tell(self, tell: SendVerdict) -> None:
        if self._session is not None:
            self._session.tell(tell)

    def drop(self, reason: str) -> None:
        if self._session is not None:
            self._session.link.drop(ProtocolError(f"it sent invalid drafts: {reason}"))

    def facts(self, right: Sequence[int]) -> list[DrafterFacts]:
        """Facts of every drafter that ever became ready in this session, also after ``close``. ``right``: as of
        ``Verifying``."""
        return [session.facts(accepted) for session, accepted in zip(self._were_ready, right, strict=False)]

    def close(self) -> None:
        """Close the session at its drafter. No event comes any more. May be called twice."""
        if not self._closed:
            self._closed = True
            self._drafters.sessions.discard(self)
            if self._session is not None:
                self._session.link.close(self._session)
