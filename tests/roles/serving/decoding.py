"""Decoding over any model: plain, token by token, and with drafts that are right or wrong as a number decides."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from typing import Self

from p2ptrain.core.serving import Sampling
from roles.serving.chain import StageChain
from roles.serving.chain_session import ChainSession
from roles.serving.model import Decoding, ModelSession, PassResult
from roles.serving.text_service import common_prefix


class Generation:
    """Tokens of a session as they come: an async iterator."""

    result: PassResult

    def __init__(self, session: ChainSession, ids: Sequence[int], tokens: int) -> None:
        self.session = session
        self._held: list[int] = []
        self.go_on(ids, max_new_tokens=tokens)

    def go_on(self, ids: Sequence[int], *, max_new_tokens: int) -> None:
        self.session.sample_from = len(ids)
        self._decoding = Decoding(ids, max_new_tokens=max_new_tokens, cached=common_prefix(self._held, ids))

    @property
    def tokens(self) -> list[int]:
        return list(self._decoding.tokens)

    @property
    def ended(self) -> str:
        return self._decoding.ended

    @property
    def mendings(self) -> list[tuple[str, float]]:
        return self.session.mendings

    def __aiter__(self) -> AsyncIterator[int]:
        return self

    async def __anext__(self) -> int:
        """The next token; ``result`` is that of its pass."""
        if self.ended:
            raise StopAsyncIteration
        while True:
            self.result = await self.session.append(self._decoding.next_pass())
            self._held = self._decoding.ids.copy()
            for token in self._decoding.take_samples(self.result.tokens, self.result.took_s, 0.0).tokens:
                return token

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
    positions: int = 0,
) -> Generation:
    session = await chain.open(
        positions=positions or len(ids) + max_new_tokens, sampling=sampling, sample_from=len(ids)
    )
    return Generation(session, ids, max_new_tokens)


async def decoded(
    session: ModelSession,
    prompt: Sequence[int],
    wanted: Sequence[int],
    *,
    drafts: int,
    seed: int = 0,
    right: float = 0.7,
    vocab_size: int = 97,
    chunk: int = 2048,
    cached: int = 0,
) -> Decoding:
    """As many tokens as ``wanted`` has.

    Args:
        wanted: what drafts are copied from, each with chance ``right``; others are any number.
        drafts: in a pass, at most; it has any number of them from 0 on. 0: plain decoding.
        chunk: positions of the prompt in a pass. cached: of the prompt, which the session has.
    """
    rng = random.Random(seed)
    session.sample_from = len(prompt)
    decoding = Decoding(prompt, max_new_tokens=len(wanted), cached=cached)
    while not decoding.ended:
        made = len(decoding.tokens)
        count = min(rng.randrange(drafts + 1), decoding.draft_room) if made and drafts else 0
        ahead = [token if rng.random() < right else rng.randrange(vocab_size) for token in wanted[made : made + count]]
        result = await session.append(decoding.next_pass(ahead, chunk=chunk))
        assert result.took_s >= 0
        decoding.take_samples(result.tokens, result.took_s, 0.0)
    return decoding
