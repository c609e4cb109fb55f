"""Texts that are written at once with several drafters, over real sockets and threads: each is the model's own, though
one drafter is mostly right and dies, one lies, and one comes when texts are half written."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path

from p2ptrain.core.serving import Sampling, SamplingWish
from roles.speculation.events import Told
from roles.speculation.received import packed
from roles.verifier.asking import TextRequest
from roles.verifier.drafter_link import Tokens
from roles.verifier.drafters import Drafters
from tests.roles.drafter_hosts import TOKENIZER, DrafterHost, Liar, around_of, model_serves, there
from tests.roles.verifier.doubles import ScriptedTarget, reference, service
from wire.connection import Connection
from wire.text_messages import Drafts
from wire.transport import TcpNetwork

from .test_several_texts import Often

LOOPBACK, PATIENCE_S = "127.0.0.1", 60.0
VOCAB, TOKENS = 256, 100
SAMPLINGS = [Sampling(0.0), Sampling(1.0, 20, 1.0, 1), Sampling(0.0), Sampling(0.7, 0, 0.9, 3)]
"""One for each text."""
DIES_AT, ANOTHER_AT = 40, 80
"""Passes of all texts together: then the good one dies, and another comes; each when those before it have worked."""


def lies(stream: int, verdict: Told | None, number: int, connection: Connection) -> None:
    """By the rules at first, though wrong, and then from where it may not."""
    if verdict is not None:
        at = verdict.start + len(verdict.tokens) + (1000 if number > 1 else 0)
        connection.send(Drafts(at, packed([7, 7], VOCAB)), generation=number, stream=stream)


async def test_four_texts_and_three_drafters_that_come_and_go(tmp_path: Path) -> None:
    loop, network = asyncio.get_running_loop(), TcpNetwork()
    told, news = list[str](), asyncio.Event()
    worked = {name: asyncio.Event() for name in ("good", "bad", "another")}
    tasks: dict[str, asyncio.Task[None]] = {}

    def notify(level: str, kind: str, text: str) -> None:
        told.append(text)
        news.set()

    def host(name: str) -> DrafterHost:
        engine = Often(5, on_run=lambda session, keep, count: loop.call_soon_threadsafe(worked[name].set))
        return DrafterHost(name, network, model_serves(engine, tokenizer=TOKENIZER), host=LOOPBACK)

    def says(stream: int, verdict: Told | None, number: int, connection: Connection) -> None:
        worked["bad"].set()
        lies(stream, verdict, number, connection)

    good, another = host("good"), host("another")
    bad = Liar("bad", network, says, host=LOOPBACK, vocab_size=VOCAB)
    around = replace(around_of(network, notify), seed_host=LOOPBACK, silence_s=PATIENCE_S)
    source = Drafters(around, Tokens(VOCAB, TOKENIZER))

    async def comes() -> None:
        await another.start()
        source.here([bad.at, another.at])

    async def held(count: int) -> None:
        await worked["good"].wait()
        await worked["bad"].wait()
        if "dies" not in tasks:
            tasks["dies"] = asyncio.create_task(good.stop())
        if count >= ANOTHER_AT:
            if "comes" not in tasks:
                tasks["comes"] = asyncio.create_task(comes())
            await worked["another"].wait()

    def before(count: int) -> Awaitable[None] | None:
        return held(count) if count >= DIES_AT else None

    serving = service(tmp_path, ScriptedTarget(pass_s=0.001, before=before), source, sessions=len(SAMPLINGS), kept=0)

    async def text(number: int, sampling: Sampling) -> list[int]:
        wished = SamplingWish(sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed)
        writing = await serving.write(TextRequest(f"text {number}", max_new_tokens=TOKENS, sampling=wished))
        return [token async for piece in writing for token in piece.tokens]

    async with asyncio.timeout(PATIENCE_S):
        await good.start()
        await bad.start()
        source.here([good.at, bad.at])
        while len(there(source)) < 2:
            news.clear()
            await news.wait()
        texts = await asyncio.gather(*(text(number, sampling) for number, sampling in enumerate(SAMPLINGS)))
        await tasks["dies"]
        while there(source) != ["another"]:
            news.clear()
            await news.wait()
        await source.close()
        await serving.close()
        await bad.stop()
        await another.stop()
    for number, sampling in enumerate(SAMPLINGS):
        assert texts[number] == list(reference(f"text {number}", TOKENS, sampling))
    assert sum("drafter bad: it drafts what cannot be" in each for each in told) == 1
    assert any(each.startswith("drafter good: ") for each in told), "that it died"
