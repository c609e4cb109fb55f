"""The model of ``bench chain``: made on the spot, and generated with as a whole, by transformers itself."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from p2ptrain.compute.generate import LocalModel
from p2ptrain.compute.model import ModelSpec, build_model
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.core.serving import Sampling

HEAD_DIM = 64
SEED = 1

Answer = dict[str, Any]


async def make(directory: str, *, layers: int, width: int, vocab: int, context: int) -> Answer:
    """A random model of Llama's architecture in ``directory``: what its files weigh. Raises ``ConfigError``."""
    return await asyncio.to_thread(_make, Path(directory), layers, width, vocab, context)


def _make(directory: Path, layers: int, width: int, vocab: int, context: int) -> Answer:
    heads = max(1, width // HEAD_DIM)
    spec = ModelSpec(
        hidden_size=width,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        intermediate_size=width * 8 // 3 // 8 * 8,
        context=context,
        tie_embeddings=False,
    )
    build_model(spec, vocab, seed=SEED).save_pretrained(directory)
    Tokenizer.of_bytes().save(directory)
    return {"weights_bytes": sum(path.stat().st_size for path in directory.glob("*.safetensors"))}


async def generate(directory: str, *, ids: list[int], tokens: int, sampling: dict[str, Any]) -> Answer:
    """What transformers' ``generate`` makes: ``ids``, and when each came, in seconds from the beginning, in
    ``at_s``. The whole model is loaded for it and forgotten again. Raises ``P2PTrainError``."""
    return await asyncio.to_thread(_generate, Path(directory), ids, tokens, Sampling(**sampling))


def _generate(directory: Path, ids: list[int], tokens: int, sampling: Sampling) -> Answer:
    model = LocalModel(directory, device="cpu")
    model.load()
    # The first pass loads kernels and finds its buffers: it is not counted.
    model.tokens(ids[:2], max_new_tokens=2, sampling=sampling, on_token=lambda token: True)
    made: list[int] = []
    at_s: list[float] = []
    began = time.perf_counter()

    def take(token: int) -> bool:
        made.append(token)
        at_s.append(time.perf_counter() - began)
        return True

    model.tokens(ids, max_new_tokens=tokens, sampling=sampling, on_token=take)
    return {"ids": made, "at_s": at_s}
