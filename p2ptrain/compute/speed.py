"""How fast this machine multiplies matrices: what bounds the training of a model, nearly all of whose work that is."""

from __future__ import annotations

import time

import torch

from p2ptrain.compute.device import pick_device

SECONDS = 0.1
"""That it takes on a CPU, about, and ``LEAST_PASSES``: each is short, so that the best of them is one in whose midst
nothing else had its turn, however busy the machine is."""
LEAST_PASSES = 12
HOST_ROWS, DEVICE_ROWS = 384, 4096
"""Of the matrices: as wide as a layer of a small model, and enough to fill an accelerator."""
_MOST_PASSES = 200


def compute_flops(kind: str, threads: int = 0) -> float:
    """Multiplications and additions of fp32 per second in a product of square matrices, at best.

    Args:
        kind, threads: as of ``pick_device``.

    Raises:
        UserError: there is no such device. RuntimeError: too little memory, as torch says it.
    """
    device = pick_device(kind, threads).torch_device
    rows = HOST_ROWS if device.type == "cpu" else DEVICE_ROWS
    one = torch.ones(rows, rows, dtype=torch.float32, device=device)
    best_s, until_s = float("inf"), time.perf_counter() + SECONDS
    for number in range(_MOST_PASSES):
        began = time.perf_counter()
        float((one @ one)[0, 0])  # which waits for the device
        if number:  # the first one pays for the start of kernels
            best_s = min(best_s, time.perf_counter() - began)
            if number >= LEAST_PASSES and time.perf_counter() >= until_s:
                break
    return 2 * rows**3 / max(best_s, 1e-9)
