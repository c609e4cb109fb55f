"""Exact mode: gradients whose bits depend only on their micro-batch, and their sum in fixed point
(``compute.gradients``).

Each micro-batch's gradient is computed into zeroed memory, by a constant number of threads. The number of threads
decides the order of float sums, so it must depend neither on the machine nor on other processes there. Nothing else
varies on a CPU: torch aligns memory equally everywhere, and denormals are flushed on all threads. On a GPU torch uses
only deterministic algorithms. Equal bits still need equal hardware and the same torch version.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from p2ptrain.compute.device import flushed_denormals
from p2ptrain.compute.gradients import UNIT, largest
from p2ptrain.core.errors import ConfigError

_HOST_BLOCK_NUMEL = 1 << 15  # integers and floats of a block fit into a core's cache
_DEVICE_BLOCK_NUMEL = 1 << 22  # a GPU works best with few, large blocks
_REFUSED = 2  # torch: an operation without a deterministic algorithm is an error


class FixedSum:
    """The sum of a step's contributions in fixed point, on the gradients' device (for Apple GPUs: on the host).

    Args:
        gradients: shape (numel,), fp32; backward writes each micro-batch's contribution here.

    Attributes:
        total: the sum, shape (numel,), int64.
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
        """Whether every contribution since ``begin`` was in range; if not, ``total`` is invalid. Waits for a GPU."""
        return bool(self._inside)

    def begin(self) -> None:
        self.total.zero_()
        self._inside.fill_(True)
        self.begin_micro_batch()

    def begin_micro_batch(self) -> None:
        """Zero the gradients, so that this micro-batch's do not depend on earlier ones."""
        self._gradients.zero_()
        self._added = 0

    def add(self, numel: int) -> None:
        """Add those of the micro-batch's elements [0, ``numel``), which are final, that were not added yet."""
        if numel <= self._added:
            return
        values = self._gradients[self._added : numel].to(self.total.device)
        low, high = torch.aminmax(values)  # both are NaN if any element is
        self._inside &= (low >= -self._largest) & (high <= self._largest)
        for start in range(0, len(values), self._block_numel):
            part = values[start : start + self._block_numel]
            scaled = torch.mul(part, 1 / UNIT, out=self._scaled[: len(part)])  # by a power of two: exact in fp32
            rounded = self._rounded[: len(part)].copy_(scaled.round_())
            self.total[self._added + start : self._added + start + len(part)].add_(rounded)
        self._added = numel


@contextmanager
def arithmetic(exact_threads: int) -> Iterator[None]:
    """Compute with flushed denormals; in exact mode, with ``exact_threads`` above 0, as ``constant_arithmetic``."""
    with flushed_denormals(), constant_arithmetic(exact_threads) if exact_threads else nullcontext():
        yield


@contextmanager
def constant_arithmetic(threads: int) -> Iterator[None]:
    """Compute with ``threads`` threads, and with deterministic algorithms only.

    Raises:
        ConfigError: an operation of the model has no deterministic algorithm on this device.
    """
    before = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    filling = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.set_num_threads(threads)
    torch.set_deterministic_debug_mode(_REFUSED)
    # Filling is a debugging aid of torch's, and costs a pass over all memory.
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
    """Call before the first use of a device: cuBLAS sums in a fixed order only with a fixed workspace."""
    if kind == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
