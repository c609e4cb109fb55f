"""What a stage of a split model takes from the one before it, and what a client says the model is."""

from __future__ import annotations

import json

import torch
from hypothesis import strategies as st

from p2ptrain.compute.activations import decode_untrusted, ids_untrusted
from p2ptrain.core.activations import ENCODINGS, IDS, activation_bytes
from p2ptrain.core.errors import ProtocolError
from p2ptrain.core.model_config import MAX_CONFIG_BYTES, config_untrusted

from .engine import Target
from .strategies import FREE, TEXT, WHOLE, mostly, mutated

_VOCAB = 100


@st.composite
def _payloads(draw: st.DrawFn) -> tuple[bytes, str, int, int]:
    """Bytes, what they are said to be, and how many positions of which width were announced."""
    encoding = draw(mostly(st.sampled_from([*ENCODINGS, IDS]), TEXT))
    rows, width = draw(st.integers(0, 4)), draw(st.integers(1, 5))
    size = activation_bytes(encoding, rows, width) if encoding in (*ENCODINGS, IDS) else 8
    payload = draw(st.binary(min_size=size, max_size=size) | st.lists(st.integers(0, _VOCAB), max_size=4).map(bytes))
    said = draw(mostly(st.just(rows), st.integers(-(2**40), 2**40)))
    return draw(mutated(st.just(payload), most=1)), encoding, said, width


def _check_payload(case: tuple[bytes, str, int, int]) -> None:
    payload, encoding, rows, width = case
    for dtype in (torch.float32, torch.bfloat16):
        try:
            hidden = decode_untrusted(payload, encoding, rows, width, dtype)
        except ProtocolError:
            continue
        assert hidden.shape == (rows, width)
        assert hidden.dtype == dtype
    try:
        ids = ids_untrusted(payload, rows, _VOCAB)
    except ProtocolError:
        return
    assert ids.shape == (rows,)
    assert all(0 <= number < _VOCAB for number in ids.tolist())


_CONFIGS = st.fixed_dictionaries(
    {"model_type": mostly(st.sampled_from(["llama", "gpt2"]), FREE), "num_hidden_layers": mostly(st.just(4), FREE)},
    optional={
        "hidden_size": mostly(st.just(64), WHOLE),
        "n_layer": FREE,
        "num_experts": WHOLE,
        "rope_parameters": FREE,
        "auto_map": FREE,
        "_attn_implementation": FREE,
    },
)


def _check_config(text: str) -> None:
    try:
        table = config_untrusted(text)
    except ProtocolError:
        return
    assert len(text) <= MAX_CONFIG_BYTES
    assert isinstance(table["model_type"], str)
    assert not {"auto_map", "_attn_implementation"} & set(table)
    layers = table.get("num_hidden_layers", 1)
    assert type(layers) is int
    assert 1 <= layers <= 1024


_ACTIVATIONS = "p2ptrain.compute.activations."

PAYLOADS = Target(
    "activations",
    _payloads(),
    _check_payload,
    tuple(f"{_ACTIVATIONS}{name}" for name in ("decode_untrusted", "ids_untrusted", "_checked_untrusted")),
    peak_bytes=1 << 20,
)
CONFIGS = Target(
    "model-configs",
    mutated(_CONFIGS.map(lambda table: json.dumps(table).encode()), most=2).map(lambda data: data.decode("latin-1"))
    | st.sampled_from(["[" * 50_000, '{"a":' * 10_000, "9" * 5000, '{"model_type":"a"' + " " * MAX_CONFIG_BYTES, ""]),
    _check_config,
    ("p2ptrain.core.model_config.config_untrusted",),
    peak_bytes=8 << 20,  # a thousand levels of nesting, until it is refused
)

TARGETS = (PAYLOADS, CONFIGS)
