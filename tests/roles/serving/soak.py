"""Random requests, many at a time, some cancelled: each text must be the one that its model writes alone."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from p2ptrain.compute.text import ModelText
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.core.errors import P2PTrainError
from p2ptrain.core.serving import BLOCK_POSITIONS, SamplingOptions
from p2ptrain.core.world import World
from roles.serving.model import Decoding, PassOutcome, ServedModel
from roles.serving.text_session import PreparedText
from roles.serving.text_stats import DrafterFacts
from roles.serving.texts import TextRequest
from roles.verifier.service import ModelTextService

SAMPLINGS = ({"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 1.3, "top_k": 40, "top_p": 0.9})


@dataclass(frozen=True)
class SoakRequest:
    """A request. Its text is cancelled after ``cancelled_at`` tokens; 0: it is not. ``drafts``: most in a pass, each
    right with the chance ``right``."""

    ids: tuple[int, ...]
    tokens: int
    sampling: SamplingOptions
    cancelled_at: int
    drafts: int
    right: float


def draw_requests(rng: random.Random, count: int, *, vocab_size: int, prefixes: Sequence[int]) -> Iterator[SoakRequest]:
    """Requests whose prompts often begin alike, or have a block in common but not the block before it. ``prefixes``:
    lengths of what they have in common after the first block."""

    def words(most: int, least: int = 1) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab_size) for _ in range(rng.randint(least, most)))

    heads = [words(BLOCK_POSITIONS, BLOCK_POSITIONS) for _ in range(2)]
    bodies = [words(length, length) for length in prefixes]
    begins = [(), *(head + body for head in heads for body in bodies)]
    for number in range(count):
        begin = rng.choice(begins)
        tokens = rng.randint(1, 100 if rng.random() < 0.25 else 12)
        yield SoakRequest(
            begin[: rng.randint(0, len(begin)) if rng.random() < 0.3 else len(begin)] + words(12),
            tokens,
            SamplingOptions(**rng.choice(SAMPLINGS), seed=number),
            rng.randint(1, tokens) if rng.random() < 0.2 else 0,
            rng.choice((0, 0, 3, 6)),
            rng.choice((0.5, 0.9)),
        )


class RandomDrafts:
    """A ``DraftSource`` that knows the text, and is wrong at random."""

    def __init__(self, decoding: Decoding, request: SoakRequest, wanted: Sequence[int], rng: random.Random) -> None:
        self._decoding, self._request, self._wanted, self._rng = decoding, request, wanted, rng

    async def next_drafts(self, answer: asyncio.Future[Any] | None) -> Sequence[int] | None:
        decoding, rng, asked = self._decoding, self._rng, self._request
        if decoding.in_prompt:
            return ()
        made = len(decoding.tokens) + len(decoding.assumed)
        count = min(rng.randint(0, asked.drafts), decoding.draft_room)
        ahead = self._wanted[made : made + count]
        if ahead or not decoding.needs_drafts:
            return [token if rng.random() < asked.right else rng.randrange(3) for token in ahead]
        assert answer is not None
        await asyncio.wait({answer})
        return None

    def end_pass(self, outcome: PassOutcome) -> None: ...

    def facts(self) -> list[DrafterFacts]:
        return []

    def close(self) -> None: ...


class DraftedService(ModelTextService):
    """``sources``: by request, what makes the drafts of its next text."""

    def __init__(self, *about: Any, **options: Any) -> None:
        super().__init__(*about, **options)
        self.sources: dict[TextRequest, Callable[[Decoding], RandomDrafts]] = {}

    def draft_source(self, request: TextRequest, decoding: Decoding, prepared: PreparedText) -> RandomDrafts | None:
        make = self.sources.pop(request, None)
        return make(decoding) if make is not None else None


@dataclass
class Soak:
    """A text service over ``model``, and what came of its texts.

    Attributes:
        wanted: the text that the model alone writes to each request.
        ended: texts that ended, whole. cached: positions of prompts that were not computed again.
        failed: errors of texts.
    """

    model: ServedModel
    world: World
    directory: Path
    wanted: Mapping[SoakRequest, Sequence[int]]
    ended: int = 0
    cached: int = 0
    failed: list[P2PTrainError] = field(default_factory=list)

    async def run(self, rng: random.Random, *, at_a_time: int, pause: Callable[[], float]) -> None:
        """Write all texts, so many at a time. Raises ``AssertionError`` for the first wrong token. ``pause``: virtual
        seconds before each text."""
        about = self.world, self.model, ModelText(self.directory)
        service = DraftedService(*about, name="soak", sessions=at_a_time)
        waiting = iter(self.wanted)

        async def write_some(own: random.Random) -> None:
            for request in waiting:
                await asyncio.sleep(pause())
                try:
                    await self._write(service, request, own)
                except P2PTrainError as error:
                    self.failed.append(error)

        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(at_a_time):
                    tasks.create_task(write_some(random.Random(rng.random())))
        finally:
            await service.close()

    async def _write(self, service: DraftedService, request: SoakRequest, rng: random.Random) -> None:
        prompt = " ".join(f"w{token}" for token in request.ids)
        asked = TextRequest(prompt, max_new_tokens=request.tokens, sampling=request.sampling)
        wanted, tokens = list(self.wanted[request]), list[int]()
        if request.drafts:
            service.sources[asked] = lambda decoding: RandomDrafts(decoding, request, wanted, rng)
        session = await service.write(asked)
        async for piece in session:
            tokens += piece.tokens
            assert tokens == wanted[: len(tokens)], request
            if request.cancelled_at and len(tokens) >= request.cancelled_at:
                await session.close()
                return
        assert tokens == wanted, request
        self.ended += 1
        self.cached += int(session.stats()["cached_tokens"])


def write_words(directory: Path, vocab_size: int, context: int) -> Path:
    """What a ``ModelText`` reads, of a model whose tokens are words."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": context}))
    Tokenizer.of_words(vocab_size).save(directory)
    return directory
