"""The check of a ``config.json`` that a peer sent. Standard library only."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from p2ptrain.core.errors import ProtocolError

SPLIT_FAMILIES = (
    "llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "phi3", "gemma", "gemma2", "gemma3_text", "granite",
    "gpt2", "gpt_neox", "falcon", "opt", "deepseek_v3",
)  # fmt: skip
"""``model_type`` of the models that are known to split. Others may: ``compute.split_check`` tries them."""
MAX_CONFIG_BYTES = 64 << 10
_MAX_LAYERS = 1024
_MOST_EXPERTS = 1024  # each expert may be a module
_MOST = 1 << 24
"""A bound above any model's vocabulary or width."""
_MOST_LENGTH = 1 << 40  # a model whose context is a tensor is refused later, when its size is known
_LENGTHS = ("theta", "position", "length", "window", "seq", "token_id", "seed")
_LAYERS = ("num_hidden_layers", "n_layer")
_CODE = ("auto_map", "trust_remote_code")
_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def config_untrusted(text: str) -> dict[str, Any]:
    """Parse a ``config.json`` as transformers does: ``{"__float__": "Infinity"}`` is a number. Its sizes are bounded,
    so that the model can be built on torch's meta device in little time and memory. Keys that select code to run are
    removed.

    Raises:
        ProtocolError: the text is not a valid configuration.
    """
    if len(text) > MAX_CONFIG_BYTES:
        raise ProtocolError(f"a model's configuration has more than {MAX_CONFIG_BYTES} characters")
    try:
        table = json.loads(text, object_hook=_float_or_table)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a model's configuration is not JSON ({type(error).__name__})") from error
    if not isinstance(table, dict) or not isinstance(table.get("model_type"), str):
        raise ProtocolError("a model's configuration has no model_type")
    for key, value in _numbers(table):
        most = _MOST_EXPERTS if "experts" in key else _MOST_LENGTH if any(it in key for it in _LENGTHS) else _MOST
        if abs(value) > most:
            raise ProtocolError(f"a model's configuration has {key[:64]} = {value}, which is out of range")
    for key in _LAYERS:
        if key in table and not (type(table[key]) is int and 1 <= table[key] <= _MAX_LAYERS):
            raise ProtocolError(f"a model's configuration must have 1 to {_MAX_LAYERS} layers")
    return {key: value for key, value in table.items() if key not in _CODE and not key.startswith("_")}


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, int]]:
    if type(value) is int:
        yield key, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _numbers(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item, key)


def _float_or_table(table: dict[str, Any]) -> Any:
    name = table.get("__float__") if len(table) == 1 else None
    return _FLOATS.get(name, table) if isinstance(name, str) else table
