"""Small models of the families that split, with random weights, norms and biases included.

``FAMILIES`` has every one of ``p2ptrain.core.tensor_files.SPLIT_FAMILIES``, some of them in several forms.
"""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from p2ptrain.compute.layout import LayerRange
from p2ptrain.compute.model import ModelSpec, model_config
from p2ptrain.compute.part import PartAssembly, PartModel
from p2ptrain.compute.tokenizer import Tokenizer
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
_FALCON = {**_SIZES, "bias": False}
_OPT = {**_SIZES, "ffn_dim": 80, "word_embed_proj_dim": 64}
_EXPERTS = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}
_LATENT = {
    "num_key_value_heads": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
}
WINDOW = 8
_KINDS = ["sliding_attention", "sliding_attention", "full_attention"] * 2
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
    "phi3": ("phi3", _SIZES),
    "gemma": ("gemma", {**_SIZES, "head_dim": 16}),
    "gemma2-window": ("gemma2", {**_SIZES, "head_dim": 16, "sliding_window": WINDOW, "layer_types": _KINDS}),
    "gemma3-window": ("gemma3_text", {**_SIZES, "head_dim": 16, "sliding_window": WINDOW, "layer_types": _KINDS}),
    "granite": ("granite", {**_SIZES, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5}),
    "falcon": ("falcon", {**_FALCON, "multi_query": True, "alibi": False}),
    "falcon-grouped": ("falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-alibi": ("falcon", {**_FALCON, "multi_query": False, "alibi": True, "bias": True, "parallel_attn": False}),
    "gpt_neox": ("gpt_neox", {**_SIZES, "tie_word_embeddings": False}),
    "opt": ("opt", _OPT),
    "opt-projected": ("opt", {**_OPT, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    "mixtral": ("mixtral", {**_SIZES, "num_local_experts": 5}),
    "qwen3_moe": ("qwen3_moe", {**_SIZES, **_EXPERTS, "num_experts": 4, "mlp_only_layers": [1]}),
    "deepseek_v3": ("deepseek_v3", {**_SIZES, **_EXPERTS, **_LATENT, "n_routed_experts": 8}),
}


UNSPLIT: dict[str, dict[str, Any]] = {
    "mamba": {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 3, "state_size": 8},
    "rwkv": {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 3, "context_length": 128},
    "lstm": {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 3},
    "lfm2": {**_SIZES, "layer_types": ["conv", "full_attention"] * 3},
}


def make(family: str, directory: Path, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """The whole model, in evaluation mode, after it was saved in ``directory``."""
    kind, sizes = FAMILIES[family]
    return _made(kind, sizes, directory, dtype, changes)


def make_of_bytes(family: str, directory: Path, **changes: Any) -> Any:
    """The same of a model whose tokens are bytes, with its tokenizer."""
    whole = make(family, directory, vocab_size=256, **changes)
    Tokenizer.of_bytes().save(directory)
    return whole


def make_unsplit(kind: str, directory: Path) -> Any:
    """The same of a family that does not split."""
    return _made(kind, UNSPLIT[kind], directory, torch.float32, {})


def _made(kind: str, sizes: dict[str, Any], directory: Path, dtype: torch.dtype, changes: dict[str, Any]) -> Any:
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    shard = changes.pop("max_shard_size", "5GB")
    config = AutoConfig.for_model(kind, **{**sizes, **special, **changes})
    with torch.random.fork_rng(devices=[]):
        model: Any = AutoModelForCausalLM.from_config(config)
    randomize(model)
    model.to(dtype).save_pretrained(directory, max_shard_size=shard)
    return opened(directory, dtype)


def opened(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The whole model as transformers opens it, in evaluation mode, with its weights where an allocator puts them.

    Its own are mapped from the file, at any address; and on some processors the kernels for one row round otherwise
    where a matrix does not begin on a boundary of 64 bytes. The same bits come of the same arithmetic only.
    """
    whole: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    for parameter in whole.parameters():
        parameter.data = parameter.data.clone()
    return whole.eval()


def randomize(model: torch.nn.Module, seed: int = 3) -> None:
    """Every weight differs from every other, so that one taken for another shows."""
    generator = torch.Generator().manual_seed(seed)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for parameter in model.parameters():
            is_matrix = parameter.ndim > 1
            spread, centre = (parameter.shape[-1] ** -0.5, 0.0) if is_matrix else (0.3, 0.5)
            parameter.normal_(centre, spread, generator=generator)
        for name, tensor in model.state_dict().items():
            if name not in parameters:  # a buffer
                tensor.normal_(0.0, 0.3, generator=generator)


def config_of(directory: Path) -> PretrainedConfig:
    return model_config(ModelSpec(path=directory), 1)


def cut_at(layers: int, *cuts: int) -> list[LayerRange]:
    ends = [0, *cuts, layers]
    return [LayerRange(start, stop, layers) for start, stop in pairwise(ends)]


def load_part(
    config: PretrainedConfig, part: LayerRange, table: TensorTable, *, dtype: torch.dtype = torch.float32
) -> PartModel:
    assembly = PartAssembly(config, part, table.entries, dtype=dtype)
    assembly.place_all(table)
    return assembly.build_model()


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
