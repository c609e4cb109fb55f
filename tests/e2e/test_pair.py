"""A model and its drafter: trained, then served by real processes, in one command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from p2ptrain.compute.text import ModelText
from p2ptrain.core.serving import Sampling
from tests.compute.families import generated, opened
from tests.e2e.conftest import gone

pytestmark = pytest.mark.slow

SIZES = {"hidden_size": 16, "heads": 2, "kv_heads": 2, "intermediate_size": 32, "steps": 10}
TOKENS = 40


async def test_a_pair_is_trained_and_the_larger_one_writes_its_own_text(machine: Any) -> None:
    drafter = {f"drafter__{name}": value for name, value in SIZES.items()}
    settings = machine.settings(job__steps=20, job__workers=1, **drafter)
    home = {"XDG_STATE_HOME": str(machine.root / "home")}
    arguments = ["up", "--profile", "pair", "--workers", "1", "--state", str(machine.root / "up"), "--json", *settings]
    process = await machine.start(*arguments, **home)
    await process.until(r"^}$")
    said = json.loads("\n".join(process.out))
    assert (said["state"], said["drafter"]["step"], said["verifier"]["step"]) == ("serving", 10, 20)
    ask = ["generate", "def ", "--tokens", str(TOKENS), "--temperature", "1", "--random-seed", "3", "--top-k", "0"]
    writing = await machine.start(*ask, "--json", "--seed", said["seed"], **home)
    assert await writing.end() == 0, writing.text + process.text
    answer = json.loads("\n".join(writing.out))
    directory = Path(said["verifier"]["checkpoint"])
    text = ModelText(directory)
    sampling = Sampling(temperature=1.0, top_k=0, top_p=1.0, seed=3)
    alone = generated(opened(directory), text.prompt_ids("def "), TOKENS, sampling)
    assert (answer["text"], answer["tokens"]) == (text.tokenizer.backend.decode(alone), TOKENS)
    children = psutil.Process(process.process.pid).children(recursive=True)
    assert await process.interrupt() == 0, process.text
    assert await gone(children)
