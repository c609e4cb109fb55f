"""Texts that are written at once, with one drafter over a network: each is the model's own, and all are sooner done."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.compute.text import ChatFormat
from p2ptrain.core.disk import RealDisk
from p2ptrain.core.serving import Ran, SamplingWish
from p2ptrain.core.world import LoopClock, World
from roles.compute_thread import ComputeThread
from roles.verifier.asking import TextRequest
from roles.verifier.drafter_link import Tokens
from roles.verifier.drafters import Drafters
from roles.verifier.service import ServiceOptions, VerifierService
from roles.verifier.targets import WholeTarget
from tests.roles.drafter_hosts import PORT, DrafterHost, around_of, drafter_hosts, model_serves
from tests.roles.stage_doubles import LoopThreads
from tests.roles.stage_stand_in import StandInStage, stand_in_part
from tests.roles.verifier.doubles import CONFIG, model_text
from wire.emulate import EmulatedNetwork, LinkPreset
from wire.memory import MemoryNetwork, run_virtual
from wire.text_messages import DrafterAt

VOCAB, TOKENS, PASS_S = 256, 64, 0.05
TOKENIZER = "bytes"


class Often:
    """The verifier's model, wrong in one of so many places."""

    def __init__(self, wrong_every: int, **options: Any) -> None:
        self._whole: StandInStage = stand_in_part(CONFIG, 0, 2, **options)
        self._wrong_every = wrong_every

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def run(self, session: str, **how: Any) -> Ran:
        """As of ``StageEngine``."""
        ran = self._whole.run(session, **how)
        wrong = (how["keep"] + how["count"]) % self._wrong_every == 0
        return Ran(ran.payload, tuple((token + wrong) % VOCAB for token in ran.tokens))


async def _read(serving: VerifierService, number: int, speculate: bool) -> list[int]:
    wish = TextRequest(
        f"text {number}", max_new_tokens=TOKENS, sampling=SamplingWish(temperature=0.0), speculate=speculate
    )
    return [token async for piece in await serving.write(wish) for token in piece.tokens]


async def _all(serving: VerifierService, texts: Sequence[int], speculate: bool) -> tuple[list[list[int]], float]:
    """The texts, and how long they took."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    read = await asyncio.gather(*(_read(serving, number, speculate) for number in texts))
    return list(read), loop.time() - began


@pytest.mark.parametrize(("wrong_every", "most"), [(6, 0.6), (1, 1.05)])
@pytest.mark.parametrize("round_trip_ms", [0, 80])
def test_texts_at_once(tmp_path: Path, wrong_every: int, most: float, round_trip_ms: int) -> None:
    async def scene() -> None:
        memory, preset = MemoryNetwork(), LinkPreset("emulated", round_trip_ms / 2, 0)
        threads, engine = LoopThreads(), stand_in_part(CONFIG, 0, 2)
        threads.call_s["compute"] = PASS_S
        network = EmulatedNetwork(memory.at("verifier"), preset, seed=1)
        world = World(LoopClock(), network, RealDisk(), random.Random(1), threads)
        source = Drafters(around_of(network), Tokens(VOCAB, TOKENIZER))
        text = model_text(tmp_path)
        serving = VerifierService(
            world,
            WholeTarget(engine, ComputeThread(threads), world.clock, label="stand-in", context=600),
            text,
            form=ChatFormat(text),
            model="stand-in",
            created=0,
            drafters=source,
            options=ServiceOptions(kept=0),
        )
        serves = model_serves(Often(wrong_every), tokenizer=TOKENIZER)
        host = DrafterHost("d", EmulatedNetwork(memory.at("d"), preset, seed=2), serves)
        await serving.warm_up()
        async with drafter_hosts([host]):
            source.here([DrafterAt("d", "d", "d", PORT, "a model", VOCAB, TOKENIZER)])
            await asyncio.sleep(3)  # of virtual time: it is measured how far away it is
            for texts in ((1, 2, 3), (4, 5)):
                alone, alone_s = await _all(serving, texts, False)
                drafted, drafted_s = await _all(serving, texts, True)
                assert drafted == alone
                assert drafted_s <= most * alone_s
            assert not serving.cost_model.sessions
            assert serving.cost_model.step_s == pytest.approx(PASS_S, rel=0.2)
            await source.close()
        await serving.close()

    run_virtual(scene())
