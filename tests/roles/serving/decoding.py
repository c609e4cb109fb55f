"""Decoding over any model, plain and with drafts that are right or wrong as a number decides."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from roles.serving.model import Decoding, ModelSession, PassResult
from tests.invariants import check_invariants


async def decode(
    session: ModelSession,
    prompt: Sequence[int],
    wanted: Sequence[int],
    *,
    drafts: int = 0,
    seed: int = 0,
    right: float = 0.7,
    vocab_size: int = 97,
    chunk: int = 2048,
    cached: int = 0,
    passes: int = 1,
    before: Callable[[int], Awaitable[None]] | None = None,
) -> Decoding:
    """Decode as many tokens as ``wanted`` has, and check after each pass that they are those.

    Args:
        wanted: drafts are copied from it, each with chance ``right``; others are any number.
        drafts: in a pass, at most; it has any number of them from 0 on. 0: plain decoding.
        chunk: positions of the prompt in a pass. cached: of the prompt, which the session has.
        passes: under way at a time, at most.
        before: awaited before each pass, with the number of tokens so far.
    """
    rng = random.Random(seed)
    session.sample_from = len(prompt)
    decoding = Decoding(prompt, max_new_tokens=len(wanted), cached=cached, most_passes=passes)
    answers: deque[asyncio.Task[PassResult]] = deque()
    while not decoding.ended:
        if before is not None:
            await before(len(decoding.tokens))
        while decoding.may_begin:
            made = len(decoding.tokens) + len(decoding.assumed)
            count = min(rng.randrange(drafts + 1), decoding.draft_room) if made and drafts else 0
            ahead = [token if rng.random() < right else rng.randrange(vocab_size) for token in wanted[made:][:count]]
            if decoding.needs_drafts and not ahead:
                break
            answers.append(asyncio.create_task(session.append(decoding.next_pass(ahead, chunk=chunk))))
        result = await answers.popleft()
        assert result.took_s >= 0
        decoding.take_samples(result.tokens, result.took_s, 0.0)
        check_invariants(decoding)
        assert list(decoding.tokens) == list(wanted[: len(decoding.tokens)])
    await asyncio.gather(*answers)
    return decoding
