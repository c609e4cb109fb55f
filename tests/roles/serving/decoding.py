"""Plain decoding over a chain: a prompt in chunks, then one position after another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Self

from p2ptrain.core.serving import Sampling
from roles.serving.chain import StageChain
from roles.serving.chain_core import PassSubmitted
from roles.serving.chain_session import ChainSession
from roles.serving.model import PassRequest
from roles.serving.text_service import common_prefix
from wire.chain_messages import CHUNK


@dataclass(frozen=True, slots=True)
class Token:
    """One new token.

    Attributes:
        number: of the generation's new tokens, from 0.
        stages_us: microseconds that each stage computed on the request that sampled it, in order.
        took_s: from the moment at which that request was sent to the arrival of the token: computing, hops and mending.
        mended: a stage was lost and replaced meanwhile.
    """

    id: int
    number: int
    stages_us: tuple[int, ...]
    took_s: float
    mended: bool = False

    @property
    def compute_s(self) -> float:
        """Of all stages together; the rest of ``took_s`` is the way and the waiting."""
        return sum(self.stages_us) / 1e6


class Decoding:
    """What a generation submits next: its prompt in chunks, then one position after another. Pure.

    The prompt's chunks are under way together, so that all stages of a chain compute at once. After that each position
    depends on the token before, so one is under way.

    Args:
        history: token ids that the session has; what they have in common with ``ids`` is not computed again.
        ids: of the prompt.
        stop_ids: after one of these it ends.

    Attributes:
        tokens: new ones, in order.
        ended: why there are no more: ``length``, ``stop``, ``cancelled``; empty while there are.
    """

    def __init__(
        self, history: Sequence[int], ids: Sequence[int], *, max_new_tokens: int, stop_ids: Collection[int] = ()
    ) -> None:
        if not ids or max_new_tokens < 1:
            raise ValueError("a generation has a prompt, and makes a token")
        self.tokens: list[int] = []
        self.ended = ""
        self._max_new_tokens = max_new_tokens
        self._stop_ids = frozenset(stop_ids)
        self._ids = tuple(ids)
        self._next = common_prefix(history, ids[:-1])  # the last one is computed in any case: the first token follows
        self._last_index = -1  # of the request that samples

    def wants(self, room: int, submitted: int) -> list[PassSubmitted]:
        """What to submit now.

        Args:
            room: requests that may be submitted. submitted: the number that were, which is the index of the next one.
        """
        requests: list[PassSubmitted] = []
        while self._next < len(self._ids) and len(requests) < room and not self.ended:
            stop = min(self._next + CHUNK, len(self._ids))
            samples = int(stop == len(self._ids))
            requests.append(PassSubmitted(self._ids[self._next : stop], self._next, samples, 0, prefill=True))
            if samples:
                self._last_index = submitted + len(requests) - 1
            self._next = stop
        return requests

    def done(self, index: int, tokens: Sequence[int], submitted: int) -> tuple[tuple[int, ...], list[PassSubmitted]]:
        """The submitted request ``index`` was answered: the new tokens to give out, and what to submit then."""
        if self.ended or index != self._last_index or not tokens:
            return (), []
        token = tokens[0]
        self.tokens.append(token)
        if token in self._stop_ids:
            self.ended = "stop"
        elif len(self.tokens) == self._max_new_tokens:
            self.ended = "length"
        else:
            keep = len(self._ids) + len(self.tokens) - 1
            self._last_index = submitted
            return (token,), [PassSubmitted((token,), keep, 1, len(self.tokens))]
        return (token,), []

    def cancel(self) -> None:
        """No more tokens are wanted."""
        self.ended = self.ended or "cancelled"


class Generation:
    """Tokens of a session as they come: an async iterator."""

    def __init__(self, session: ChainSession, ids: Sequence[int], tokens: int, stop_ids: Collection[int]) -> None:
        self.session = session
        self.go_on(ids, max_new_tokens=tokens, stop_ids=stop_ids)

    def go_on(self, ids: Sequence[int], *, max_new_tokens: int, stop_ids: Collection[int] = ()) -> None:
        self.session.sample_from = len(ids)
        self._decoding = Decoding(self.session.history, ids, max_new_tokens=max_new_tokens, stop_ids=stop_ids)
        self._submitted = 0
        self._requests = self._decoding.wants(10**6, 0)

    @property
    def tokens(self) -> list[int]:
        return self._decoding.tokens

    @property
    def ended(self) -> str:
        return self._decoding.ended

    @property
    def mendings(self) -> list[tuple[str, float]]:
        return self.session.mendings

    def cancel(self) -> None:
        self._decoding.cancel()

    def __aiter__(self) -> AsyncIterator[Token]:
        return self

    async def __anext__(self) -> Token:
        if self.ended:
            raise StopAsyncIteration
        requests = [PassRequest(each.keep, each.ids, each.samples) for each in self._requests]
        made = (await asyncio.gather(*map(self.session.append, requests)))[-1]
        self._submitted += len(self._requests)
        (token,), self._requests = self._decoding.done(self._submitted - 1, made.tokens, self._submitted)
        return Token(token, len(self.tokens) - 1, made.spent_us, made.took_s, made.mended)

    async def close(self) -> None:
        await self.session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


async def generate(
    chain: StageChain,
    ids: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    stop_ids: Collection[int] = (),
    positions: int = 0,
    **encodings: Any,
) -> Generation:
    session = await chain.open(
        positions=positions or len(ids) + max_new_tokens, sampling=sampling, sample_from=len(ids), **encodings
    )
    return Generation(session, ids, max_new_tokens, stop_ids)
