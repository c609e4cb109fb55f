"""The loops of torch that benchmarks measure beside this project."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from p2ptrain.compute.device import pick_device
from p2ptrain.compute.rivals import TorchTrainer, TransformersWriter
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.core.errors import JobFailed
from p2ptrain.core.serving import Sampling
from tests.compute.families import VOCAB, generated, make
from tests.compute.tiny_trainer import MICRO_BATCHES, run_step, tiny_spec, tiny_trainer

STEPS = 3


def losses_of(kind: str, text: Path, **changes: Any) -> list[float]:
    rival = TorchTrainer(tiny_spec(text, **changes), pick_device("cpu", 1), kind)
    for step in range(STEPS):
        rival.step(step, 0, MICRO_BATCHES)
    return rival.losses()


def test_the_plain_loop_learns_what_a_worker_learns_in_each_precision(text_file: Path) -> None:
    found = {}
    for precision in ("fp32", "tf32", "bf16"):
        trainer = tiny_trainer(text_file, precision=precision)
        found[precision] = losses_of("plain", text_file, precision=precision)
        assert found[precision] == pytest.approx([run_step(trainer, step) for step in range(STEPS)], rel=2e-6)
    assert found["fp32"] != found["bf16"]


def test_the_compiled_loop_compiles_the_model_with_its_loss(text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[torch.Size] = []

    def compile_by_hand(function: Any) -> Any:
        def compiled(batch: Any) -> torch.Tensor:
            result: torch.Tensor = function(batch)
            shapes.append(result.shape)
            return result

        return compiled

    expected = losses_of("plain", text_file)
    monkeypatch.setattr(torch, "compile", compile_by_hand)
    assert losses_of("compiled", text_file) == expected
    assert shapes == [torch.Size([])] * STEPS * MICRO_BATCHES


def test_a_model_that_does_not_compile_is_told_with_a_remedy(text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(batch: Any) -> torch.Tensor:
        raise RuntimeError("no working C++ compiler")

    monkeypatch.setattr(torch, "compile", lambda function: fail)
    with pytest.raises(JobFailed, match=r"compiled loop: .*no working C\+\+ compiler") as caught:
        losses_of("compiled", text_file)
    assert "--no-compiled" in caught.value.remedy


def test_a_padded_batch_writes_the_texts_of_each_prompt_alone(tmp_path: Path) -> None:
    whole = make("llama", tmp_path)
    Tokenizer.of_words(VOCAB).save(tmp_path)
    writer = TransformersWriter(tmp_path, None, threads=1, texts=3, positions=64)
    prompts = [writer.prompt(seed, tokens) for seed, tokens in enumerate((20, 5, 11))]
    ids = [[int(word.removeprefix("w")) for word in prompt.split()] for prompt in prompts]
    made, seconds = writer.write(prompts, 9)
    alone = [generated(whole, row, 9, Sampling(temperature=0)) for row in ids]
    assert [text.split() for text in made] == [[f"w{token}" for token in row] for row in alone]
    assert seconds > 0
