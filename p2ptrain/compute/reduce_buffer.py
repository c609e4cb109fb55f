"""A member's contribution to a step, from the backward pass to the ring and back.

On a CPU the reduce buffer *is* the gradient memory: nothing is copied between backward and the ring. On a GPU the
gradients are copied to a host buffer, which is pinned for CUDA, and copied back after the reduction. With CUDA a
separate stream copies them piece by piece while backward runs. In the last micro-batch of a share a hook on each
parameter reports how far the gradients are final (``compute.gradients``), so the ring can start with the front of the
buffer. The hooks run on autograd's thread, inside backward. In *exact* mode the reduce buffer is a separate array: the
gradients' sum in fixed point (``compute.exact``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from p2ptrain.compute.exact import FixedSum
from p2ptrain.compute.flat import square_sum
from p2ptrain.compute.gradients import UNIT, BackwardProgress, HostCopier, bucket_bounds
from p2ptrain.compute.recipe import BuiltPart, ModelRecipe
from p2ptrain.compute.update import StepUpdate
from p2ptrain.core.training import OnFinal


class ReduceBuffer:
    """See the module's docstring.

    Attributes:
        array: shape (numel + scalars,), on the host; ``roles.engine.Engine.reduce_buffer``.
        exact_from: as in ``roles.engine.Engine``.
    """

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
        self._copier = host_copier(self._summed, self._host) if update.final_early else None
        self._progress = BackwardProgress(flat.stops, self._copier, self._fixed.add if self._fixed else None)
        for index, segment in enumerate(flat.segments):
            hook = partial(self._progress.gradient_final, index)
            flat.model.get_parameter(segment.name).register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self.array: npt.NDArray[Any] = self._host.numpy()
        self.exact_from = update.numel - (flat.numel - flat.decayed_numel)

    @property
    def scalars(self) -> int:
        return len(self._update.contribution) - self._update.numel

    @property
    def exact(self) -> bool:
        return self._fixed is not None

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
        with self._progress.reporting_to(on_final if self._update.final_early else None):
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
        if self._host is not self._update.contribution:
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
        """See ``roles.engine``. Also NaN if a number before the loss slot cannot be."""
        numel = len(self.array) - self.scalars
        if stop > numel and not (self._fixed.fits if self._fixed else self._is_plausible()):
            return math.nan
        return square_sum(self.array[start : min(stop, numel)]) * (UNIT**2 if self.exact else 1.0)

    def _is_plausible(self) -> bool:
        *counts, loss = self.array[-self.scalars :].tolist()
        return math.isfinite(loss) and all(0 <= each <= self._update.max_scalar for each in counts)

    def partial_square_sum(self, start: int, stop: int) -> float:
        """``contributed_square_sum`` for the global norm: only the first stage counts the tied matrix."""
        if self._tied is None or self._counts_tied:
            return self.contributed_square_sum(start, stop)
        before = min(stop, self._tied.offset)
        after = max(start, self._tied.offset + self._tied.numel)
        total = self.contributed_square_sum(start, before) if start < before else 0.0
        return total + self.contributed_square_sum(after, stop) if after < stop else total


def host_copier(gradients: Tensor, host: Tensor) -> HostCopier | None:
    """With CUDA: a copier of gradients to pinned memory, on a separate stream, while backward runs."""
    if gradients.device.type != "cuda":
        return None
    stream = torch.cuda.Stream(gradients.device)  # type: ignore[no-untyped-call]

    def copy(start: int, stop: int) -> torch.cuda.Event:
        # In a hook the current stream is the one on which backward computes this gradient.
        stream.wait_stream(torch.cuda.current_stream(gradients.device))
        with torch.cuda.stream(stream):
            host[start:stop].copy_(gradients[start:stop], non_blocking=True)
            landing = torch.cuda.Event()  # type: ignore[no-untyped-call]
            landing.record(stream)
        return landing

    return HostCopier(copy, [stop for _, stop in bucket_bounds(len(gradients), gradients.element_size())])
