"""How fast this machine multiplies matrices: what bounds the training of a model, nearly all of whose work that is."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from p2ptrain.compute.device import pick_device

SECONDS = 0.1
"""That it takes on a CPU, about, and ``LEAST_PASSES``: each is short, and the best of them counts."""
LEAST_PASSES = 12
HOST_ROWS, DEVICE_ROWS = 384, 4096
"""Of the matrices: as wide as a layer of a small model, and enough to fill an accelerator."""
_MOST_PASSES = 200


def compute_flops(kind: str, threads: int = 0) -> float:
    """Multiplications and additions of fp32 per second in a product of square matrices, at best.

    On a CPU it is that of one thread, by the time that it had a core, times the threads. With all of them at once, and
    by the clock, it would depend on who else computes at that moment: of alike workers that started together on two
    cores one had twice the speed of another, and a model was cut 3 to 1 between them.

    Args:
        kind, threads: as of ``pick_device``.

    Raises:
        UserError: there is no such device. RuntimeError: too little memory, as torch says it.
    """
    device = pick_device(kind, threads).torch_device
    if device.type != "cpu":
        return 2 * DEVICE_ROWS**3 / _best_s(device, DEVICE_ROWS, time.perf_counter)
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return count * 2 * HOST_ROWS**3 / _best_s(device, HOST_ROWS, time.thread_time)
    finally:
        torch.set_num_threads(count)


def _best_s(device: torch.device, rows: int, clock: Callable[[], float]) -> float:
    """Of one product; seconds of ``clock``."""
    one = torch.ones(rows, rows, dtype=torch.float32, device=device)
    best_s, until_s = float("inf"), time.perf_counter() + SECONDS
    for number in range(_MOST_PASSES):
        began = clock()
        float((one @ one)[0, 0])  # which waits for the device
        if number:  # the first one pays for the start of kernels
            best_s = min(best_s, clock() - began)
            if number >= LEAST_PASSES and time.perf_counter() >= until_s:
                break
    return max(best_s, 1e-9)
