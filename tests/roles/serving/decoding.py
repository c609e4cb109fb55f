"""Plain decoding over a chain: a prompt in chunks, then one position after another."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Self

from p2ptrain.core.serving import Sampling
from roles.serving.chain import StageChain
from roles.serving.chain_session import ChainSession
from roles.serving.decoding import Decoding
from roles.serving.text_service import common_prefix


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


class Generation:
    """Tokens of a session as they come: an async iterator."""

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

    def __aiter__(self) -> AsyncIterator[Token]:
        return self

    async def __anext__(self) -> Token:
        if self.ended:
            raise StopAsyncIteration
        while True:
            made = await self.session.append(self._decoding.next_pass())
            self._held = self._decoding.ids.copy()
            for token in self._decoding.take_samples(made.tokens, made.took_s, 0.0).tokens:
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
    positions: int = 0,
) -> Generation:
    session = await chain.open(
        positions=positions or len(ids) + max_new_tokens, sampling=sampling, sample_from=len(ids)
    )
    return Generation(session, ids, max_new_tokens)
