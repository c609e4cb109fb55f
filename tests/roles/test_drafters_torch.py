"""Real models on both sides: a drafter with the verifier's own model is right nearly always, with any sampling."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from p2ptrain.compute.whole_part import load_whole
from p2ptrain.core.serving import Sampling
from roles.drafter.testing import DrafterHost, around_of, drafter_hosts, model_serves, write
from roles.verifier.drafter_link import Tokens
from roles.verifier.drafters import Drafters
from roles.verifier.drafting_source import NoDrafters
from tests.compute.families import VOCAB, make
from wire.memory import MemoryNetwork
from wire.virtual import run_virtual

PROMPT = [(7 * index * index) % VOCAB for index in range(9)]


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(temperature=0.8, top_k=50, seed=2)])
def test_both_pick_the_same(tmp_path: Path, sampling: Sampling) -> None:
    make("llama-tied", tmp_path)
    target, engine = load_whole(tmp_path, device="cpu"), load_whole(tmp_path, device="cpu")

    async def main() -> None:
        network = MemoryNetwork()
        host = DrafterHost("d", network.at("d"), model_serves(engine, tokenizer="a", context=engine.context or 0))
        source = Drafters(around_of(network.at("v")), Tokens(VOCAB, "a"), look_up=False)
        plain = await write(NoDrafters(), PROMPT, 40, sampling, target=target)
        async with drafter_hosts([host]):
            source.here([host.at])
            await asyncio.sleep(1)  # virtual
            drafted = await write(source, PROMPT, 40, sampling, target=target)
            await source.close()
        assert drafted.tokens == plain.tokens
        assert drafted.stats.alpha > 0.9
        assert drafted.stats.passes < 30
        assert plain.stats.passes == 39

    run_virtual(main())
