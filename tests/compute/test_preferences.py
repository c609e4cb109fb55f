"""DPO: its loss and steps beside the formula on transformers' and peft's own model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from p2ptrain.compute.data import TARGET, Corpus, DataSpec, load_corpus
from p2ptrain.compute.flat import OptimizerSpec
from p2ptrain.compute.local import LocalSpec
from p2ptrain.compute.model import ModelSpec
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.compute.trainer import Trainer
from p2ptrain.compute.tuning import TuningSpec
from p2ptrain.core.errors import UserError
from tests.compute.saving import save
from tests.compute.test_optimizer import step_together
from tests.compute.test_tuning import opened
from tests.compute.tiny_trainer import MICRO_BATCHES, run_step, state_bytes, tiny_trainer, validate_all

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # in peft

BETA, STEPS = 0.4, 4
OPTIMIZER = OptimizerSpec(lr=5e-3, warmup_steps=0, min_lr_ratio=1.0, clip_norm=0.0)
PAIRS = [(f"add {n} and {n}: ", str(2 * n), "I do not know " * (n % 3) + "x") for n in range(80)]


def written(path: Path, pairs: list[tuple[Any, Any, Any]]) -> Path:
    rows = [dict(zip(("prompt", "chosen", "rejected"), pair, strict=True)) for pair in pairs]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def settings(base: Path, tmp_path: Path) -> dict[str, Any]:
    data = DataSpec(path=str(written(tmp_path / "pairs.jsonl", PAIRS)), sequence_tokens=48, format="preference")
    return {"model": ModelSpec(path=base), "tuning": TuningSpec(rank=4, alpha=8), "data": data, "beta": BETA,
            "optimizer": OPTIMIZER}  # fmt: skip


def answer_log_prob(model: nn.Module, prompt: str, answer: str) -> Tensor:
    """log p(answer | prompt) of a model of bytes, which sees one sequence alone and without padding."""
    ids = torch.tensor([[*prompt.encode(), *answer.encode()]])
    log_probs = model(input_ids=ids).logits[0].log_softmax(-1)
    start = len(prompt.encode())
    return torch.stack([log_probs[at - 1, ids[0, at]] for at in range(start, ids.shape[1])]).sum()


def pair_loss(policy: nn.Module, reference: nn.Module, pair: tuple[str, str, str]) -> Tensor:
    prompt, chosen, rejected = pair
    with torch.no_grad():
        before = answer_log_prob(reference, prompt, chosen) - answer_log_prob(reference, prompt, rejected)
    after = answer_log_prob(policy, prompt, chosen) - answer_log_prob(policy, prompt, rejected)
    return (1 + torch.exp(-BETA * (after - before))).log()


def pairs_of(trainer: Trainer, step: int) -> list[tuple[str, str, str]]:
    numbers = trainer.batches.window_numbers(step, 0, MICRO_BATCHES)
    return [PAIRS[number] for number in trainer.batches.corpus.training[numbers].tolist()]


def test_steps_are_those_of_the_formula_with_peft(settings: dict[str, Any], base: Path, tmp_path: Path) -> None:
    """Of one worker and of two, whose weights stay equal; and the held-out pairs."""
    from transformers import AutoModelForCausalLM

    alone, *together = (tiny_trainer(Path(), **settings) for _ in range(3))
    save(alone, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(base)
    policy = opened(base, tmp_path, is_trainable=True)
    adapters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=5e-3, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        loss = torch.stack([pair_loss(policy, reference, pair) for pair in pairs_of(alone, step)]).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
        assert run_step(alone, step) == pytest.approx(loss.item(), rel=1e-5)
        assert step_together(together, step) == pytest.approx(loss.item(), rel=1e-5)
    assert losses[0] == pytest.approx(np.log(2), abs=1e-6)
    assert losses[-1] < 0.6
    assert state_bytes(together[0]) == state_bytes(together[1])
    held_out = [PAIRS[number] for number in alone.batches.corpus.validation.tolist()]
    expected = sum(pair_loss(policy, reference, pair).item() for pair in held_out)
    assert validate_all(alone) == (pytest.approx(expected, rel=1e-4), len(held_out))


@pytest.mark.parametrize("precision", ["fp32", "bf16-weights"])
def test_inner_steps_of_local_learn_from_pairs(settings: dict[str, Any], precision: str) -> None:
    """Of one worker with an outer rate of 1 the first inner step is the step of a micro-batch."""
    local, plain = (
        tiny_trainer(Path(), **settings, micro_batches=1, local=local, precision=precision)
        for local in (LocalSpec(outer_lr=1.0, outer_momentum=0.0), None)
    )
    assert run_step(local, 0, 1) == pytest.approx(run_step(plain, 0, 1), rel=1e-6)
    torch.testing.assert_close(local.built.flat.parameters, plain.built.flat.parameters, rtol=0, atol=1e-6)


def _tokens(corpus: Corpus) -> list[list[tuple[str, str]]]:
    """For each pair, of both sequences: the whole text, and what of it is learned."""
    width, made = corpus.sequence_tokens + 1, []
    for ids, marks in zip(corpus.tokens.reshape(-1, width), corpus.marks.reshape(-1, width), strict=True):  # type: ignore[union-attr]
        made.append((bytes(ids.tolist()).decode().rstrip("\0"), bytes(ids[(marks & TARGET) > 0].tolist()).decode()))
    return [made[at : at + 2] for at in range(0, len(made), 2)]


def test_only_the_answers_are_learned_of_texts_and_of_messages(tmp_path: Path) -> None:
    question, good, bad = ({"role": role, "content": text} for role, text in
                           (("user", "2+2?"), ("assistant", "4"), ("assistant", "five")))  # fmt: skip
    earlier = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    path = written(tmp_path / "x.jsonl", [("a", "b", "c"), ([*earlier, question], [good], [bad])])
    spec = DataSpec(path=str(path), sequence_tokens=96, format="preference")
    found = _tokens(load_corpus(spec, Tokenizer.of_bytes(), 256))
    assert found[0] == [("ab", "b"), ("ac", "c")]
    text = "User: hi\nAssistant: hello\nUser: 2+2?\nAssistant:"
    assert found[1] == [(f"{text} 4\nUser:", " 4\nUser:"), (f"{text} five\nUser:", " five\nUser:")]


def test_rows_that_are_no_pair_are_named(tmp_path: Path) -> None:
    spec = DataSpec(path=str(tmp_path / "x.jsonl"), sequence_tokens=8, format="preference", bad_rows=1.0)
    bad = [("a", "b", 3), ("a", "b", [{"role": "assistant", "content": "c"}]), ("too long a prompt", "b", "c"),
           ([{"role": "user", "content": "a"}],) * 3]  # fmt: skip
    written(tmp_path / "x.jsonl", [("a", "b", "c"), *bad, ("d", "e", "f")])
    with (tmp_path / "x.jsonl").open("a") as file:
        file.write("\nno json")
    corpus = load_corpus(spec, Tokenizer.of_bytes(), 256)
    assert [pair[0][0] for pair in _tokens(corpus)] == ["ab", "de"]
    assert corpus.note.startswith("5 of 7 rows of the data are left out")
    assert f"{tmp_path}/x.jsonl:2 is no pair of answers" in corpus.note
    with pytest.raises(UserError, match="5 of 7 rows cannot be used"):
        load_corpus(spec.model_copy(update={"bad_rows": 0.01}), Tokenizer.of_bytes(), 256)
