"""How fast this machine reads weights: what bounds the decoding of one token, whose every weight is read once."""

from __future__ import annotations

import time

import torch

from p2ptrain.compute.device import pick_device

BYTES = 256 << 20
"""Of the matrix: more than any cache holds."""
PASSES = 3
_ROWS = 4096


def stream_bps(kind: str, *, size_bytes: int = BYTES) -> float:
    """Bytes of weights per second that a matrix-vector product reads; the best of a few passes (some 0.1 s on a CPU).

    Args:
        kind: as of ``pick_device``.

    Raises:
        UserError: there is no such device. RuntimeError: too little memory, as torch says it.
    """
    device = pick_device(kind).torch_device
    matrix = torch.ones(_ROWS, size_bytes // (4 * _ROWS), dtype=torch.float32, device=device)
    vector = torch.ones(matrix.shape[1], dtype=torch.float32, device=device)
    took_s = []
    for _ in range(1 + PASSES):  # the first one pays for the start of kernels and pages
        began = time.perf_counter()
        float((matrix @ vector)[0])  # which waits for the device
        took_s.append(time.perf_counter() - began)
    return size_bytes / max(min(took_s[1:]), 1e-9)
