"""The drafters of a verifier's sessions, as the seed lists them.

A session is opened at the best drafter, as the cost model ranks them. When that drafter is lost or refuses, another one
gets the session. A new drafter is used by sessions that have none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from p2ptrain.core.errors import ProtocolError
from roles.background import Background
from roles.serving.decoding import PassOutcome
from roles.serving.text_stats import DrafterFacts
from roles.serving.worker_peer import ClientContext
from roles.verifier.drafter_link import DrafterLink, DraftSession, TextOpening, Vocabulary
from roles.verifier.speculation import Speculation
from wire.text_messages import MAX_DRAFTERS, DrafterAt

USUAL_PASS_S = 0.05
"""Assumed time of a verifier's pass, for the comparison of drafters."""


class Drafters:
    """The drafters of a verifier. Needs a running loop.

    Args:
        tokens: vocabulary of the verifier's model.
    """

    def __init__(self, context: ClientContext, tokens: Vocabulary) -> None:
        self._context, self._tokens = context, tokens
        self._links: dict[str, DrafterLink] = {}  # by peer id
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._listed: set[str] = set()
        self._unfit = ""  # the peer with another tokenizer that was reported last
        self.texts: set[TextDrafts] = set()
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

    def connected(self) -> list[DrafterLink]:
        return [link for link in self._links.values() if link.there]

    async def close(self) -> None:
        """Disconnect all drafters. Never raises."""
        self._closed = True
        for text in list(self.texts):
            text.close()
        await self._tasks.stop()

    def best(self) -> list[DrafterLink]:
        """Drafters at which a session may be opened, best first. Sessions that a drafter has already count as delay."""
        return sorted(self.connected(), key=lambda link: link.model.token_s(USUAL_PASS_S, sessions=link.sessions))

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
            for text in list(self.texts):
                text.fill()
        elif link.at.peer_id not in self._listed:
            self._let_go(link)


class TextDrafts:
    """A ``DraftSource``: the drafters of one text, one at a time. Its methods neither raise nor, but for one, wait.

    Args:
        drafters: None: drafters may not help with this text, but its passes are measured like those of others.
    """

    def __init__(
        self, drafters: Drafters | None, core: Speculation, opening: TextOpening, now: Callable[[], float]
    ) -> None:
        self._drafters, self._core, self._opening, self._now = drafters, core, opening, now
        self._session: DraftSession | None = None
        self._tried: set[DrafterLink] = set()  # each link is asked once per text
        self._ready: list[DraftSession] = []  # every session that became ready
        self._news = asyncio.Event()
        self._closed = False
        if drafters is not None:
            drafters.texts.add(self)
            self.fill()

    # ----------------------------------------------------------------------------------------------------- for the text

    async def next_drafts(self) -> Sequence[int]:
        while not self._closed:
            drafts, wait_s = self._core.next_drafts(self._now())
            if wait_s <= 0:
                return drafts
            self._news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._news.wait()
        return ()

    def end_pass(self, outcome: PassOutcome) -> None:
        now = self._now()
        self._core.end_pass(outcome, now)
        self._send_verdict(now)

    def facts(self) -> list[DrafterFacts]:
        return [session.facts(accepted) for session, accepted in zip(self._ready, self._core.right, strict=False)]

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._core.end(self._now())
        self._news.set()
        if self._drafters is not None:
            self._drafters.texts.discard(self)
        if self._session is not None:
            self._session.link.close(self._session)

    # ------------------------------------------------------------------------------------------------- for the drafters

    def fill(self) -> None:
        """Open a session at the best drafter that was not tried, if the text has none."""
        if self._drafters is None or self._session is not None or self._closed:
            return
        link = next((link for link in self._drafters.best() if link not in self._tried), None)
        if link is not None:
            self._tried.add(link)
            self._session = link.open(self._opening, self)

    def begin_line(self, session: DraftSession) -> None:
        if not self._closed:
            now = self._now()
            self._ready.append(session)
            self._core.begin_line(len(self._opening.ids), session.link.model, now)
            self._send_verdict(now)
            self._news.set()

    def take_drafts(self, epoch: int, position: int, tokens: Sequence[int]) -> None:
        """Take drafts. Raises ``ProtocolError``: no correct drafter sends them."""
        if not self._closed:
            try:
                self._core.receive_untrusted(epoch, position, tokens, self._now())
            except ProtocolError as problem:
                raise ProtocolError(f"it sent invalid drafts: {problem.message}") from problem
            finally:
                self._news.set()

    def lose_session(self) -> None:
        if self._closed or self._session is None:
            return
        link, self._session = self._session.link, None
        if not link.there:  # otherwise the drafter refused this text
            self._tried.discard(link)
        self._core.drop_line(self._now())
        self._news.set()
        asyncio.get_running_loop().call_soon(self.fill)

    def _send_verdict(self, now: float) -> None:
        if self._session is not None and (verdict := self._core.next_verdict(now)) is not None:
            self._session.send_verdict(verdict)
