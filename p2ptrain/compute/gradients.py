"""Gradients between backward and the ring, without torch: when each bucket is sent, and fixed-point arithmetic.

Buckets
-------
The flat gradients are in the order in which a backward pass produces them (``compute.flat``): the last layer comes
first. So during the backward pass of the last micro-batch, the *final* gradients are a front part of the array, except
for a few parameters that finish out of order. A ``BackwardProgress`` tracks the length of this front. The array is cut
into *buckets*, and a bucket is submitted to the ring when the front has passed its end. The cuts depend only on sizes,
and buckets are submitted in order. So all members submit the same operations in the same order, independent of their
shares and of the order within their backward passes.

On a GPU the ring needs the gradients on the host. A ``HostCopier`` starts the copy of each piece as soon as the front
has passed it, and reports which pieces have arrived. It never blocks the thread that runs backward.

Fixed point
-----------
A micro-batch's contribution v (the gradient of its part of a step's mean loss, fp32) becomes the integer
round(v * 2^44), ties to even, in an int64. Integer addition does not round, so the order and the grouping of the
additions do not matter.

**Range.** A contribution *fits* if |v| <= 2^18 / M in every element. Then no sum of a step's M contributions exceeds
2^62, and no partial sum overflows. If all micro-batches have equally many targets, the limit is a gradient of 262,144
in one element of the mean loss of a micro-batch, for every M. With clipping at 1 a run has diverged long before. A
contribution that is larger or not finite does not fit: it is void, and its step must not be committed.

**Error.** A value of magnitude 2^-20 or more keeps all 24 bits of fp32. A smaller value is rounded to a multiple of
2^-44 (5.7e-14), so its error is at most 2^-45, and the error of a sum at most M * 2^-45. This is negligible beside the
sqrt(v) + 1e-8 by which AdamW divides. A sum in fp32 errs by up to (M - 1) * 2^-24 of its largest partial sum. The
fixed-point sum is rounded to fp32 once, when it is applied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from p2ptrain.core.training import OnFinal

FRACTION_BITS = 44
UNIT = 2.0**-FRACTION_BITS
"""The value of the integer 1."""


def bucket_bounds(numel: int, itemsize: int, bucket_bytes: int = 0) -> list[tuple[int, int]]:
    """Cut ``range(numel)`` into equal runs [start, stop), in order; the same on every member.

    Args:
        bucket_bytes: approximate size; 0 for 1/16 of the array, at least 1 MiB: smaller buckets save less than they
            cost. There are at most 256 buckets, because each operation in progress takes memory at both neighbours.
    """
    total_bytes = numel * itemsize
    count = min(-(-total_bytes // bucket_bytes), 256) if bucket_bytes else min(total_bytes >> 20, 16)
    count = max(count, 1)
    # 16 fp32 elements are 64 bytes, the alignment of the parameters in the flat arrays.
    cuts = [numel * number // count // 16 * 16 for number in range(count)] + [numel]
    return [(start, stop) for start, stop in pairwise(cuts) if start < stop]


class PendingCopy(Protocol):
    """A copy that was started; ``torch.cuda.Event`` has this interface."""

    def query(self) -> bool:
        """Whether the copy is complete."""

    def synchronize(self) -> None:
        """Block until the copy is complete."""


class HostCopier:
    """Copies an array from the device to the host in pieces, in order, each piece as soon as it is final.

    Args:
        copy: starts the copy of elements [start, stop), to run after all work that the device has queued, and returns
            at once.
        stops: the end of each piece, ascending.
    """

    def __init__(self, copy: Callable[[int, int], PendingCopy], stops: Sequence[int]) -> None:
        self._copy = copy
        self._stops = tuple(stops)
        self.begin()

    def begin(self) -> None:
        """Start a step: nothing is copied. Copies of an aborted step may still run; later copies overwrite them."""
        self._next = 0
        self._under_way: deque[tuple[int, PendingCopy]] = deque()
        self._landed = 0

    def final(self, numel: int) -> int:
        """Start copies of elements [0, ``numel``), final on the device. Elements [0, returned) are on the host."""
        while self._next < len(self._stops) and self._stops[self._next] <= numel:
            start = self._stops[self._next - 1] if self._next else 0
            stop = self._stops[self._next]
            self._under_way.append((stop, self._copy(start, stop)))
            self._next += 1
        while self._under_way and self._under_way[0][1].query():
            self._landed = self._under_way.popleft()[0]
        return self._landed

    def finish(self, on_final: OnFinal) -> None:
        """Copy the rest, as all is final on the device. Call ``on_final`` when each piece has arrived."""
        on_final(self.final(self._stops[-1]))
        while self._under_way:
            stop, landing = self._under_way.popleft()
            landing.synchronize()
            self._landed = stop
            on_final(stop)


class BackwardProgress:
    """Tracks, during a step's last backward pass, how far the reduce buffer is final.

    Hooks on the parameters refer to it. It must not refer to the parameters: such a reference cycle would keep a job's
    memory until the garbage collector runs.

    Args:
        stops: the end of each parameter in the flat array, ascending.
        host_copier: copies to the reduce buffer, if that is not the memory to which backward writes.
        convert: called with the number of final elements, to bring them into a reduce buffer of another format.
    """

    def __init__(self, stops: Sequence[int], host_copier: HostCopier | None, convert: OnFinal | None = None) -> None:
        self._stops = tuple(stops)
        self._host_copier = host_copier
        self._convert = convert
        self._on_final: OnFinal | None = None
        self.begin()

    def begin(self) -> None:
        self._final = [False] * len(self._stops)
        self._reached = 0  # parameters before this one are final
        if self._host_copier is not None:
            self._host_copier.begin()

    @contextmanager
    def reporting_to(self, on_final: OnFinal | None) -> Iterator[None]:
        """Report progress to ``on_final``, if given, while the last backward pass runs inside the block."""
        self._on_final = on_final
        try:
            yield
        finally:
            self._on_final = None

    def gradient_final(self, index: int, parameter: object) -> None:
        """Autograd's hook: this pass has added everything to the gradient of parameter ``index``.

        Raises:
            ValueError: the gradient was already final, so it changed after the ring may have read it.
        """
        if self._on_final is None:
            return
        if self._final[index]:
            raise ValueError(f"the gradient of parameter {index} became final twice in one pass")
        self._final[index] = True
        while self._reached < len(self._stops) and self._final[self._reached]:
            self._reached += 1
        numel = self._stops[self._reached - 1] if self._reached else 0
        if self._convert is not None:
            self._convert(numel)
        self._on_final(numel if self._host_copier is None else self._host_copier.final(numel))


# --------------------------------------------------------------------------------------------------------- fixed point


def largest(micro_batches: int) -> float:
    """Largest magnitude of a contribution that fits, for a step of ``micro_batches`` contributions."""
    return 2.0 ** (62 - FRACTION_BITS) / micro_batches


def to_fixed(values: npt.NDArray[np.float32], micro_batches: int) -> tuple[npt.NDArray[np.int64], bool]:
    """Contribution ``values`` in fixed point, same shape, and whether all fit. If one does not fit, all are zeros."""
    fits = bool(np.all(np.abs(values) <= largest(micro_batches)))
    if not fits:
        return np.zeros(values.shape, np.int64), False
    return np.rint(np.multiply(values, 1 / UNIT, dtype=np.float64)).astype(np.int64), True


def to_float(fixed: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """The nearest fp32 values, same shape."""
    return fixed.astype(np.float32) * np.float32(UNIT)
