"""What a worker says of the parts of models that it holds."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from p2ptrain.core.errors import ProtocolError
from roles.seed.parts import MAX_PARTS, held_untrusted
from wire.chain_messages import HeldPart, PartsHeld

from .engine import Target
from .strategies import made

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


TARGETS = (
    Target(
        "parts-held",
        st.lists(_PARTS, max_size=MAX_PARTS + 2),
        _check,
        ("roles.seed.parts.held_untrusted",),
        peak_bytes=256 << 10,
    ),
)
