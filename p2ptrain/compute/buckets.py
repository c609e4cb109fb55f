"""Which part of the gradients goes into the ring when. Arithmetic and bookkeeping only, no torch.

Theory of operation
-------------------
The flat gradients are laid out in the order in which a backward pass makes them (``compute.flat``): the last layer's
first. So what is *final* at any moment of the last micro-batch's backward pass is a front part of the array, but for
the few parameters that come out of turn. A ``Front`` follows how far it reaches. The array is cut into *buckets*, and
a bucket is handed to the ring when the front has passed its end. The cuts follow from sizes alone and buckets go out
in their order, so all members hand over the same operations in the same order, whatever each one's backward pass did
first and whatever its share of the work is.

On a GPU the gradients must come to the host before the ring can have them: a ``Ferry`` starts a copy of each piece as
soon as the front has passed it, and tells which pieces have landed. It never blocks the thread that runs backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Protocol

OnFinal = Callable[[int], None]
"""Told how many elements from the buffer's start on are final; see ``roles.engine``."""

MIN_BUCKET_BYTES = 1 << 20
"""Where buckets choose their size. Below, a bucket's own cost (frames, and the loop's turns, taken from the backward
pass) is no longer small beside what it sends: 3 MiB of gradients on a loopback trained 2 % slower in twelve."""

USUAL_BUCKETS = 16
"""Where buckets choose their size, at most. What stays exposed when backward ends is about one bucket: more and smaller
ones save less than 1/16 of the exchange, on links of any speed."""

MAX_BUCKETS = 256
"""Whatever the size that was asked for: operations under way cost memory at both neighbours."""

_ALIGN_NUMEL = 16  # as the parameters in the flat arrays: 64 bytes of fp32


def bucket_bounds(numel: int, itemsize: int, bucket_bytes: int = 0) -> list[tuple[int, int]]:
    """Cut ``range(numel)`` into equal runs [start, stop), in order; the same on every member.

    Args:
        bucket_bytes: of a bucket, about; 0 for 1/16 of the whole, 1 MiB at least. A size that would make more than
            ``MAX_BUCKETS`` is raised.
    """
    total_bytes = numel * itemsize
    if bucket_bytes:
        count = min(-(-total_bytes // bucket_bytes), MAX_BUCKETS)
    else:
        count = min(total_bytes // MIN_BUCKET_BYTES, USUAL_BUCKETS)
    count = max(count, 1)
    cuts = [numel * number // count // _ALIGN_NUMEL * _ALIGN_NUMEL for number in range(count)] + [numel]
    return [(start, stop) for start, stop in pairwise(cuts) if start < stop]


class Front:
    """How far from its start an array is final, while its parts become final in whatever order.

    Args:
        stops: where each part ends, ascending; part i begins where part i - 1 ends.
    """

    def __init__(self, stops: Sequence[int]) -> None:
        self._stops = tuple(stops)
        self._final = [False] * len(self._stops)
        self._reached = 0  # parts before this one are final

    def begin(self) -> None:
        """Nothing is final."""
        self._final = [False] * len(self._stops)
        self._reached = 0

    def mark(self, index: int) -> int:
        """Part ``index`` is final. The elements that are final from the array's start without a gap.

        Raises:
            ValueError: it was final already: what the ring was given changed afterwards.
        """
        if self._final[index]:
            raise ValueError(f"part {index} became final twice in one pass")
        self._final[index] = True
        while self._reached < len(self._stops) and self._final[self._reached]:
            self._reached += 1
        return self._stops[self._reached - 1] if self._reached else 0


class Landing(Protocol):
    """A copy that was started, as ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Whether it has landed."""
        ...

    def synchronize(self) -> None:
        """Block until it has."""
        ...


class Ferry:
    """Copies pieces of a device's array to the host, in order, each as soon as it is final.

    Args:
        copy: starts the copy of elements [start, stop) behind everything that the device was given so far, and
            returns at once.
        stops: where the pieces end, ascending.
    """

    def __init__(self, copy: Callable[[int, int], Landing], stops: Sequence[int]) -> None:
        self._copy = copy
        self._stops = tuple(stops)
        self.begin()

    def begin(self) -> None:
        """Nothing was copied. What is still under way is of a step that was given up; later copies overwrite it."""
        self._next = 0
        self._under_way: deque[tuple[int, Landing]] = deque()
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
        landed = self.final(self._stops[-1])
        on_final(landed)
        while self._under_way:
            stop, landing = self._under_way.popleft()
            landing.synchronize()
            self._landed = stop
            on_final(stop)


class Watch:
    """Follows one step's backward passes, and tells of the last one how far the reduce buffer is final.

    It is what the hooks on the parameters hold: it must not hold the parameters, or a job's memory would wait for the
    garbage collector.

    Args:
        stops: where each parameter's elements end in the flat array.
        ferry: where the reduce buffer is in other memory than what backward writes.
        convert: where it holds the gradients in another form: told how much of the front to bring into it.
    """

    def __init__(self, stops: Sequence[int], ferry: Ferry | None, convert: OnFinal | None = None) -> None:
        self._front = Front(stops)
        self._ferry = ferry
        self._convert = convert
        self._on_final: OnFinal | None = None

    def begin(self) -> None:
        """A step begins: nothing is final."""
        self._front.begin()
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
        """Autograd's hook: all that this pass adds to the gradient of parameter ``index`` was added."""
        if self._on_final is None:
            return
        numel = self._front.mark(index)
        if self._convert is not None:
            self._convert(numel)
        self._on_final(numel if self._ferry is None else self._ferry.final(numel))
