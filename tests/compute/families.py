"""Small models of the families that split, with random weights, norms and biases included."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from p2ptrain.compute.model import ModelSpec, model_config
from p2ptrain.compute.part import Part, PartModel, load_part
from p2ptrain.core.serving import Sampling
from p2ptrain.core.tensor_files import TensorTable

VOCAB = 211
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 6, "n_head": 4, "n_positions": 128}
WINDOW = 8
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**_SIZES, "tie_word_embeddings": False}),
    "llama-tied": ("llama", {**_SIZES, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", _SIZES),
    "qwen2-window": (
        "qwen2",
        {**_SIZES, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 3},
    ),
    "qwen3": ("qwen3", {**_SIZES, "head_dim": 32}),
    "mistral": ("mistral", {**_SIZES, "sliding_window": None}),
    "mistral-window": ("mistral", {**_SIZES, "sliding_window": WINDOW}),
    "gpt2": ("gpt2", _GPT2),
}


def make(family: str, directory: Path, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """The whole model, in evaluation mode, after it was saved in ``directory``."""
    kind, sizes = FAMILIES[family]
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    shard = changes.pop("max_shard_size", "5GB")
    config = AutoConfig.for_model(kind, **{**sizes, **special, **changes})
    with torch.random.fork_rng(devices=[]):
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    randomize(model)
    model.to(dtype).save_pretrained(directory, max_shard_size=shard)
    return opened(directory, dtype)


def opened(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The whole model as transformers opens it, in evaluation mode, with its weights where an allocator puts them.

    Its own are mapped from the file, at any address; and on some processors the kernels for one row round otherwise
    where a matrix does not begin on a boundary of 64 bytes. The same bits come of the same arithmetic only.
    """
    whole: Any = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="sdpa", dtype=dtype)
    for parameter in whole.parameters():
        parameter.data = parameter.data.clone()
    return whole.eval()


def randomize(model: torch.nn.Module, seed: int = 3) -> None:
    """Every weight differs from every other, so that one taken for another shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            is_matrix = parameter.ndim > 1
            spread, centre = (parameter.shape[-1] ** -0.5, 0.0) if is_matrix else (0.3, 0.5)
            parameter.normal_(centre, spread, generator=generator)


def config_of(directory: Path) -> PretrainedConfig:
    return model_config(ModelSpec(path=directory), 1)


def cut_at(layers: int, *cuts: int) -> list[Part]:
    ends = [0, *cuts, layers]
    return [Part(start, stop, layers) for start, stop in pairwise(ends)]


def load_parts(directory: Path, *cuts: int, dtype: torch.dtype = torch.float32) -> list[PartModel]:
    """The model in ``directory``, cut before those layers."""
    config = config_of(directory)
    table = TensorTable(directory)
    parts = cut_at(config.num_hidden_layers, *cuts)
    return [load_part(config, part, table, dtype=dtype) for part in parts]


def chars_read() -> int:
    """Bytes that this process has read with system calls so far, as the system counts them (Linux)."""
    fields = dict(line.split(": ") for line in Path(f"/proc/{os.getpid()}/io").read_text().splitlines())
    return int(fields["rchar"])


def generated(whole: Any, ids: list[int], count: int, sampling: Sampling) -> list[int]:
    """New tokens, by transformers' own ``generate``."""
    x = torch.tensor([ids])
    sampled = sampling.temperature > 1e-4
    how = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p} if sampled else {}
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(sampling.seed)
        out = whole.generate(
            x,
            attention_mask=torch.ones_like(x),
            max_new_tokens=count,
            do_sample=sampled,
            pad_token_id=0,
            use_cache=True,
            **how,
        )
    return [int(token) for token in out[0, len(ids) :]]
