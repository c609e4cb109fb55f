"""Sizes of the parts of a model, to serve or train it. Placement needs them. Usually torch is not needed.

``compute.part.layer_sizes`` is right for any architecture, because it builds the model on torch's meta device, but it
takes seconds to import. This module reads the tensor names of known families or, for a new model of the Llama family,
the ``[model]`` table. For other models it calls ``layer_sizes``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2ptrain.core.errors import ConfigError, P2PTrainError, StorageError
from p2ptrain.core.footprint import ModelSizes
from p2ptrain.core.model_config import MAX_CONFIG_BYTES, SPLIT_FAMILIES, config_untrusted
from p2ptrain.core.tensor_files import TensorEntry, TensorTable
from ring.training_costs import ModelShape
from wire.chain_messages import TensorRecord

if TYPE_CHECKING:
    from configs.schema import Model, Profile

BYTES_VOCAB = 256  # the tokens of a new model are bytes (``compute.tokenizer``)
ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_IN_CONFIG = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_IN_FILES = frozenset({"F32", "BF16", "F16"})
_TOLD_BY_NAMES = frozenset(SPLIT_FAMILIES) - {"falcon", "gpt_neox", "opt", "deepseek_v3"}
"""Families that split, and whose names of tensors tell their sizes."""
_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
_FIRST = re.compile(r"(?:^|\.)(?:embed_tokens|wte|wpe)\.weight$")
_TOKENS = re.compile(r"(?:^|\.)(?:embed_tokens|wte)\.weight$")
_HEAD = re.compile(r"(?:^|\.)lm_head\.(?:weight|bias)$")
_NORM = re.compile(r"(?:^|\.)(?:norm|ln_f|final_layernorm|final_layer_norm)\.(?:weight|bias)$")
# Buffers that old files hold, and that no part needs.
_COMPUTED = re.compile(r"(?:^|\.)(?:rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias)$")


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """What placement needs to know of a model. ``dtype``: as in ``PartSpec``. ``width``: elements of a hidden state."""

    sizes: ModelSizes
    dtype: str
    width: int


def model_layout(config: str, tensors: Mapping[str, TensorRecord], dtype: str = "") -> ModelLayout:
    """Measure a model.

    Args:
        config: the text of ``config.json``.
        tensors: the tensors in its files.
        dtype: as in ``PartSpec``; empty: that of its configuration.

    Raises:
        ConfigError: the model cannot be split, or its configuration is incomplete.
        ProtocolError: its configuration is invalid.
    """
    table = config_untrusted(config)
    said = str(table.get("dtype") or table.get("torch_dtype") or "").removeprefix("torch.")
    computed = dtype or _IN_CONFIG.get(said, "fp32")
    sizes = _by_names(table, weights_in(computed, tensors), ELEMENT_BYTES[computed]) or _by_building(config, computed)
    width = _number(table, "hidden_size", "n_embd")
    if width is None:
        raise ConfigError("the model's configuration does not give its width", remedy="add hidden_size to it")
    return ModelLayout(sizes, computed, width)


def weights_in(dtype: str, tensors: Mapping[str, TensorRecord] | Mapping[str, TensorEntry]) -> dict[str, int]:
    """Bytes of each weight by name, if the model is computed in ``dtype``, whatever type its files have."""
    return {
        name: ELEMENT_BYTES[dtype] * prod(tensor.shape)
        for name, tensor in tensors.items()
        if tensor.dtype in _IN_FILES and not _COMPUTED.search(name)
    }


def _by_names(table: Mapping[str, Any], weights: Mapping[str, int], element_bytes: int) -> ModelSizes | None:
    """None if a name or a number is unknown."""
    if table["model_type"] not in _TOLD_BY_NAMES:
        return None
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

    check_splits(config)
    return layer_sizes(config_of(config), DTYPES[dtype])


def config_text(directory: Path) -> str:
    """The text of a model's ``config.json``. Raises ``StorageError``."""
    path = directory / "config.json"
    try:
        with path.open("rb") as file:
            return file.read(MAX_CONFIG_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"cannot read {path}: {error}") from error


