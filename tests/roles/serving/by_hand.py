"""Decoding by hand over any target: plain, and with drafts that are right or wrong as a number decides."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from roles.serving.model import ModelSession, PassRequest


@dataclass
class DecodedText:
    """What came of it.

    Attributes:
        tokens: new ones. passes: after the prompt. accepted: drafts that were right.
    """

    tokens: list[int]
    passes: int = 0
    accepted: int = 0


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
    kept: int = 0,
) -> DecodedText:
    """As many tokens as ``wanted`` has.

    Args:
        wanted: what drafts are copied from, each with chance ``right``; others are any number.
        drafts: in a pass, at most; it has any number of them from 0 on. 0: plain decoding.
        chunk: positions of the prompt in a pass. kept: of the prompt, which the session has.
    """
    session.sample_from = len(prompt)
    rng = random.Random(seed)
    made_text, picked = DecodedText([]), tuple[int, ...]()
    for start in range(kept, len(prompt), chunk):
        ids = prompt[start : start + chunk]
        last = start + chunk >= len(prompt)
        picked = (await session.append(PassRequest(start, tuple(ids), int(last)))).tokens
        assert len(picked) == int(last)
    made_text.tokens += picked
    while len(made_text.tokens) < len(wanted):
        made = len(made_text.tokens)
        count = rng.randrange(drafts + 1) if drafts else 0
        ahead = list(wanted[made : min(made + count, len(wanted) - 1)])
        ahead = [token if rng.random() < right else rng.randrange(vocab_size) for token in ahead]
        keep = len(prompt) + made - 1
        passed = await session.append(PassRequest(keep, (made_text.tokens[-1], *ahead), len(ahead) + 1))
        assert len(passed.tokens) == len(ahead) + 1
        assert passed.took_s >= 0
        agreed = 0
        while agreed < len(ahead) and ahead[agreed] == passed.tokens[agreed]:
            agreed += 1
        made_text.tokens += passed.tokens[: agreed + 1]
        made_text.passes += 1
        made_text.accepted += agreed
    return made_text
