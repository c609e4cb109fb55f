"""What the parts of a model weigh, from the table of its tensors: what placement needs, without torch.

``compute.split.layer_sizes`` builds the model on torch's meta device for that, which is right for any architecture and
takes seconds to import. Here the names that the known families use are enough; where one is not known, that is asked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from p2ptrain.core.errors import ConfigError
from p2ptrain.core.model_config import config_untrusted
from p2ptrain.core.tensor_files import TensorEntry
from ring.training_costs import ModelSizes
from wire.chain_messages import TensorRecord

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_IN_CONFIG = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_IN_FILES = frozenset({"F32", "BF16", "F16"})
_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
_FIRST = re.compile(r"(?:^|\.)(?:embed_tokens|wte|wpe)\.weight$")
_TOKENS = re.compile(r"(?:^|\.)(?:embed_tokens|wte)\.weight$")
_HEAD = re.compile(r"(?:^|\.)lm_head\.(?:weight|bias)$")
_NORM = re.compile(r"(?:^|\.)(?:norm|ln_f|final_layernorm|final_layer_norm)\.(?:weight|bias)$")
_COMPUTED = re.compile(r"(?:^|\.)(?:rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias)$")
"""Buffers that old files hold and no part has."""


@dataclass(frozen=True, slots=True)
class Anatomy:
    """What placement needs to know of a model.

    Attributes:
        dtype: that it is computed in, as of ``PartSpec``.
        width: elements of a hidden state.
    """

    sizes: ModelSizes
    dtype: str
    width: int


def anatomy(config: str, tensors: Mapping[str, TensorRecord], dtype: str = "") -> Anatomy:
    """Measure a model.

    Args:
        config: the text of ``config.json``.
        tensors: of its files.
        dtype: of ``PartSpec``; empty: what its configuration says.

    Raises:
        ConfigError: it is none that splits, or its configuration lacks what is needed.
        ProtocolError: its configuration is none.
    """
    table = config_untrusted(config)
    heads, kv_heads = _number(table, "num_attention_heads", "n_head"), _number(table, "num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:  # which transformers notices at the first forward pass
        text = f"the model's configuration shares {kv_heads} heads of keys and values among {heads} heads of queries"
        raise ConfigError(text, remedy="use the config.json of these weights: one number is a multiple of the other")
    said = str(table.get("dtype") or table.get("torch_dtype") or "").removeprefix("torch.")
    computed = dtype or _IN_CONFIG.get(said, "fp32")
    weights = weights_in(computed, tensors)
    sizes = _by_names(table, weights, ELEMENT_BYTES[computed]) or _by_building(config, computed)
    width = _number(table, "hidden_size", "n_embd")
    if width is None:
        raise ConfigError("the model's configuration does not say how wide it is", remedy="add hidden_size to it")
    return Anatomy(sizes, computed, width)


def weights_in(dtype: str, tensors: Mapping[str, TensorRecord] | Mapping[str, TensorEntry]) -> dict[str, int]:
    """Bytes of each weight, by name, where the model is computed in ``dtype``, whatever its files hold."""
    return {
        name: ELEMENT_BYTES[dtype] * prod(tensor.shape)
        for name, tensor in tensors.items()
        if tensor.dtype in _IN_FILES and not _COMPUTED.search(name)
    }


def _by_names(table: Mapping[str, Any], weights: Mapping[str, int], element_bytes: int) -> ModelSizes | None:
    """None where a name or a number is not known."""
    layers, heads = _number(table, "num_hidden_layers", "n_layer"), _number(table, "num_attention_heads", "n_head")
    width = _number(table, "hidden_size", "n_embd")
    if not layers or not heads or not width:
        return None
    per_layer, first, norm, head, tokens = [0] * layers, 0, 0, 0, 0
    for name, size_bytes in weights.items():
        if found := _LAYER.search(name):
            if int(found[1]) >= layers:
                return None
            per_layer[int(found[1])] += size_bytes
        elif _FIRST.search(name):
            first += size_bytes
            tokens += size_bytes if _TOKENS.search(name) else 0
        elif _NORM.search(name):
            norm += size_bytes
        elif _HEAD.search(name):
            head += size_bytes
        else:
            return None
    is_tied = not head or table.get("tie_word_embeddings") is True
    cache = (_number(table, "num_key_value_heads") or heads) * (_number(table, "head_dim") or width // heads)
    if not all(per_layer) or not tokens or not norm:
        return None
    return ModelSizes(
        layers_bytes=tuple(per_layer),
        cache_bytes=(2 * cache * element_bytes,) * layers,
        first_bytes=first,
        last_bytes=norm + (tokens if is_tied else head),
        tied_bytes=tokens if is_tied else 0,
    )


def _by_building(config: str, dtype: str) -> ModelSizes:
    """Raises ``ConfigError``."""
    from p2ptrain.compute.activations import DTYPES
    from p2ptrain.compute.part import layer_sizes
    from p2ptrain.compute.served_part import config_of

    found = layer_sizes(config_of(config), DTYPES[dtype])
    return ModelSizes(found.layers_bytes, found.cache_bytes, found.first_bytes, found.last_bytes, found.tied_bytes)


def _number(table: Mapping[str, Any], *keys: str) -> int | None:
    found = (table.get(key) for key in keys)
    return next((value for value in found if isinstance(value, int) and value > 0), None)
