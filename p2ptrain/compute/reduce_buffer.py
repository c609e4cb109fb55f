"""A member's contribution to a step, from the backward pass to the ring and back.

On a CPU the reduce buffer *is* the gradient memory: nothing is copied between backward and the ring. On a GPU the
gradients are copied to a host buffer, which is pinned for CUDA, and copied back after the reduction, unless the member
is alone. With CUDA a separate stream copies and measures them piece by piece while backward runs. In the last
micro-batch of a share a hook on each parameter reports how far the gradients are final (``BackwardProgress``), so the
ring can start with the front of the buffer. The hooks run on autograd's thread, inside backward. In *exact* mode the
reduce buffer is a separate array: the gradients' sum in fixed point (``FixedSum``).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from p2ptrain.compute.flat import square_sum
from p2ptrain.compute.gradients import UNIT, bucket_bounds, largest
from p2ptrain.compute.recipe import BuiltPart, ModelRecipe
from p2ptrain.compute.update import StepUpdate
from p2ptrain.core.training import OnFinal

_HOST_BLOCK_NUMEL = 1 << 15  # integers and floats of a block fit into a core's cache
_DEVICE_BLOCK_NUMEL = 1 << 22  # a GPU works best with few, large blocks


class ReduceBuffer:
    """See the module's docstring.

    Attributes:
        array: shape (numel + scalars,), on the host; ``roles.engine.Engine.reduce_buffer``.
        codec_numel: as in ``roles.engine.Engine``.
        is_own: ``array`` still is this member's own contribution.
    """

    is_own = False

    def __init__(self, recipe: ModelRecipe, built: BuiltPart, update: StepUpdate) -> None:
        flat, kind = built.flat, recipe.device.kind
        self._tied, self._counts_tied = built.tied, recipe.part.first
        self._update = update
        self._fixed = FixedSum(flat.gradients, kind, recipe.spec.micro_batches) if recipe.spec.exact else None
        self._summed = self._fixed.total if self._fixed else update.contribution
        on_host = self._fixed.on_host if self._fixed else recipe.is_on_host
        self._host = self._summed
        if not on_host:
            self._host = torch.zeros_like(self._summed, device="cpu", pin_memory=kind == "cuda")
        self._copier = host_copier(self._summed, self._host, update.numel) if update.adds_up else None
        self._progress = BackwardProgress(flat.stops, self._copier, self._fixed.add if self._fixed else None)
        for index, segment in enumerate(flat.segments):
            hook = partial(self._progress.gradient_final, index)
            flat.model.get_parameter(segment.name).register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self.array: npt.NDArray[Any] = self._host.numpy()
        self.codec_numel = update.numel - (flat.numel - flat.decayed_numel)

    @property
    def scalars(self) -> int:
        return len(self._update.contribution) - self._update.numel

    def begin_step(self) -> None:
        if self._fixed is not None:
            self._fixed.begin()
        self._progress.begin()

    @contextmanager
    def filling(self, on_final: OnFinal | None) -> Iterator[None]:
        """Run the backward pass of a micro-batch inside the block, which also adds its loss to ``FlatModel.loss_sum``.
        ``on_final``: given with the last one of the share."""
        if self._fixed is not None:
            self._fixed.begin_micro_batch()
        with self._progress.reporting_to(on_final if self._update.adds_up else None):
            yield
        if self._fixed is not None:
            self._fixed.add(len(self._update.contribution))

    def finish(self, on_final: OnFinal | None) -> None:
        """Copy the rest of the contribution into ``array``."""
        self._update.finish()
        if self._copier is not None:
            self._copier.finish(on_final or (lambda numel: None))
        elif self._host is not self._summed:
            self._host.copy_(self._summed)  # blocks until the device is done

    def copy_back(self) -> None:
        """Copy the members' sum to the device, where ``StepUpdate.apply`` reads it."""
        has_it = self._host is self._update.contribution or (self.is_own and self._fixed is None)
        if not has_it:
            self._update.contribution.copy_(self._host)

    def exchanged(self, step: int) -> Sequence[tuple[int, int]]:
        return self._update.exchanged(step)

    def tied_gradient(self) -> npt.NDArray[Any] | None:
        """View of ``array``: the gradient of the matrix that the first and the last stage share, shape (numel,). None
        on other stages, in an untied model, and if one part holds all layers."""
        if self._tied is None:
            return None
        return self.array[self._tied.offset : self._tied.offset + self._tied.numel]

    def contributed_square_sum(self, start: int, stop: int) -> float:
        """See ``roles.engine``."""
        if self._copier is None or self._fixed is not None:
            return self._square_sum(start, stop)
        return self._copier.square_sum(start, stop) if self._has_plausible_scalars(stop) else math.nan

    def partial_square_sum(self, start: int, stop: int) -> float:
        """See ``roles.engine``. Only the first stage counts the tied matrix."""
        if self._tied is None or self._counts_tied:
            return self._square_sum(start, stop)
        before = min(stop, self._tied.offset)
        after = max(start, self._tied.offset + self._tied.numel)
        total = self._square_sum(start, before) if start < before else 0.0
        return total + self._square_sum(after, stop) if after < stop else total

    def _square_sum(self, start: int, stop: int) -> float:
        if not self._has_plausible_scalars(stop):
            return math.nan
        values = self.array[start : min(stop, len(self.array) - self.scalars)]
        return square_sum(values) * (UNIT**2 if self._fixed else 1.0)

    def _has_plausible_scalars(self, stop: int) -> bool:
        """Whether the numbers behind the gradients, if they are before ``stop``, can be."""
        numel = len(self.array) - self.scalars
        if stop <= numel:
            return True
        if self._fixed is not None:
            return self._fixed.fits
        *counts, loss = self.array[numel:].tolist()
        return math.isfinite(loss) and all(0 <= count <= self._update.max_scalar for count in counts)


