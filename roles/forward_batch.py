"""Sends forward requests of several sessions together, from a split model's client or from a stage."""

from __future__ import annotations

from collections.abc import Sequence

from wire.chain_messages import CHAIN_STREAM, ForwardBatch, ForwardRequest, split_batch
from wire.connection import Connection


def send_forward(connection: Connection, work: Sequence[tuple[ForwardRequest, memoryview]]) -> None:
    """Send requests and their payloads, which must not change, in as few messages as possible. Raises
    ``ConnectionLost``."""
    payloads = iter([payload for _, payload in work])
    for requests in split_batch(request for request, _ in work):
        parts = [next(payloads) for _ in requests]
        connection.send(ForwardBatch(requests))
        payload = parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
        connection.send_bulk(payload, generation=0, stream=CHAIN_STREAM)
