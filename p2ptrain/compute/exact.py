"""Gradients whose bits depend on their micro-batch alone, and their sum in fixed point (``compute.gradients``).

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

from p2ptrain.compute.gradients import UNIT, largest
from p2ptrain.core.errors import ConfigError

_HOST_BLOCK_NUMEL = 1 << 15  # its integers and its floats stay within a core's cache
_DEVICE_BLOCK_NUMEL = 1 << 22  # a GPU wants few and large ones
_REFUSED = 2  # torch: an operation without a deterministic algorithm is an error


class FixedSum:
    """The sum of a step's micro-batches in fixed point, on the gradients' device (Apple's GPUs: on the host).

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
        self._block_numel = min(_HOST_BLOCK_NUMEL if self.on_host else _DEVICE_BLOCK_NUMEL, len(gradients))
        self._scaled = torch.zeros(self._block_numel, device=self.total.device)
        self._rounded = torch.zeros_like(self._scaled, dtype=torch.int64)
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
        if numel <= self._added:
            return
        values = self._gradients[self._added : numel].to(self.total.device)
        low, high = torch.aminmax(values)  # both are NaN where any is
        self._inside &= (low >= -self._largest) & (high <= self._largest)
        for start in range(0, len(values), self._block_numel):
            part = values[start : start + self._block_numel]
            scaled = torch.mul(part, 1 / UNIT, out=self._scaled[: len(part)])  # by a power of two: exact in fp32
            rounded = self._rounded[: len(part)].copy_(scaled.round_())
            self.total[self._added + start : self._added + start + len(part)].add_(rounded)
        self._added = numel


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
