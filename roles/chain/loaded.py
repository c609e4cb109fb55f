"""What a worker says of a part that it has loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from p2ptrain.core.errors import ProtocolError
from p2ptrain.core.ids import is_id


@dataclass(frozen=True, slots=True)
class Loaded:
    """The answer to ``part.load``."""

    part: str
    width: int
    vocab_size: int
    encoding: str
    weights_bytes: int
    cache_position_bytes: int
    read_bytes: int
    received_bytes: int
    resident_bytes: int
    device: str


def loaded_untrusted(answer: dict[str, Any]) -> Loaded:
    """The answer to ``part.load``. Raises ``ProtocolError``."""
    part, encoding, device = answer.get("part"), answer.get("encoding"), answer.get("device")
    if not isinstance(part, str) or not is_id(part):
        raise ProtocolError("a part that is loaded without an id")
    if not isinstance(encoding, str) or not isinstance(device, str) or len(encoding) > 16:
        raise ProtocolError("a part that is loaded without encoding or device")
    counts: list[int] = []
    for name in _COUNTS:
        value = answer.get(name)
        if type(value) is not int or not 0 <= value < 1 << 60:
            raise ProtocolError(f"a part that is loaded with an impossible {name}")
        counts.append(value)
    if not 0 < counts[1] < 1 << 31:
        raise ProtocolError("a part of a model without a vocabulary")
    width, vocab_size, weights_bytes, cache_position_bytes, read_bytes, received_bytes, resident_bytes = counts
    return Loaded(
        part,
        width,
        vocab_size,
        encoding,
        weights_bytes,
        cache_position_bytes,
        read_bytes,
        received_bytes,
        resident_bytes,
        device[:80],
    )


_COUNTS = (
    "width",
    "vocab_size",
    "weights_bytes",
    "cache_position_bytes",
    "read_bytes",
    "received_bytes",
    "resident_bytes",
)
