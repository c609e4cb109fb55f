"""``up`` trains a model in parts, says how far, and leaves one model that transformers opens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.slow

STEPS = 40
SPLIT = ["--set", "job.strategy=pipeline", "--set", "pipeline.stages=2"]


async def test_up_trains_a_split_model(machine: Any) -> None:
    arguments = ["up", "--state", str(machine.root), *machine.settings(job__steps=STEPS), *SPLIT]
    process = await machine.start(*arguments, "--json")
    assert await process.end() == 0, process.text
    summary = json.loads("\n".join(process.out))
    assert (summary["state"], summary["step"], summary["steps"]) == ("done", STEPS, STEPS)
    assert summary["val_loss"] < 5.6  # below that of guessing among 256 bytes, ln 256 = 5.55, within its noise
    directory = Path(summary["checkpoint"])
    model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    ids = tokenizer("def f(x):", return_tensors="pt").input_ids
    assert model(ids).logits.shape == (1, 9, 256)
    code, said = await machine.run("generate", "def ", "-c", str(directory), "--tokens", "4")
    assert code == 0, said
