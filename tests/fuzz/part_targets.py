"""What a client says of the sizes of one that is to be trained."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from p2ptrain.core.errors import ProtocolError
from ring.training_costs import MAX_LAYERS, Training, shape_untrusted

from .engine import Target
from .strategies import FREE, mostly

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
)
