"""How hidden states travel between the stages of a split model: names, and how many bytes they have.

``fp32``, ``bf16`` and ``fp16`` are as they are, little-endian, one position after the other. ``int8`` is an fp32 scale
for each position, then one byte for each element: (4 + width) / (4 width) of fp32. ``ids`` are token ids, int32,
little-endian: what goes into the first stage, and what comes of the last one. ``compute.activations`` makes and reads
hidden states.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from p2ptrain.core.errors import ProtocolError

IDS = "ids"
ENCODINGS: Mapping[str, tuple[int, int]] = {"fp32": (4, 0), "bf16": (2, 0), "fp16": (2, 0), "int8": (1, 4)}
"""Of hidden states: bytes of an element, and those that a position has beside its elements."""
ID_BYTES = 4


def activation_bytes(encoding: str, rows: int, width: int) -> int:
    """Bytes of ``rows`` positions of ``width`` elements; of ``rows`` token ids where ``encoding`` is ``ids``.

    Raises:
        ProtocolError: there is no such encoding.
    """
    if encoding == IDS:
        return rows * ID_BYTES
    if encoding not in ENCODINGS:
        raise ProtocolError(f"no hidden states travel as {encoding[:32]!r}; known are {', '.join(ENCODINGS)}")
    element, beside = ENCODINGS[encoding]
    return rows * (width * element + beside)


def encode_ids(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


def decode_ids(data: bytes) -> tuple[int, ...]:
    """The token ids in so many whole ``ID_BYTES``."""
    return struct.unpack(f"<{len(data) // ID_BYTES}i", data)
