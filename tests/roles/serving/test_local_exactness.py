"""A whole target against transformers' ``generate`` of the same files: token for token, whatever drafts were tried."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from p2ptrain.core.serving import Sampling
from p2ptrain.core.world import LoopClock
from roles.compute_thread import ComputeThread
from roles.serving.local_model import LocalModel, load_local_engine
from roles.serving.model import PassRequest
from tests.compute.families import VOCAB, make

from .decoding import decode

PROMPT = [(7 * index * index) % VOCAB for index in range(9)]
TOKENS = 24
SAMPLINGS = [
    Sampling(temperature=0),
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.8, top_k=50, seed=2),
    Sampling(temperature=1.3, top_k=40, top_p=0.9, seed=3),
    Sampling(temperature=0.9, top_p=0.7, seed=4),
    Sampling(temperature=0.9, top_k=40, min_p=0.02, repetition_penalty=1.3, seed=5),
]
DRAFTS = [(0, 0.0), (4, 0.7), (16, 0.9), (8, 0.0)]  # how many at a time, and how often they are right


def generated(whole: Any, sampling: Sampling) -> list[int]:
    x = torch.tensor([PROMPT])
    shape = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
    drawn: dict[str, Any] = {"do_sample": True, **shape} if sampling.temperature else {"do_sample": False}
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(sampling.seed)
        out = whole.generate(
            x, attention_mask=torch.ones_like(x), max_new_tokens=TOKENS, pad_token_id=0, use_cache=True, **drawn
        )
    return [int(token) for token in out[0, len(PROMPT) :]]


@pytest.fixture(params=["llama-tied", "qwen2", "gpt2", "mistral-window"])
async def loaded(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[Any, LocalModel]]:
    whole = make(request.param, tmp_path)
    heard: list[tuple[int, int]] = []
    compute = ComputeThread()
    engine, context = await load_local_engine(
        tmp_path, compute, device="cpu", on_bytes=lambda *both: heard.append(both)
    )
    target = LocalModel(engine, compute, LoopClock(), context=context)
    assert heard[-1][0] == heard[-1][1]
    assert (target.context, target.vocab_size) == (128, VOCAB)
    yield whole, target
    await target.close()


async def test_the_tokens_are_those_of_generate(loaded: tuple[Any, LocalModel]) -> None:
    whole, target = loaded
    for sampling, patterns in zip(
        SAMPLINGS, (DRAFTS, DRAFTS[1:3], DRAFTS[1:2], DRAFTS[1:2], DRAFTS[2:3], DRAFTS[1:2]), strict=True
    ):
        wanted = generated(whole, sampling)
        accepted = 0
        for drafts, right in patterns:
            session = await target.open(positions=64, sampling=sampling, sample_from=1)
            made = await decode(
                session, PROMPT, wanted, drafts=drafts, right=right, vocab_size=VOCAB, chunk=4 + drafts, seed=drafts
            )
            await session.close()
            accepted += made.stats.accepted
        assert accepted > 10


@pytest.mark.parametrize("loaded", ["mistral-window"], indirect=True)
async def test_a_session_is_used_again_for_a_text_with_the_same_prefix(loaded: tuple[Any, LocalModel]) -> None:
    """As a chat's next turn does: the history is cut to what both have, and draws begin anew."""
    whole, target = loaded
    sampling = SAMPLINGS[2]
    wanted = generated(whole, sampling)
    session = await target.open(positions=64, sampling=sampling, sample_from=1)
    await session.append(PassRequest(0, (*PROMPT[:6], 1, 2, 3), 1))
    await decode(session, PROMPT, wanted, drafts=4, cached=6, vocab_size=VOCAB)
