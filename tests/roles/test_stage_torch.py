"""The torch engine behind the stages: a split model's tokens are those of the whole."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from p2ptrain.core.serving import Sampling
from p2ptrain.core.threads import RealThreads
from p2ptrain.lab.memory import MemoryNetwork
from roles.worker.build import holding
from tests.roles.stage_doubles import chain_of, model_at, sampling_params


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(temperature=1.0, top_k=20, top_p=0.9, seed=3)])
async def test_a_llama_over_three_stages(tmp_path: Path, sampling: Sampling) -> None:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    whole = AutoModelForCausalLM.from_config(config).eval()
    whole.save_pretrained(tmp_path / "model")
    model = model_at(tmp_path / "model", tmp_path)
    prompt = [3, 14, 15, 92, 65]
    torch.manual_seed(sampling.seed)
    greedy = sampling.temperature == 0
    options = {} if greedy else {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    expected = whole.generate(
        torch.tensor([prompt]), max_new_tokens=10, do_sample=not greedy, eos_token_id=None, pad_token_id=0, **options
    )

    def real() -> SimpleNamespace:
        return SimpleNamespace(holding=holding(device="cpu", threads=1, memory_bytes=1 << 28), engines=[])

    cuts = (0, 1, 3, 4)
    async with chain_of(MemoryNetwork(), tmp_path, model, cuts, stand_ins=real, threads=RealThreads) as chain:
        await chain.open("s1", prefill_encoding="fp32", **sampling_params(sampling))
        made = await chain.generate("s1", prompt, 10)
    assert made == expected[0, len(prompt) :].tolist()
