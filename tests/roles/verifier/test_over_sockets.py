"""Texts that are written at once with several drafters, over real sockets and threads: each is the model's own, though
one drafter is mostly right and dies, one lies, and one comes when texts are half written."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any

from p2ptrain.core.serving import Sampling, SamplingWish
from roles.drafter.testing import TOKENIZER, DrafterHost, Liar, around_of, model_serves, there
from roles.speculation.events import Told
from roles.speculation.received import packed
from roles.verifier.asking import Wish
from roles.verifier.drafter_link import Tokens
from roles.verifier.drafters import Drafters
from roles.verifier.testing import ScriptedTarget, reference, service
from wire.connection import Connection
from wire.speculation_messages import Drafts
from wire.transport import TcpNetwork

from .test_several_texts import Often

LOOPBACK, PATIENCE_S = "127.0.0.1", 60.0
VOCAB, TOKENS = 256, 100
SAMPLINGS = [Sampling(0.0), Sampling(1.0, 20, 1.0, 1), Sampling(0.0), Sampling(0.7, 0, 0.9, 3)]
"""One for each text."""
DIES_AT, ANOTHER_AT = 40, 80
"""Passes of all texts together: then the good one dies; then nothing is computed until another drafts."""


def lies(stream: int, verdict: Told | None, number: int, connection: Connection) -> None:
    """By the rules at first, though wrong, and then from where it may not."""
    if verdict is not None:
        at = verdict.start + len(verdict.tokens) + (1000 if number > 1 else 0)
        connection.send(Drafts(at, packed([7, 7], VOCAB)), generation=number, stream=stream)


async def test_four_texts_and_three_drafters_that_come_and_go(tmp_path: Path) -> None:
    loop, network = asyncio.get_running_loop(), TcpNetwork()
    told, news, drafts = list[str](), asyncio.Event(), asyncio.Event()
    tasks: dict[str, asyncio.Task[None]] = {}

    def notify(level: str, kind: str, text: str) -> None:
        told.append(text)
        news.set()

    def on_run(session: str, keep: int, count: int) -> None:
        if count <= 2:  # behind the prompt
            loop.call_soon_threadsafe(drafts.set)

    def host(name: str, **options: Any) -> DrafterHost:
        serves = model_serves(Often(5, **options), tokenizer=TOKENIZER)
        return DrafterHost(name, network, serves, host=LOOPBACK)

    good, another = host("good"), host("another", on_run=on_run)
    bad = Liar("bad", network, lies, host=LOOPBACK, vocab_size=VOCAB)
    around = replace(around_of(network, notify), seed_host=LOOPBACK)
    source = Drafters(around, Tokens(VOCAB, TOKENIZER), look_up=False)

    async def comes() -> None:
        await another.start()
        source.here([bad.at, another.at])

    async def held(task: asyncio.Task[None]) -> None:
        await task
        await drafts.wait()

    def before(count: int) -> Awaitable[None] | None:
        if count == DIES_AT:
            tasks["dies"] = asyncio.create_task(good.stop())
        if count < ANOTHER_AT:
            return None
        if "comes" not in tasks:
            tasks["comes"] = asyncio.create_task(comes())
        return held(tasks["comes"])

    serving = service(tmp_path, ScriptedTarget(pass_s=0.001, before=before), source, sessions=len(SAMPLINGS), kept=0)

    async def text(number: int, sampling: Sampling) -> tuple[list[int], list[str]]:
        wished = SamplingWish(sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed)
        writing = await serving.write(Wish(f"text {number}", max_new_tokens=TOKENS, sampling=wished))
        tokens = [token async for piece in writing for token in piece.tokens]
        return tokens, [each["peer_id"] for each in writing.stats()["drafters"]]

    async with asyncio.timeout(PATIENCE_S):
        await good.start()
        await bad.start()
        source.here([good.at, bad.at])
        while len(there(source)) < 2:
            news.clear()
            await news.wait()
        texts = await asyncio.gather(*(text(number, sampling) for number, sampling in enumerate(SAMPLINGS)))
        await tasks["dies"]
        assert there(source) == ["another"]
        await source.close()
        await serving.close()
        await bad.stop()
        await another.stop()
    for number, sampling in enumerate(SAMPLINGS):
        assert texts[number][0] == list(reference(f"text {number}", TOKENS, sampling))
        assert {"good", "bad"} <= set(texts[number][1])
    assert any("another" in peers for _, peers in texts)
    assert sum("drafter bad: it drafts what cannot be" in each for each in told) == 1
    assert any(each.startswith("drafter good: ") for each in told), "that it died"