def host_copier(gradients: Tensor, host: Tensor, numel: int) -> HostCopier | None:
    """With CUDA: a copier of gradients to pinned memory, on a separate stream, while backward runs. It measures the
    first ``numel`` of them."""
    if gradients.device.type != "cuda":
        return None
    stream = torch.cuda.Stream(gradients.device)  # type: ignore[no-untyped-call]
    stops = [stop for _, stop in bucket_bounds(len(gradients), gradients.element_size())]
    norms = torch.zeros(len(stops), dtype=torch.float64, device=gradients.device)
    landed_norms = torch.zeros(len(stops), dtype=torch.float64, pin_memory=True)

    def copy(start: int, stop: int, piece: int) -> torch.cuda.Event:
        # In a hook the current stream is the one on which backward computes this gradient.
        stream.wait_stream(torch.cuda.current_stream(gradients.device))
        with torch.cuda.stream(stream):
            host[start:stop].copy_(gradients[start:stop], non_blocking=True)
            if gradients.is_floating_point():  # what is in fixed point is measured on the host
                measured = gradients[start : max(start, min(stop, numel))]
                torch.linalg.vector_norm(measured, dtype=torch.float64, out=norms[piece])
                landed_norms[piece].copy_(norms[piece], non_blocking=True)
            landing = torch.cuda.Event()  # type: ignore[no-untyped-call]
            landing.record(stream)
        return landing

    return HostCopier(copy, stops, landed_norms)


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


class HostCopier:
    """Copies an array from the device to the host in pieces, in order, each piece as soon as it is final.

    Args:
        copy: starts the copy of elements [start, stop), which are a piece of this number, and of their norm, to run
            after what the calling thread's stream has queued, and returns at once.
        stops: the end of each piece, ascending.
        norms: where the pieces' L2 norms arrive, shape (pieces,), fp64.
    """

    def __init__(self, copy: Callable[[int, int, int], torch.cuda.Event], stops: Sequence[int], norms: Tensor) -> None:
        self._copy = copy
        self._stops, self._norms = tuple(stops), norms
        self.begin()

    def square_sum(self, start: int, stop: int) -> float:
        """Of the pieces that end in (``start``, ``stop``], which are on the host; NaN if it is not finite."""
        pieces = slice(bisect_right(self._stops, start), bisect_right(self._stops, stop))
        total = float(self._norms[pieces].square().sum())
        return total if math.isfinite(total) else math.nan

    def begin(self) -> None:
        """Start a step: nothing is copied. Copies of an aborted step may still run; later copies overwrite them."""
        self._next = 0
        self._under_way: deque[tuple[int, torch.cuda.Event]] = deque()
        self._landed = 0

    def final(self, numel: int) -> int:
        """Start copies of elements [0, ``numel``), final on the device. Elements [0, returned) are on the host."""
        while self._next < len(self._stops) and self._stops[self._next] <= numel:
            start = self._stops[self._next - 1] if self._next else 0
            stop = self._stops[self._next]
            self._under_way.append((stop, self._copy(start, stop, self._next)))
            self._next += 1
        while self._under_way and self._under_way[0][1].query():  # type: ignore[no-untyped-call]
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
        """Autograd's hook: this pass has added everything to the gradient of parameter ``index``. Raises
        ``ValueError``: the gradient was already final, so it changed after the ring may have read it."""
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