def check_splits(config: str) -> None:
    """Refuse a model that does not split, before any worker is asked. If it takes torch to know, or to measure the
    model, torch is loaded here: once workers are connected, they take who is silent for so long for dead.

    Raises:
        ConfigError, ProtocolError: ``config``, the text of ``config.json``, is of no model that splits.
    """
    if config_untrusted(config)["model_type"] not in _TOLD_BY_NAMES:
        from p2ptrain.compute import split_check
        from p2ptrain.compute.served_part import config_of

        split_check.check_splits(config_of(config))


def _number(table: Mapping[str, Any], *keys: str) -> int | None:
    return next((value for value in (table.get(key) for key in keys) if isinstance(value, int) and value > 0), None)


# -------------------------------------------------------------------------------------------------------- to be trained


def shape_of(profile: Profile, *, may_build: bool = True) -> ModelShape | None:
    """The shape of the model that the profile trains; None if it is unknown here.

    That is so if its directory is not on this machine, or if it needs torch and ``may_build`` is False.

    Raises:
        ConfigError, StorageError: the model's directory or table is invalid, or cannot be trained in parts.
    """
    model = profile.model
    if model.path:
        directory = Path(model.path)
        return _of_directory(directory) if (directory / "config.json").is_file() else None
    if model.architecture in ("llama", "mistral", "qwen2", "qwen3"):
        return _like_llama(model)
    return _shape_by_building(profile) if may_build else None


def shape_param(profile: Profile, *, may_build: bool = True) -> dict[str, Any]:
    """The optional parameter of a request that creates a job; empty if the shape is unknown.

    Raises:
        ConfigError: the model cannot be trained in parts, if ``may_build``.
    """
    if profile.stages < 2:
        return {}
    try:
        shape = shape_of(profile, may_build=may_build)
    except P2PTrainError as error:
        if may_build and isinstance(error, ConfigError):
            raise  # it cannot be trained like this anywhere
        return {}
    return {"shape": shape.to_map()} if shape is not None else {}


def _like_llama(model: Model) -> ModelShape:
    width, inner = model.hidden_size, model.intermediate_size
    head, keys = width // model.heads, model.kv_heads * (width // model.heads)
    layer = 2 * width * width + 2 * width * keys + 3 * width * inner + 2 * width
    if model.architecture == "qwen2":
        layer += width + 2 * keys  # biases of queries, keys and values
    if model.architecture == "qwen3":
        layer += 2 * head  # norms of queries and keys
    matrix = 4 * BYTES_VOCAB * width
    tied = matrix if model.tie_embeddings else 0
    sizes = ModelSizes((4 * layer,) * model.layers, (0,) * model.layers, matrix, matrix + 4 * width, tied)
    return ModelShape.of(sizes, width, inner, BYTES_VOCAB)


def _of_directory(directory: Path) -> ModelShape:
    """Raises ``ConfigError``, ``StorageError``, ``ProtocolError``."""
    config, path = config_text(directory), directory / "config.json"
    entries = TensorTable(directory).entries
    records = {
        name: TensorRecord(name, entry.dtype, list(entry.shape), entry.size_bytes, bytes(16))
        for name, entry in entries.items()
    }
    found, table = model_layout(config, records, "fp32"), config_untrusted(config)
    vocab, inner = table.get("vocab_size"), table.get("intermediate_size")
    if not isinstance(vocab, int) or vocab < 1:
        raise ConfigError(f"{path} does not give the size of the vocabulary", remedy="add vocab_size to it")
    return ModelShape.of(found.sizes, found.width, inner if isinstance(inner, int) else 4 * found.width, vocab)


def _shape_by_building(profile: Profile) -> ModelShape:
    """Raises ``ConfigError``."""
    from p2ptrain.compute import split_check
    from p2ptrain.compute.model import model_config
    from p2ptrain.compute.part import layer_sizes
    from roles.worker.build import training_spec

    config = model_config(training_spec(profile).model, BYTES_VOCAB)
    split_check.check_splits(config)
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return ModelShape.of(layer_sizes(config), config.hidden_size, inner, int(config.vocab_size))
