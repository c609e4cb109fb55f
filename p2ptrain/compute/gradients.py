"""Gradients on their way to the ring, without torch: which part of them goes when, and sums in fixed point.

Buckets
-------
The flat gradients are laid out in the order in which a backward pass makes them (``compute.flat``): the last layer's
first. So what is *final* at any moment of the last micro-batch's backward pass is a front part of the array, but for
the few parameters that come out of turn. A ``BackwardProgress`` follows how far it reaches. The array is cut into
*buckets*, and a bucket is handed to the ring when the front has passed its end. The cuts follow from sizes alone and
buckets go out in their order, so all members hand over the same operations in the same order, whatever each one's
backward pass did first and whatever its share of the work is.

On a GPU the gradients must come to the host before the ring can have them: a ``HostCopier`` starts a copy of each piece
as soon as the front has passed it, and tells which pieces have landed. It never blocks the thread that runs backward.

Fixed point
-----------
A micro-batch's contribution v (the gradient of its mean loss / M, fp32) becomes the integer round(v * 2^44), ties to
even, in an int64. Integers add without rounding, so it does not matter who adds what to what, and when.

**Range.** |v| <= 2^18 / M: then no sum over any of a step's M micro-batches is beyond 2^62, and none overflows on the
way. That is a micro-batch's own gradient (not divided by M) of 262,144 in one element, whatever M is: with clipping at
1 a run is lost long before. What is beyond, or not finite, does not *fit*: the contribution is void, and its step must
not be committed.

**Error.** What is 2^-20 or larger in magnitude keeps all 24 bits of fp32. What is smaller is rounded to a multiple of
2^-44 (5.7e-14): half of that each, hence M * 2^-45 in a sum, at most. AdamW divides by sqrt(v) + 1e-8, beside which
that is nothing; a sum in fp32 errs by up to (M - 1) * 2^-24 of its largest partial sum. The sum is rounded to fp32 as
it is applied, once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

OnFinal = Callable[[int], None]
"""Told how many elements from the buffer's start on are final; see ``roles.engine``."""
FRACTION_BITS = 44
UNIT = 2.0**-FRACTION_BITS
"""What an integer's 1 stands for."""


def bucket_bounds(numel: int, itemsize: int, bucket_bytes: int = 0) -> list[tuple[int, int]]:
    """Cut ``range(numel)`` into equal runs [start, stop), in order; the same on every member.

    Args:
        bucket_bytes: of a bucket, about; 0 for 1/16 of the whole, 1 MiB at least: more and smaller ones save less than
            1/16 of the exchange, and cost as much as they send. There are 256 at most, for operations under way cost
            memory at both neighbours.
    """
    total_bytes = numel * itemsize
    count = min(-(-total_bytes // bucket_bytes), 256) if bucket_bytes else min(total_bytes >> 20, 16)
    count = max(count, 1)
    # On boundaries of 64 bytes of fp32, as the parameters in the flat arrays.
    cuts = [numel * number // count // 16 * 16 for number in range(count)] + [numel]
    return [(start, stop) for start, stop in pairwise(cuts) if start < stop]


class PendingCopy(Protocol):
    """A copy that was started, as ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Whether it has landed."""

    def synchronize(self) -> None:
        """Block until it has."""


class HostCopier:
    """Copies pieces of a device's array to the host, in order, each as soon as it is final.

    Args:
        copy: starts the copy of elements [start, stop) behind everything that the device was given so far, and
            returns at once.
        stops: where the pieces end, ascending.
    """

    def __init__(self, copy: Callable[[int, int], PendingCopy], stops: Sequence[int]) -> None:
        self._copy = copy
        self._stops = tuple(stops)
        self.begin()

    def begin(self) -> None:
        """Nothing was copied. What is still under way is of a step that was given up; later copies overwrite it."""
        self._next = 0
        self._under_way: deque[tuple[int, PendingCopy]] = deque()
        self._landed = 0

    def final(self, numel: int) -> int:
        """Elements [0, numel) are final on the device. Those that have landed on the host, [0, returned)."""
        while self._next < len(self._stops) and self._stops[self._next] <= numel:
            start = self._stops[self._next - 1] if self._next else 0
            stop = self._stops[self._next]
            self._under_way.append((stop, self._copy(start, stop)))
            self._next += 1
        while self._under_way and self._under_way[0][1].query():
            self._landed = self._under_way.popleft()[0]
        return self._landed

    def finish(self, on_final: OnFinal) -> None:
        """All is final on the device: copy what is left, and tell ``on_final`` of each piece as it lands."""
        on_final(self.final(self._stops[-1]))
        while self._under_way:
            stop, landing = self._under_way.popleft()
            landing.synchronize()
            self._landed = stop
            on_final(stop)


class BackwardProgress:
    """Follows one step's backward passes, and tells of the last one how far the reduce buffer is final.

    It is what the hooks on the parameters hold: it must not hold the parameters, or a job's memory would wait for the
    garbage collector.

    Args:
        stops: where each parameter's elements end in the flat array, ascending.
        ferry: where the reduce buffer is in other memory than what backward writes.
        convert: where it holds the gradients in another form: told how much of the front to bring into it.
    """

    def __init__(self, stops: Sequence[int], ferry: HostCopier | None, convert: OnFinal | None = None) -> None:
        self._stops = tuple(stops)
        self._ferry = ferry
        self._convert = convert
        self._on_final: OnFinal | None = None
        self.begin()

    def begin(self) -> None:
        """A step begins: nothing is final."""
        self._final = [False] * len(self._stops)
        self._reached = 0  # parameters before this one are final
        if self._ferry is not None:
            self._ferry.begin()

    @contextmanager
    def telling(self, on_final: OnFinal | None) -> Iterator[None]:
        """Inside runs the backward pass that makes gradients final, if there is an ``on_final`` to tell."""
        self._on_final = on_final
        try:
            yield
        finally:
            self._on_final = None

    def gradient_final(self, index: int, parameter: object) -> None:
        """Autograd's hook: all that this pass adds to the gradient of parameter ``index`` was added.

        Raises:
            ValueError: it was final already: what the ring was given changed afterwards.
        """
        if self._on_final is None:
            return
        if self._final[index]:
            raise ValueError(f"part {index} became final twice in one pass")
        self._final[index] = True
        while self._reached < len(self._stops) and self._final[self._reached]:
            self._reached += 1
        numel = self._stops[self._reached - 1] if self._reached else 0
        if self._convert is not None:
            self._convert(numel)
        self._on_final(numel if self._ferry is None else self._ferry.final(numel))


# --------------------------------------------------------------------------------------------------------- fixed point


def largest(micro_batches: int) -> float:
    """The largest magnitude of a contribution that fits, where a step has so many."""
    return 2.0 ** (62 - FRACTION_BITS) / micro_batches


def to_fixed(values: npt.NDArray[np.float32], micro_batches: int) -> tuple[npt.NDArray[np.int64], bool]:
    """Contribution ``values`` in fixed point, of the same shape, and whether all fit; zeros where they do not."""
    fits = bool(np.all(np.abs(values) <= largest(micro_batches)))
    if not fits:
        return np.zeros(values.shape, np.int64), False
    return np.rint(np.multiply(values, 1 / UNIT, dtype=np.float64)).astype(np.int64), True


def to_float(fixed: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """The nearest fp32 values, of the same shape."""
    return fixed.astype(np.float32) * np.float32(UNIT)
