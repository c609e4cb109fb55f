"""Gradients whose bits depend on their micro-batch alone, and their sum in fixed point (``compute.fixed``).

A micro-batch's gradient is computed into zeroed memory, whatever was computed before, and by a constant number of
threads: where the work is cut decides the order of float sums, so the number must follow neither from the machine nor
from who else computes on it. On a CPU all else is constant by itself: torch's memory is aligned alike everywhere, and
denormals are flushed on all threads. On a GPU torch is held to its deterministic algorithms. Equal bits still need
equal hardware and the same torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from p2ptrain.compute.fixed import UNIT, largest
from p2ptrain.core.errors import ConfigError

_BLOCK_NUMEL = 1 << 15  # its integers, its fp64 and its fp32 stay within a core's cache
_REFUSED = 2  # torch: an operation without a deterministic algorithm is an error


class FixedSum:
    """The sum of a step's micro-batches in fixed point, on the gradients' device (on the host where that has no fp64).

    Args:
        gradients: shape (numel,), fp32: where each micro-batch's contribution is made.
        kind: of their device.

    Attributes:
        total: shape (numel,), int64.
        on_host: where that is.
    """

    def __init__(self, gradients: Tensor, kind: str, micro_batches: int) -> None:
        self._gradients = gradients
        self.on_host = kind in ("cpu", "mps")
        self.total = torch.zeros(len(gradients), dtype=torch.int64, device="cpu" if self.on_host else gradients.device)
        self._inside = torch.ones((), dtype=torch.bool, device=self.total.device)
        self._block_numel = _BLOCK_NUMEL if self.on_host else len(gradients)
        self._scaled = torch.zeros(_BLOCK_NUMEL if self.on_host else 0, dtype=torch.float64)
        self._rounded = torch.zeros(len(self._scaled), dtype=torch.int64)
        self._largest = largest(micro_batches)
        self._added = 0

    @property
    def fits(self) -> bool:
        """Whether all that was added since ``begin`` was in range; else ``total`` is worth nothing. Waits for a GPU."""
        return bool(self._inside)

    def begin(self) -> None:
        """A step begins: nothing was added."""
        self.total.zero_()
        self._inside.fill_(True)
        self.begin_micro_batch()

    def begin_micro_batch(self) -> None:
        """Zero the gradients: what this one leaves there must not depend on those before it."""
        self._gradients.zero_()
        self._added = 0

    def add(self, numel: int) -> None:
        """The micro-batch's contribution is made in elements [0, ``numel``): add what was not added yet."""
        for start in range(self._added, numel, self._block_numel):
            self._add(start, min(start + self._block_numel, numel))
        self._added = max(self._added, numel)

    def _add(self, start: int, stop: int) -> None:
        values = self._gradients[start:stop].to(self.total.device)
        low, high = torch.aminmax(values)  # both are NaN where any is
        self._inside &= (low >= -self._largest) & (high <= self._largest)
        if self.on_host:
            scaled, rounded = self._scaled[: stop - start], self._rounded[: stop - start]
            scaled.copy_(values).mul_(1 / UNIT).round_()
            self.total[start:stop] += rounded.copy_(scaled)
        else:
            self.total[start:stop] += values.double().mul_(1 / UNIT).round_().long()


@contextmanager
def constant_arithmetic(threads: int) -> Iterator[None]:
    """Compute with ``threads`` threads, and with deterministic algorithms only.

    Raises:
        ConfigError: something in the model has no deterministic algorithm on this device.
    """
    before = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    filling = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.set_num_threads(threads)
    torch.set_deterministic_debug_mode(_REFUSED)
    # That is for finding defects, and costs a pass over all memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        raise ConfigError(
            f"job.exact = true, but this model on this device is not deterministic: {str(error).splitlines()[0]}",
            remedy="use device.kind = 'cpu', or job.exact = false",
        ) from error
    finally:
        torch.set_num_threads(before[0])
        torch.set_deterministic_debug_mode(before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filling  # type: ignore[attr-defined]


def prepare_device(kind: str) -> None:
    """What must be so before a device's first use: cuBLAS sums in a fixed order with a workspace of its own only."""
    if kind == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
