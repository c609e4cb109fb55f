"""Encodings of hidden states and token ids between the stages of a split model: their names and sizes.

``fp32``, ``bf16`` and ``fp16`` are the plain elements, little-endian, one position after the other. ``int8`` is an fp32
scale per position, followed by one byte per element: (4 + width) / (4 width) of the size of fp32. ``ids`` are token
ids, int32, little-endian: the input of the first stage and the output of the last one. ``compute.activations`` encodes
and decodes hidden states.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from p2ptrain.core.errors import ProtocolError

IDS = "ids"
ENCODINGS: Mapping[str, tuple[int, int]] = {"fp32": (4, 0), "bf16": (2, 0), "fp16": (2, 0), "int8": (1, 4)}
"""Encodings of hidden states: bytes per element, and extra bytes per position."""
ID_BYTES = 4


def activation_bytes(encoding: str, rows: int, width: int) -> int:
    """Bytes of ``rows`` positions of ``width`` elements, or of ``rows`` token ids if ``encoding`` is ``ids``.

    Raises:
        ProtocolError: the encoding is unknown.
    """
    if encoding == IDS:
        return rows * ID_BYTES
    if encoding not in ENCODINGS:
        raise ProtocolError(f"unknown encoding of hidden states {encoding[:32]!r}; known are {', '.join(ENCODINGS)}")
    element, extra_bytes = ENCODINGS[encoding]
    return rows * (width * element + extra_bytes)


def encode_ids(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


def decode_ids(data: bytes) -> tuple[int, ...]:
    """The token ids in ``data``, whose length must be a multiple of ``ID_BYTES``."""
    return struct.unpack(f"<{len(data) // ID_BYTES}i", data)
