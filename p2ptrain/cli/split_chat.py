"""``p2ptrain chat --split``: a chain of stages as a source of tokens.

Its connections say that they are alive while the person types, so they live on a loop of a thread of its own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from p2ptrain.cli.kept_open import KeptOpen
from p2ptrain.cli.output import Console
from p2ptrain.cli.placement import placement_map
from p2ptrain.cli.runtime import run
from p2ptrain.cli.sources import pumped
from p2ptrain.cli.split import LEAVE_S, Planned, Wanted, planned, show_plan, within
from p2ptrain.cli.split_stats import Meter, split_facts
from p2ptrain.compute.text import ModelText
from p2ptrain.core.errors import P2PTrainError
from p2ptrain.core.serving import Sampling
from roles.chain.client import Chain
from roles.chain.generation import GenerationSession

MOST_POSITIONS = 4096
"""Of a conversation where nobody says more: caches for a whole context may be larger than the weights."""


def positions_of(wanted: Wanted, text: ModelText) -> int:
    """What a conversation may grow to."""
    return wanted.wish.positions or min(text.context or MOST_POSITIONS, MOST_POSITIONS)


def dry_run(wanted: Wanted, *, as_json: bool) -> None:
    """``chat --split --dry-run``. Raises as ``planned``."""

    async def show() -> None:
        async with planned(wanted, lambda text: positions_of(wanted, text), Console(quiet=as_json)) as plan:
            show_plan(plan, as_json=as_json)

    run(show())


class ChainSource:
    """See ``sources.TokenSource``. Made when the chain is loaded. Raises as ``planned`` and ``Chain.load``."""

    def __init__(self, wanted: Wanted, *, quiet: bool) -> None:
        self._wanted, self._quiet = wanted, quiet
        self._meter = Meter()
        self._mendings: list[tuple[str, float]] = []
        self._session: GenerationSession | None = None
        self._kept = KeptOpen(self._opened, name="chain")
        self._plan, self._chain = self._kept.value
        self.text, self.label = self._plan.text, self._plan.label
        self.context: int | None = min(self._plan.plan.positions, self.text.context or self._plan.plan.positions)

    def tokens(
        self, ids: Sequence[int], *, max_new_tokens: int, sampling: Sampling, end_tokens: frozenset[int]
    ) -> Generator[int, None, None]:
        loop = self._kept.loop
        unwanted = threading.Event()

        def work(hand_over: Callable[[int], bool]) -> None:
            answer = self._answer(ids, max_new_tokens, sampling, end_tokens, hand_over, unwanted)
            asyncio.run_coroutine_threadsafe(answer, loop).result()

        def cancel() -> None:
            unwanted.set()
            loop.call_soon_threadsafe(self._cancel)

        return pumped(work, most=max_new_tokens, on_cancel=cancel)

    def facts(self) -> dict[str, Any]:
        mendings = [*self._mendings, *(self._session.mendings if self._session is not None else [])]
        facts = split_facts(self._chain, self._meter, self._plan.encoding, mendings)
        return {"checkpoint": self.label, "split": facts, "plan": placement_map(self._chain.plan.placement)}

    def close(self) -> None:
        """Let the workers go; what they loaded stays for the next client."""
        self._kept.close()

    # ----------------------------------------------------------------------------------------- on the chain's thread

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[tuple[Planned, Chain]]:
        wanted = self._wanted
        async with planned(wanted, lambda text: positions_of(wanted, text), Console(quiet=self._quiet)) as plan:
            chain = await plan.load()
            try:
                yield plan, chain
            finally:
                await within(LEAVE_S, chain.close())

    async def _answer(
        self,
        ids: Sequence[int],
        max_new_tokens: int,
        sampling: Sampling,
        end_tokens: frozenset[int],
        hand_over: Callable[[int], bool],
        unwanted: threading.Event,
    ) -> None:
        encoding, prefill_encoding = self._plan.wish.encodings
        if self._session is None:
            self._session = await self._chain.generate(
                ids,
                max_new_tokens=max_new_tokens,
                sampling=sampling,
                stop_ids=end_tokens,
                positions=self._plan.plan.positions,
                encoding=encoding,
                prefill_encoding=prefill_encoding,
            )
        else:
            self._session.go_on(ids, max_new_tokens=max_new_tokens, stop_ids=end_tokens)
        if unwanted.is_set():  # while the session was opened
            self._session.cancel()
        try:
            async for token in self._session:
                self._meter.add(token)
                if not hand_over(token.id):
                    self._session.cancel()
                    break
        except P2PTrainError:
            self._mendings += self._session.mendings
            session, self._session = self._session, None  # the next answer begins a session anew
            await within(LEAVE_S, session.close())
            raise

    def _cancel(self) -> None:
        if self._session is not None:
            self._session.cancel()
