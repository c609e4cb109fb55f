"""Tests of an architecture before it is used: that its parts compute the same bits as the whole, and that it keeps the
texts of a window apart."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, DynamicCache, PretrainedConfig

from p2ptrain.compute.attention import TrainingAttention
from p2ptrain.compute.device import one_thread
from p2ptrain.compute.key_value_cache import LAYER_CACHES, BatchCache, SessionCache, SessionRows, attend_in_batches
from p2ptrain.compute.layout import LayerRange, ModelLayout, per_layer_lists, split_refusal
from p2ptrain.compute.model import DRAWING, Auto, first_line
from p2ptrain.compute.part import PartModel, build_part
from p2ptrain.core.errors import ConfigError
from p2ptrain.core.serving import BLOCK_POSITIONS

_SMALL = {
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"), 48),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 24),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "n_group"), 2),
    **dict.fromkeys(("first_k_dense_replace", "topk_group"), 1),
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), 6),
    "vocab_size": 97,
}
"""Sizes of the test model. Keys that the architecture does not have are ignored."""


def check_splits(config: PretrainedConfig) -> bool:
    """Compare parts and whole, bit by bit, on a small model with random weights that otherwise follows ``config``.

    The test runs a training batch, a prompt, single tokens, several tokens at once, and other tokens after a rollback.
    It takes about 0.3 s, once per configuration and process. Returns whether a pass may have the rows of several
    sessions. Raises ``ConfigError``: this architecture cannot be split."""
    heads, kv_heads = (getattr(config, f"num_{kind}_heads", None) for kind in ("attention", "key_value"))
    if heads and kv_heads and heads % kv_heads:  # the small model would hide this
        raise split_refusal(config, f"its {heads} query heads are not a multiple of its {kv_heads} key-value heads")
    try:
        kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    except Exception as error:  # an architecture may fail in any way
        raise split_refusal(config, first_line(error)) from error
    if strange := kinds - LAYER_CACHES:
        raise split_refusal(config, f"its layers keep a state ({strange.pop().__name__}) that cannot be rolled back")
    return _check_splits_cached(config.model_type, config.to_json_string(use_diff=False))


@functools.lru_cache(maxsize=64)
def _check_splits_cached(model_type: str, text: str) -> bool:
    config = AutoConfig.for_model(**json.loads(text) | {"model_type": model_type})
    try:
        tiny = _small_config(config)
        if sum(weight.numel() for weight in ModelLayout(tiny, torch.float32).model.parameters()) > 1 << 26:
            raise split_refusal(config, "its heads or its position table are too large for the test of a split")
        with one_thread():  # more do not speed up such small tensors, and slow down a busy machine
            matches = _parts_match_whole(tiny)
            batches = matches and _batch_matches_whole(tiny)
    except ConfigError:
        raise
    except Exception as error:  # an architecture may fail in any way
        raise split_refusal(config, first_line(error)) from error
    if not matches:
        raise split_refusal(config, "its parts compute other results than the whole model")
    return batches


def check_packs(config: PretrainedConfig, *, split: bool) -> None:
    """Compare, on a small model as ``check_splits`` does, texts that share a window with each text alone. ``split``: in
    parts. Raises ``ConfigError``: this architecture does not keep them apart."""
    problem = ConfigError(
        f"a {config.model_type!r} model cannot train on conversations: it does not keep those of a window apart",
        remedy="use a model such as llama, qwen3, mistral or gpt2, or another data.format than 'chat'",
    )
    try:
        with one_thread():
            keeps_apart = _keeps_texts_apart(_small_config(config), split)
    except Exception as error:  # an architecture may fail in any way
        raise problem from error
    if not keeps_apart:
        raise problem


def _keeps_texts_apart(config: PretrainedConfig, split: bool) -> bool:
    model = _random_model(config)
    parts = _parts(config, model) if split else []
    lengths = [7, 1, 10]
    ids = _test_ids(config.vocab_size)
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(2, -1)
    bounds = torch.tensor([0, *lengths, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    with torch.no_grad():
        alone = torch.cat([model(input_ids=text, use_cache=False).logits for text in torch.split(ids, lengths, 1)], 1)
        for by_bounds in (False, True):
            window = ids
            for part in parts:
                attention = TrainingAttention(part.module, by_bounds=by_bounds)
                window = part.forward(window, positions, **attention.arguments(positions, bounds))
            if not split:
                apart = TrainingAttention(model, by_bounds=by_bounds).arguments(positions, bounds)
                window = model(input_ids=ids, position_ids=positions, use_cache=False, **apart).logits
            if not torch.allclose(window, alone, rtol=1e-4, atol=1e-5):
                return False
    return True


def _parts_match_whole(config: PretrainedConfig) -> bool:
    whole = _random_model(config)
    parts = _parts(config, whole)
    ids = _test_ids(config.vocab_size)
    batch = torch.arange(ids.shape[1])
    with torch.no_grad():
        hidden = ids
        for part in parts:
            hidden = part.forward(hidden, batch)
        if not torch.equal(hidden, whole(input_ids=ids, use_cache=False).logits):
            return False
        return _cached_results_match(whole, parts, ids[:1], config.vocab_size)


def _test_ids(vocab_size: int) -> Tensor:
    return torch.arange(2 * 18).view(2, 18) * 7 % vocab_size


def _parts(config: PretrainedConfig, whole: Any) -> list[PartModel]:
    weights, layers = whole.state_dict(), config.num_hidden_layers
    return [
        build_part(config, LayerRange(start, stop, layers), weights)
        for start, stop in pairwise([0, 1, layers - 1, layers])  # a first, a middle and a last part
    ]


def _cached_results_match(whole: Any, parts: Sequence[Any], ids: Tensor, vocab_size: int) -> bool:
    """Compare with caches: a prompt, single tokens and several at once; then, after a rollback, other tokens."""
    memories = [part.new_memory() for part in parts]
    for memory in memories:
        memory.grow(BLOCK_POSITIONS)
    common = [9, 1, 1]  # positions of the calls before the rollback; the first exceeds a window
    kept, length = sum(common), 0
    # After the rollback all tokens differ, so a cache that keeps what was cut is noticed.
    other = torch.cat([ids[:, :kept], (ids[:, kept:] + 13) % vocab_size], dim=1)
    for text, counts in ((ids, [*common, 3, 1]), (other, [*common, 2, 1])):
        reference, done = DynamicCache(config=whole.config), 0
        for count in counts:
            new = text[:, done : done + count]
            expected = whole(input_ids=new, past_key_values=reference, use_cache=True).logits
            if done >= length:  # the second attempt has the common positions in its memory
                hidden, rows = new, SessionRows([0], done, done + count)
                for part, memory in zip(parts, memories, strict=True):
                    hidden = part.forward(hidden, torch.arange(done, rows.stop), SessionCache(memory, rows))
                if not torch.equal(hidden, expected):
                    return False
            done += count
        length = kept
    return True


def _batch_matches_whole(config: PretrainedConfig) -> bool:
    """Compare passes that have rows of two sessions with each text alone, up to rounding."""
    whole = _random_model(config)
    ids, parts = _test_ids(config.vocab_size), _parts(config, whole)
    memories = [part.new_memory() for part in parts]
    for part, memory in zip(parts, memories, strict=True):
        memory.grow(2 * BLOCK_POSITIONS)
        attend_in_batches(part.module)
    try:
        with torch.no_grad():
            expected = whole(input_ids=ids, use_cache=False).logits
            for ends in (((0, 9), (0, 8)), ((9, 12), (8, 18))):
                sessions = [SessionRows([1 - text], *bounds) for text, bounds in enumerate(ends)]
                bounds = [slice(*each) for each in ends]
                hidden = torch.cat([text[each] for text, each in zip(ids, bounds, strict=True)])[None]
                positions = torch.cat([torch.arange(*each) for each in ends])
                for part, memory in zip(parts, memories, strict=True):
                    cache = BatchCache(memory, sessions, len(positions))
                    hidden = part.forward(hidden, positions, cache, rows=cache)
                alone = torch.cat([text[each] for text, each in zip(expected, bounds, strict=True)])
                if not torch.allclose(hidden[0], alone, rtol=1e-4, atol=1e-5):
                    return False
    except Exception:  # noqa: BLE001 - an architecture may fail in any way
        return False
    return True


def _small_config(config: PretrainedConfig) -> PretrainedConfig:
    tiny = copy.deepcopy(config)
    lists = per_layer_lists(config)
    chosen = _chosen_layers([repr(kind) for kind in zip(*lists.values(), strict=True)] or [""])
    for key, values in lists.items():
        setattr(tiny, key, [values[index] for index in chosen])
    tiny.num_hidden_layers = len(chosen)
    heads, known = getattr(config, "num_attention_heads", None), set(config.to_dict()) | set(config.attribute_map)
    if not isinstance(heads, int):
        raise split_refusal(config, "its layers have no attention heads")
    head_width = getattr(config, "head_dim", None) or config.hidden_size // heads
    tiny.num_attention_heads = 2
    for key in ("num_key_value_heads", "num_kv_heads"):
        if key in known and getattr(config, key) is not None:
            setattr(tiny, key, 1 if getattr(config, key) < heads else 2)
    tiny.hidden_size = 2 * head_width
    for key, value in _SMALL.items():
        if key in known and getattr(config, key) is not None:
            setattr(tiny, key, value)
    tiny.pad_token_id = tiny.bos_token_id = tiny.eos_token_id = None  # they may exceed the small vocabulary
    if hasattr(tiny, "quantization_config"):  # its weights are random
        del tiny.quantization_config
    return tiny


def _chosen_layers(kinds: Sequence[str]) -> list[int]:
    """Layer indices for the test model, in order: the first of each kind, at most 8, and at least 4 in total. A model
    with few layers repeats some."""
    chosen = [kinds.index(kind) for kind in dict.fromkeys(kinds)][:8]
    while len(chosen) < 4:
        chosen.append(len(kinds) * len(chosen) // 4)
    return sorted(chosen)


def _random_model(config: PretrainedConfig) -> Any:
    """All weights are random, norms and biases too, so that a swapped tensor changes the result."""
    with DRAWING, torch.random.fork_rng(devices=[]):
        model = Auto.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            is_matrix = parameter.ndim > 1
            spread, centre = (parameter.shape[-1] ** -0.5, 0.0) if is_matrix else (0.3, 1.0)
            parameter.normal_(centre, spread, generator=generator)
    return model
