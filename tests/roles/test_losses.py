"""One worker and three against a plain loop of one process: transformers and torch alone, written here."""

from __future__ import annotations

import functools
import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from configs.loader import load
from configs.schema import Profile
from p2ptrain.compute.data import NO_TARGET, load_corpus
from p2ptrain.compute.sampling import WindowSampler
from p2ptrain.compute.tokenizer import Tokenizer
from roles.strategies import strategy_of
from roles.worker.build import engine_builder
from tests.roles.in_process import Cluster

MICRO_BATCHES, SEQUENCES, TOKENS = 8, 2, 32
SETS = [
    "device.threads=1",
    "validation.every=0",
    "validation.batches=1",
    "checkpoint.every=0",
    "model.layers=2",
    "model.hidden_size=64",
    "model.intermediate_size=128",
    f"data.sequence_tokens={TOKENS}",
    f"batch.micro_batches={MICRO_BATCHES}",
    f"batch.micro_batch_sequences={SEQUENCES}",
]


def initial_model(wanted: Profile) -> LlamaForCausalLM:
    """A transformers model with this project's initial weights: what is compared is the training."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=wanted.model.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    engine = engine_builder(threads=1)(wanted)
    engine.state.load_initial()
    model.load_state_dict(engine.built.flat.model.state_dict())  # type: ignore[attr-defined]
    return model


CHAT_STEPS = 8
CHAT = [
    *SETS, f"job.steps={CHAT_STEPS}", "model.layers=3", "data.format=chat", "data.sequence_tokens=96",
    "data.validation_fraction=0.3", "optimizer.clip_norm=0.5", "optimizer.weight_decay=0", "optimizer.warmup_steps=4",
]  # fmt: skip


def conversations(path: Path) -> Path:
    """Answers are of very different lengths, several conversations fit into a window, and some micro-batches have many
    more targets than others."""
    talks = [[{"role": "user", "content": f"{number}?"},
              {"role": "assistant", "content": chr(97 + number % 26) * (1 + 60 * (number % 5 == 0) + number % 7)}]
             for number in range(400)]  # fmt: skip
    path.write_text("\n".join(json.dumps({"messages": talk}) for talk in talks))
    return path


def plain_chat_losses(wanted: Profile) -> tuple[list[float], float]:
    """One process: each conversation is computed alone, and a step's loss is divided by all its targets. Returns the
    losses of the steps, and that of the held-out windows at the end."""
    model = initial_model(wanted)
    spec = wanted.data.model_copy(update={"format": "chat", "validation_fraction": 0.3})
    corpus = load_corpus(spec, Tokenizer.of_bytes())
    sampler = WindowSampler(len(corpus.training), wanted.job.seed)
    options, losses, counts = wanted.optimizer, [], set()
    least = options.min_lr_ratio
    adamw = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)

    def mean_loss(windows: Any) -> tuple[torch.Tensor, int]:
        batch, nats, number = corpus.batch(windows), [], 0
        assert batch.positions is not None
        for inputs, targets, positions in zip(batch.inputs, batch.targets, batch.positions, strict=True):
            places = [*np.flatnonzero(positions == 0).tolist(), len(positions)]
            for start, stop in pairwise(places):
                if (targets[start:stop] != NO_TARGET).any():
                    logits = model(torch.from_numpy(inputs[None, start:stop])).logits[0]
                    wanted_ids = torch.from_numpy(targets[start:stop])
                    nats.append(F.cross_entropy(logits, wanted_ids, reduction="sum", ignore_index=NO_TARGET))
            number += int((targets != NO_TARGET).sum())
        return torch.stack(nats).sum() / number, number

    batch = MICRO_BATCHES * SEQUENCES
    for step in range(CHAT_STEPS):
        loss, number = mean_loss(corpus.training[sampler.numbered(step * batch, batch)])
        adamw.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_norm)
        adamw.param_groups[0]["lr"] = options.lr * (
            (step + 1) / 4 if step < 4 else least + (1 - least) * 0.5 * (1 + math.cos(math.pi * (step - 4) / 4))
        )
        adamw.step()
        losses.append(loss.item())
        counts.add(number)
    assert max(counts) > 1.2 * min(counts)
    return losses, mean_loss(corpus.validation[: SEQUENCES * wanted.validation.batches])[0].item()


@functools.cache
def chat_reference(path: Path) -> tuple[list[float], float]:
    return plain_chat_losses(load("tiny", {}, [*CHAT, "job.workers=1", f"data.path={path}"]).profile)


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return conversations(tmp_path_factory.mktemp("talks") / "talks.jsonl")


@pytest.mark.parametrize(
    ("workers", "sets"),
    [
        (1, []),
        (3, []),
        (3, ["job.exact=true"]),
        (3, ["job.strategy=pipeline", "pipeline.stages=3"]),
        (3, ["job.strategy=sharded", "sharded.shards=3"]),
    ],
    ids=["1-sync", "3-sync", "3-exact", "3-pipeline", "3-sharded"],
)
async def test_losses_of_conversations_are_those_of_a_loop_that_divides_by_all_tokens(
    cluster: Cluster, talks: Path, workers: int, sets: list[str]
) -> None:
    wanted = load("tiny", {}, [*CHAT, f"job.workers={workers}", f"data.path={talks}", *sets]).profile
    losses, held_out = chat_reference(talks)
    rows = await _rows(cluster, wanted)
    assert [row["loss"] for row in rows] == pytest.approx(losses, abs=1e-5)
    assert rows[-1]["val_loss"] == pytest.approx(held_out, abs=1e-5)


@pytest.mark.parametrize("sets", [[], ["job.strategy=pipeline", "pipeline.stages=3"]], ids=["sync", "pipeline"])
async def test_losses_with_rounded_weights_are_near_those_in_fp32(
    cluster: Cluster, talks: Path, sets: list[str]
) -> None:
    """All members commit the same sums: else the job would not end."""
    rounded = ["device.precision=bf16-weights", "job.workers=3", f"data.path={talks}"]
    rows = await _rows(cluster, load("tiny", {}, [*CHAT, *rounded, *sets]).profile)
    losses, held_out = chat_reference(talks)
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=0.01)
    assert [row["loss"] for row in rows] != pytest.approx(losses, abs=1e-5)
    assert rows[-1]["val_loss"] == pytest.approx(held_out, rel=0.01)


async def _rows(cluster: Cluster, wanted: Profile) -> list[dict[str, Any]]:
    job = await cluster.create(wanted)
    for _ in range(wanted.job.workers):
        cluster.join(engine_builder(threads=1), build_part=engine_builder(threads=1), strategies=strategy_of)
    await cluster.job_until(job, lambda item: item["state"] == "done")
    rows = (await cluster.ask("metrics.history", job=job, after_step=0, limit=200))["rows"]
    steps = range(1, wanted.job.steps + 1)
    assert [(row["step"], row["members"]) for row in rows] == [(step, wanted.job.workers) for step in steps]
    return list(rows)
