"""What a worker says of the parts of models that it holds, and a client of the sizes of one that is to be trained."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from p2ptrain.core.errors import ProtocolError
from ring.training_costs import MAX_LAYERS, Training, shape_untrusted
from roles.seed.parts import MAX_PARTS, held_untrusted
from wire.chain_messages import HeldPart, PartsHeld

from .engine import Target
from .strategies import FREE, made, mostly

_FIGURES = ("weights_bytes", "cache_bytes", "limit_bytes", "compute_ms", "busy", "tokens_per_s", "out_position_bytes")
_PARTS = made(
    HeldPart,
    part=st.sampled_from([f"p{index}" for index in range(20)]),
    model=st.sampled_from(["m", "ab" * 32]),
    start=st.integers(0, 3),
    stop=st.integers(4, 6),
    layers=st.integers(6, 9),
    weights_bytes=st.integers(0, 2**40),
    cache_bytes=st.integers(0, 2**30),
    limit_bytes=st.integers(0, 2**40),
    sessions=st.integers(0, 3),
    compute_ms=st.floats(0, 1e4),
    busy=st.floats(0, 1.1),
    tokens_per_s=st.floats(0, 1e6),
    out_position_bytes=st.floats(0, 1e6),
    next=st.sampled_from(["", "b2"]),
)


def _check(parts: list[HeldPart]) -> None:
    try:
        held = held_untrusted("a1", "laptop", PartsHeld(parts))
    except ProtocolError:
        return
    assert len(held) == len(parts) <= MAX_PARTS
    for item_id, part in held.items():
        assert item_id == part.id == f"a1/{part.part}"
        assert (part.peer, part.peer_name) == ("a1", "laptop")
        assert part.name.isprintable()
        assert 0 < len(part.name.encode()) <= 64
        assert len(part.dtype.encode()) <= 16
        assert 0 <= part.start < part.stop <= part.layers
        assert all(math.isfinite(getattr(part, name)) for name in _FIGURES)
        assert type(part).from_map_untrusted(part.to_map()) == part


_SIZES = st.integers(1, 2**40)
_SHAPES = st.fixed_dictionaries(
    {
        "layers_bytes": mostly(st.lists(_SIZES, min_size=1, max_size=6), FREE | st.just([1] * 1025)),
        **{name: mostly(_SIZES, FREE) for name in ("first_bytes", "last_bytes", "tied_bytes")},
        **{name: mostly(st.integers(1, 2**17), FREE) for name in ("width", "inner", "vocab")},
    }
)


def _check_shape(source: object) -> None:
    try:
        shape = shape_untrusted(source)
    except ProtocolError:
        return
    assert 1 <= shape.sizes.layers <= MAX_LAYERS
    assert shape_untrusted(shape.to_map()) == shape
    training = Training(shape, 2, 1, tokens=2**20, sequence_tokens=2**20, micro_batches=65536)
    assert 0 < training.need_bytes(0, 0, shape.sizes.layers) < 2**100
    assert math.isfinite(training.flop(0, shape.sizes.layers))


TARGETS = (
    Target(
        "model-shapes",
        _SHAPES | FREE,
        _check_shape,
        ("ring.training_costs.shape_untrusted",),
        peak_bytes=256 << 10,
    ),
    Target(
        "parts-held",
        st.lists(_PARTS, max_size=MAX_PARTS + 2),
        _check,
        ("roles.seed.parts.held_untrusted",),
        peak_bytes=256 << 10,
    ),
)
