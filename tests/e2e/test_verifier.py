"""A verifier and a drafter, real processes: the text is transformers' own, whoever drafts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from p2ptrain.compute.model import build_model
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.core.serving import Sampling
from tests.compute.families import generated, opened
from tests.compute.tiny_trainer import tiny
from wire.client import SeedClient
from wire.transport import TcpNetwork

from .conftest import DEADLINE_S, Machine

CONTEXT = 60_000
PROMPTS = ["Once upon a time", "0, 1, 1, 2, 3, 5, 8"]


def text_of(tokens: list[int]) -> str:
    return bytes(tokens).decode(errors="replace")


async def served(machine: Machine, fits: Callable[[dict[str, Any]], object], count: int = 1) -> dict[str, Any]:
    """What the verifier serves, as soon as that fits; ``count``: members that serve by then."""
    client = await SeedClient.connect(TcpNetwork(), "127.0.0.1", machine.port, name="test")
    known: dict[str, dict[str, Any]] = {}
    try:
        async with asyncio.timeout(DEADLINE_S):
            await client.request("subscribe")
            async for update in client.updates():
                known |= {item["id"]: item for item in update.items if update.topic == "serving"}
                big = next((item for item in known.values() if item["role"] == "verifier"), None)
                if big is not None and len(known) >= count and fits(big):
                    return big
    except TimeoutError:
        raise AssertionError(f"it never got there: {known}\n{machine.said()}") from None
    finally:
        await client.close()
    raise AssertionError("the updates ended")


async def test_verifier_writes_the_text_of_transformers_with_a_drafter_and_without(
    machine: Machine, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "model"
    build_model(tiny(layers=2, context=CONTEXT), 256, seed=1).save_pretrained(checkpoint)
    Tokenizer.of_bytes().save(checkpoint)
    await machine.seed()
    seed = f"127.0.0.1:{machine.port}"
    model = ["--model", str(checkpoint), "--threads", "1"]
    verifier = await machine.join("--role", "verifier", *model, "--name", "big")
    drafter = await machine.join("--role", "drafter", *model, "--name", "small")
    await verifier.until("model writes text in fp32, 60000 tokens of context")
    await drafter.until(r"model drafts on cpu \(1 thread\) in fp32")
    await served(machine, lambda big: True, 2)

    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    for random_seed in (None, 7):
        shape = ["--temperature", "0.9", "--top-k", "40", "--top-p", "0.95", "--random-seed", "7"]
        drawn = ["--temperature", "0"] if random_seed is None else shape
        asked = ["generate", "--prompts", str(prompts), "--seed", seed, "-n", "40", *drawn]
        sampling = Sampling(temperature=0) if random_seed is None else Sampling(0.9, 40, 0.95, random_seed)
        whole = opened(checkpoint)
        expected = [text_of(generated(whole, list(prompt.encode()), 40, sampling)) for prompt in PROMPTS]
        for alone in ([], ["--no-speculation"]):
            code, said = await machine.run(*asked, *alone, "--json")
            assert code == 0, said
            document = json.loads(said)
            assert [text["text"] for text in document["texts"]] == expected
            assert all(text["stats"]["tokens"] == 40 for text in document["texts"])
