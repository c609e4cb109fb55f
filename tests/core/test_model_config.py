"""A configuration from a peer: what is taken, and what is refused before anything is made of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from p2ptrain.core.errors import ProtocolError
from p2ptrain.core.model_config import MAX_CONFIG_BYTES, config_untrusted

GOOD = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "vocab_size": 128256,
    "max_position_embeddings": 10485760,
    "rope_parameters": {"rope_theta": 10**9, "factor": 8.0},
    "eos_token_id": [128001, 128008],
    "pad_token_id": -1,
    "tie_word_embeddings": False,
}


def test_what_published_models_say_is_taken() -> None:
    assert config_untrusted(json.dumps(GOOD)) == GOOD
    endless = {"max_position_embeddings": 1 << 30, "sliding_window": (1 << 31) - 1, "text": {"seq_length": 10**9}}
    assert config_untrusted(json.dumps(GOOD | endless)) == GOOD | endless


def test_numbers_that_json_lacks_are_read_as_transformers_does() -> None:
    limits = {"time_step_limit": [0.0, float("inf")], "deep": {"low": [-float("inf")]}}
    tagged = '"time_step_limit": [0.0, {"__float__": "Infinity"}], "deep": {"low": [{"__float__": "-Infinity"}]}}'
    for text in (json.dumps(GOOD | limits), json.dumps(GOOD).removesuffix("}") + ", " + tagged):
        assert config_untrusted(text) == GOOD | limits
    assert config_untrusted(json.dumps(GOOD | {"a": {"__float__": "1"}, "b": {"__float__": []}}))["a"] == {
        "__float__": "1"
    }


def test_what_would_choose_code_is_left_out() -> None:
    code = {"auto_map": {"AutoModel": "evil.py"}, "trust_remote_code": True, "_attn_implementation": "hub/kernel"}
    assert config_untrusted(json.dumps(GOOD | code)) == GOOD


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"model_type": None}, "no model_type"),
        ({"num_hidden_layers": 0}, "must have 1 to 1024 layers"),
        ({"num_hidden_layers": 1025}, "must have 1 to 1024 layers"),
        ({"n_layer": True}, "must have 1 to 1024 layers"),
        ({"num_hidden_layers": 4.0}, "must have 1 to 1024 layers"),
        ({"hidden_size": 1 << 30}, "hidden_size = 1073741824"),
        ({"deep": [{"a": [-(1 << 60)]}]}, "a = -"),
        ({"max_position_embeddings": 1 << 50}, "max_position_embeddings = 1125899906842624"),
        ({"num_local_experts": 1025}, "num_local_experts = 1025"),
        ({"x": "y" * MAX_CONFIG_BYTES}, "more than"),
    ],
)
def test_what_no_model_says_is_refused(change: dict[str, Any], cause: str) -> None:
    with pytest.raises(ProtocolError, match=cause):
        config_untrusted(json.dumps(GOOD | change))


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 60_000, "1", '"llama"'])
def test_what_is_no_table_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError):
        config_untrusted(text)
