"""Decoding by hand over any target: plain, and with drafts that are right or wrong as a number decides."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from roles.serving.local_model import TargetSession


@dataclass
class Told:
    """What came of it.

    Attributes:
        tokens: new ones. passes: after the prompt. accepted: drafts that were right.
    """

    tokens: list[int]
    passes: int = 0
    accepted: int = 0


async def decoded(
    session: TargetSession,
    prompt: Sequence[int],
    wanted: Sequence[int],
    *,
    drafts: int,
    seed: int = 0,
    right: float = 0.7,
    vocab_size: int = 97,
    chunk: int = 2048,
    kept: int = 0,
) -> Told:
    """As many tokens as ``wanted`` has.

    Args:
        wanted: what drafts are copied from, each with chance ``right``; others are any number.
        drafts: in a pass, at most; it has any number of them from 0 on. 0: plain decoding.
        chunk: positions of the prompt in a pass. kept: of the prompt, which the session has.
    """
    rng = random.Random(seed)
    told, picked = Told([]), tuple[int, ...]()
    for start in range(kept, len(prompt), chunk):
        ids = prompt[start : start + chunk]
        last = start + chunk >= len(prompt)
        picked = (await session.run(keep=start, ids=ids, samples=int(last), sample_index=0, prefill=True)).tokens
        assert len(picked) == int(last)
    told.tokens += picked
    while len(told.tokens) < len(wanted):
        made = len(told.tokens)
        count = rng.randrange(drafts + 1) if drafts else 0
        ahead = list(wanted[made : min(made + count, len(wanted) - 1)])
        ahead = [token if rng.random() < right else rng.randrange(vocab_size) for token in ahead]
        keep = len(prompt) + made - 1
        passed = await session.run(
            keep=keep, ids=[told.tokens[-1], *ahead], samples=len(ahead) + 1, sample_index=made, prefill=False
        )
        assert len(passed.tokens) == len(ahead) + 1
        assert passed.took_s >= 0
        agreed = 0
        while agreed < len(ahead) and ahead[agreed] == passed.tokens[agreed]:
            agreed += 1
        told.tokens += passed.tokens[: agreed + 1]
        told.passes += 1
        told.accepted += agreed
    return told
