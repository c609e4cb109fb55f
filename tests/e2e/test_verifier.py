"""A verifier and a drafter, real processes: the text is transformers' own, whoever drafts, and whoever is killed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from p2ptrain.compute.model import build_model, load_model
from p2ptrain.compute.tokenizer import Tokenizer
from tests.compute.tiny_trainer import tiny
from wire.client import SeedClient
from wire.transport import TcpNetwork

from .conftest import DEADLINE_S, Machine
from .terminal import Terminal

CONTEXT = 60_000
PROMPTS = ["Once upon a time", "0, 1, 1, 2, 3, 5, 8"]
SAMPLED = {"temperature": 0.9, "top_k": 40, "top_p": 0.95}


def reference(checkpoint: Path, prompt: str, tokens: int, seed: int | None) -> list[int]:
    """What ``transformers.generate`` writes with the whole model; ``seed`` None: greedily."""
    model: Any = load_model(checkpoint).eval()
    ids = torch.tensor([list(prompt.encode())])
    shape: dict[str, Any] = {"do_sample": False} if seed is None else {"do_sample": True, **SAMPLED}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed or 0)
        made = model.generate(ids, max_new_tokens=tokens, pad_token_id=0, **shape)
    found: list[int] = made[0, ids.shape[1] :].tolist()
    return found


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


@pytest.fixture
def chatting() -> Iterator[Callable[..., Terminal]]:
    """``p2ptrain chat`` at a terminal, with these arguments."""
    begun: list[Terminal] = []

    def begin(*arguments: str) -> Terminal:
        begun.append(Terminal("chat", *arguments))
        return begun[-1]

    yield begin
    for terminal in begun:
        terminal.end()


async def test_texts_of_a_verifier_and_what_is_left_when_it_is_killed(
    machine: Machine, tmp_path: Path, chatting: Callable[..., Terminal]
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
        expected = [text_of(reference(checkpoint, prompt, 40, random_seed)) for prompt in PROMPTS]
        for alone in ([], ["--no-speculation"]):
            code, said = await machine.run(*asked, *alone, "--json")
            assert code == 0, said
            document = json.loads(said)
            assert [text["text"] for text in document["texts"]] == expected
            assert all(text["stats"]["tokens"] == 40 for text in document["texts"])

    # The drafter is killed, and nobody sees that; then the verifier, and what was said stays.
    chat = chatting("--seed", seed, "-n", "50000", "--temperature", "0")
    await asyncio.to_thread(chat.until, r"/help lists commands\).*> ")
    chat.type("hello\n")
    await asyncio.to_thread(chat.until, r"hello\r\n.{40}")
    writing = await machine.start("generate", PROMPTS[0], "--seed", seed, "--temperature", "0", "-n", "50000")
    begun = (await served(machine, lambda big: big["sessions"] == 2))["stats"]["tokens"]
    drafted = await served(machine, lambda big: big["drafters"] and big["stats"]["tokens"] > begun + 20)
    await drafter.kill()
    await served(machine, lambda big: big["stats"]["tokens"] > drafted["stats"]["tokens"] + 400)  # of both
    await verifier.kill()
    assert await writing.end() == 3
    expected_text = PROMPTS[0] + text_of(reference(checkpoint, PROMPTS[0], 20, None))
    assert "\n".join(writing.out).startswith(expected_text.rstrip("\ufffd").rstrip())
    lost = await writing.until(r"the verifier big was lost in the middle of a text: .*; (\d+) tokens")
    assert int(lost[1]) > 20
    await writing.until("→ try again when it is back")

    # A conversation says so, and goes on as soon as the verifier is back.
    await asyncio.to_thread(chat.until, r"the verifier big was lost in the middle of a text.*> ")
    chat.type("hello\n")
    await asyncio.to_thread(chat.until, r"waiting for the verifier big")
    await machine.join("--role", "verifier", *model, "--name", "big")
    await asyncio.to_thread(chat.until, r"\r\n?[^\r\n]{40}")
    chat.type("\x03")
    await asyncio.to_thread(chat.until, r"cancelled.*> ")
    chat.type("\x04")
    assert (await asyncio.to_thread(chat.left))[0] == 0
