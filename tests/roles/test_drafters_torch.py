"""Real models on both sides: a drafter with the verifier's own model is right nearly always, with any sampling."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from p2ptrain.compute.served_part import load_whole
from p2ptrain.core.serving import Sampling
from p2ptrain.lab.memory import MemoryNetwork, run_virtual
from roles.serving.model import DecodingStats
from roles.verifier.drafters import Drafters
from tests.compute.families import VOCAB, make, opened
from tests.roles.drafter_hosts import DrafterHost, Written, around_of, drafter_hosts, model_serves, write

PROMPT = [(7 * index * index) % VOCAB for index in range(9)]


DRAWN = Sampling(temperature=0.8, top_k=50, seed=2)
TOKENS = 40


def share_right(stats: DecodingStats) -> float:
    return stats.right / stats.judged


def alone_and_drafted(verifier: Path, drafter: Path, sampling: Sampling) -> tuple[Written, Written]:
    """The same text without a drafter, and with one."""
    target, engine = load_whole(verifier, device="cpu"), load_whole(drafter, device="cpu")

    async def main() -> tuple[Written, Written]:
        network = MemoryNetwork()
        host = DrafterHost("d", network.at("d"), model_serves(engine, tokenizer="a", context=engine.context or 0))
        source = Drafters(around_of(network.at("v")), target.vocab_size, "a")
        plain = await write(None, PROMPT, TOKENS, sampling, target=target)
        async with drafter_hosts([host]):
            source.update_list([host.at])
            await asyncio.sleep(1)  # virtual
            drafted = await write(source, PROMPT, TOKENS, sampling, target=target)
            await source.close()
        return plain, drafted

    return run_virtual(main())


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), DRAWN])
def test_both_pick_the_same(tmp_path: Path, sampling: Sampling) -> None:
    make("llama-tied", tmp_path)
    plain, drafted = alone_and_drafted(tmp_path, tmp_path, sampling)
    assert drafted.tokens == plain.tokens
    assert share_right(drafted.stats) > 0.9
    assert drafted.stats.passes < 30
    assert plain.stats.passes == TOKENS - 1


def save_padded(directory: Path, *, likely: float) -> None:
    """Models of one tokenizer, in directories of their sizes: beyond its tokens there are some that no text has, unless
    they are ``likely``."""
    make("llama", directory / "whole", vocab_size=VOCAB + 17)
    for size in (VOCAB, VOCAB + 17):
        model = opened(directory / "whole")
        with torch.no_grad():
            model.lm_head.weight[VOCAB:] *= likely
        model.resize_token_embeddings(size, mean_resizing=False)
        model.save_pretrained(directory / str(size))


def test_a_drafter_outlives_tokens_that_it_does_not_know(tmp_path: Path) -> None:
    save_padded(tmp_path, likely=2.0)
    plain, drafted = alone_and_drafted(tmp_path / str(VOCAB + 17), tmp_path / str(VOCAB), DRAWN)
    assert drafted.tokens == plain.tokens
    unknown = [at for at, token in enumerate(plain.tokens) if token >= VOCAB]
    assert unknown
    assert unknown[0] < TOKENS / 2
    assert drafted.stats.drafted > TOKENS / 2, "it drafts on behind them"


@pytest.mark.parametrize(("verifier", "drafter"), [(VOCAB, VOCAB + 17), (VOCAB + 17, VOCAB)])
def test_vocabularies_that_are_padded_differently_are_drawn_from_alike(
    tmp_path: Path, verifier: int, drafter: int
) -> None:
    save_padded(tmp_path, likely=0.01)
    plain, drafted = alone_and_drafted(tmp_path / str(verifier), tmp_path / str(drafter), DRAWN)
    assert drafted.tokens == plain.tokens
    if verifier == VOCAB:
        unpadded = alone_and_drafted(tmp_path / str(verifier), tmp_path / str(verifier), DRAWN)[1]
        assert share_right(unpadded.stats) == share_right(drafted.stats)
    assert share_right(drafted.stats) > 0.9
