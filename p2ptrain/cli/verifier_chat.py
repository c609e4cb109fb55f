"""``p2ptrain chat`` with a verifier of the cluster, which is looked for again when it was lost.

Its connection says that it lives while the person types, so it is on a loop of a thread of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Generator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from p2ptrain.cli.kept_open import KeptOpen
from p2ptrain.cli.output import Console
from p2ptrain.cli.sources import pumped
from p2ptrain.cli.split import LEAVE_S, within
from p2ptrain.cli.verifier_stats import print_verifier_stats
from p2ptrain.cli.verifiers import dialled
from p2ptrain.compute.text import Conversation
from p2ptrain.core.errors import NetworkError, P2PTrainError, Refused, UserError
from roles.verifier.asking import Said, Wish
from roles.verifier.client import Text, VerifierClient
from wire.handshake import RefusalCode

PERSON_WAITS_S, PIPE_WAITS_S = 3600.0, 60.0
"""For a verifier that was lost. A person sees it, and may leave."""
LOOK_AGAIN_S = 1.0
MOST_ASKS = 3
"""Of one question, where the verifier is lost each time: it may be the question that ends it."""
_IF_LOST = (
    "ask again: the question waits until it, or another one of its model, is there; or: p2ptrain chat --verifier NAME"
)
_PASSING = frozenset({RefusalCode.BUSY, RefusalCode.SHUTTING_DOWN, RefusalCode.STANDBY, RefusalCode.STALE_TERM})
_MORE_PIECES = 64  # than tokens: what was held back, and long texts cut


@dataclass(frozen=True, slots=True)
class WantedVerifier:
    """``name``: which; empty: whichever there is. ``wish``: what every answer is to be like."""

    seed: str
    name: str
    wish: Wish


class VerifierSpeaker:
    """A ``speakers.Speaker``. Made when the verifier is there. Raises as ``verifiers.dialled``."""

    def __init__(self, wanted: WantedVerifier, *, at_terminal: bool, quiet: bool) -> None:
        self._wanted = wanted
        self._waits_s = PERSON_WAITS_S if at_terminal else PIPE_WAITS_S
        self._console = Console(quiet=quiet)
        self._client: VerifierClient | None = None
        self._left_out = 0
        self._stats: dict[str, Any] = {}
        self._kept = KeptOpen(self._opened, name="verifier")
        at = self._kept.value.verifier
        self.label, self.context = f"{at.model} of the verifier {at.name}", at.context or None
        known = "" if self.context is None else f"{self.context} tokens of context, "
        count = at.drafters
        self.about = known + (f"{count} drafter{'s' if count != 1 else ''}" if count else "no drafter is there")

    def speak(self, conversation: Conversation) -> VerifierSpeaking:
        turns = tuple(Said(turn.role, turn.text) for turn in conversation.turns)
        return VerifierSpeaking(self, replace(self._wanted.wish, turns=turns))

    def facts(self) -> dict[str, Any]:
        client = self._client
        at = None if client is None else client.verifier
        return {
            "verifier": None if at is None else at.name,
            "model": None if at is None else at.model,
            "stats": self._stats,
        }

    def show_stats(self) -> None:
        if not self._stats:
            raise UserError("no answer is whole yet", remedy="/stats tells of the last one")
        print_verifier_stats(self._stats)

    def close(self) -> None:
        self._kept.close()

    # ------------------------------------------------------------------------------------------------- for its answers

    def dropped_since(self, left_out: int) -> int:
        """Turns that the model is given no more, since the last answer."""
        before, self._left_out = self._left_out, left_out
        return max(0, left_out - before)

    def pumped(self, speaking: VerifierSpeaking, wish: Wish) -> Generator[str, None, None]:
        """Pieces of an answer, out of the thread of the connection."""
        loop = self._kept.loop
        began: Future[asyncio.Task[None]] = Future()

        async def answer(hand_over: Callable[[str], bool]) -> None:
            task = asyncio.current_task()
            assert task is not None
            began.set_result(task)
            await self._answer(speaking, wish, hand_over)

        def work(hand_over: Callable[[str], bool]) -> None:
            asyncio.run_coroutine_threadsafe(answer(hand_over), loop).result()

        def cancel() -> None:
            began.add_done_callback(lambda known: loop.call_soon_threadsafe(known.result().cancel))

        most = 2 * (wish.max_new_tokens or 1 << 16) + _MORE_PIECES
        return pumped(work, most=most, on_cancel=cancel, name="answer")

    # ---------------------------------------------------------------------------------------- on the verifier's thread

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[VerifierClient]:
        self._client = await dialled(self._wanted.seed, self._wanted.name, if_lost=_IF_LOST)
        try:
            yield self._client
        finally:  # another one may be in its place by now
            await within(LEAVE_S, self._client.close())

    async def _answer(self, speaking: VerifierSpeaking, wish: Wish, hand_over: Callable[[str], bool]) -> None:
        text = await self._asked(wish)
        speaking.begun(text)
        try:
            async for piece in text:
                speaking.tokens = text.count
                if not hand_over(piece.text):
                    break
        finally:
            await text.close()
        speaking.ended = text.ended
        self._stats = text.stats()

    async def _asked(self, wish: Wish) -> Text:
        """Ask; where the verifier was lost since the last question, or leaves just now, look for it first. Raises what
        it said last, when that takes too long."""
        began, lost = time.monotonic(), 0
        while True:
            client = await self._there(began)
            try:
                return await client.ask(wish)
            except (NetworkError, Refused) as problem:
                leaves = isinstance(problem, Refused) and problem.code == RefusalCode.SHUTTING_DOWN
                lost += client.lost and not leaves
                if not (client.lost or leaves) or lost == MOST_ASKS or time.monotonic() - began > self._waits_s:
                    raise  # what it says of the wish, or of the model behind it
                await client.close()
                await asyncio.sleep(LOOK_AGAIN_S)

    async def _there(self, began: float) -> VerifierClient:
        """The verifier, as soon as it is there, which is waited for since ``began``. Raises what its last refusal was,
        when that takes too long."""
        assert self._client is not None
        if not self._client.lost:
            return self._client
        at = self._client.verifier
        await self._client.close()
        try:
            while True:
                try:
                    self._client = await dialled(self._wanted.seed, self._wanted.name, like=at, if_lost=_IF_LOST)
                except P2PTrainError as problem:
                    waited_s = time.monotonic() - began
                    if waited_s > self._waits_s or not _may_come_back(problem):
                        raise
                    self._console.progress(f"waiting for the verifier {at.name}: {waited_s:.0f} s, Ctrl+C gives up")
                    await asyncio.sleep(LOOK_AGAIN_S)
                else:
                    return self._client
        finally:
            self._console.clear()


def _may_come_back(problem: P2PTrainError) -> bool:
    """Whether it is worth to look again: it is away, or was just started, or its seed is."""
    return isinstance(problem, NetworkError | UserError) or (isinstance(problem, Refused) and problem.code in _PASSING)


class VerifierSpeaking:
    """See ``speakers.Speaking``."""

    def __init__(self, speaker: VerifierSpeaker, wish: Wish) -> None:
        self.dropped, self.tokens, self.ended, self.full = 0, 0, "", False
        self._speaker, self._wish = speaker, wish

    def begun(self, text: Text) -> None:
        """It is being written."""
        self.dropped = self._speaker.dropped_since(text.left_out)
        context, most = self._speaker.context, self._wish.max_new_tokens
        self.full = context is not None and most is not None and text.prompt_tokens + most > context

    def pieces(self) -> Generator[str, None, None]:
        return self._speaker.pumped(self, self._wish)
