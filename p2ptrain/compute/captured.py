"""Decoding steps that a GPU replays.

For one new position, or few, launching the kernels takes a GPU longer than running them. A CUDA graph captures the
kernels of a step once and launches all of them in one call, on the same memory. So what differs between steps is in
tensors: token ids or hidden states, and positions. A step writes keys and values at its positions in the session's
memory, and attends to a *bucket*: the first 2^n positions there, with a mask of later ones, which transformers makes as
for its ``StaticCache``. A text that outgrows its bucket takes another capture.

Models of other families than ``FAMILIES`` run as usual, and so does a part of which a capture failed, for example
because its code reads a value from the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import StaticLayer

from p2ptrain.compute.key_value_cache import KeyValueCache
from p2ptrain.compute.model import first_line
from p2ptrain.compute.part import PartModel
from p2ptrain.core.tensor_files import SPLIT_FAMILIES

Replay = Callable[[], Tensor]
Capture = Callable[[Replay], Replay]
"""Takes a step, which reads and writes the same tensors at each call, and may run it several times. Returns a call that
repeats its kernels and returns its result, each time in the same memory. Raises anything: it cannot be captured."""
STEPS_BEFORE_CAPTURE = 8
"""Usual steps before a capture, which takes about as long: so none makes a text take more than twice its time. Neither
is a step captured if the session has no room for so many more."""
MOST_NEW = 16
"""New positions of a step: one token, or it and drafts."""
SMALLEST_BUCKET, LARGEST_BUCKET = 256, 4096
"""The largest is an estimate. With a mask, attention does not split a text over the processors of a GPU, so for a long
one it may take longer than the launches that a replay saves."""

FAMILIES = frozenset(SPLIT_FAMILIES) - {"falcon"}
"""``model_type`` of models whose steps tests capture. Falcon's code makes index tensors of lists, on the host."""


class _StaticLayer(StaticLayer):
    """Keys and values of one layer (1, heads, bucket, head width); a step writes at ``positions``, int64 (T,)."""

    def __init__(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        super().__init__(max_cache_len=keys.shape[2])  # type: ignore[no-untyped-call]
        self.is_initialized = True
        self._keys, self._values, self._positions = keys, values, positions

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self._keys.index_copy_(2, self._positions, key_states.to(self._keys.dtype))
        self._values.index_copy_(2, self._positions, value_states.to(self._values.dtype))
        return self._keys, self._values

    def get_seq_length(self) -> int:
        """The most positions before a step. Models take only sizes from it, because a part gives them positions."""
        return self.max_cache_len - len(self._positions)


class _StaticCache(Cache):
    def __init__(self, layers: list[Any], positions: Tensor) -> None:
        super().__init__(layers=layers)
        self._positions = positions

    def get_query_offset(self, layer_idx: int = 0) -> Any:  # masks are made from it
        return self._positions[0]


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """``x`` (T, ...) and ``positions`` (T,) are the memory of its input. ``replay``: see ``Capture``."""

    bucket: int
    x: Tensor
    positions: Tensor
    replay: Replay


SessionSteps = dict[tuple[int, int], int | CapturedStep]
"""By number of positions and rows of logits: how many usual steps a session had, or what was captured after them."""


def can_capture(model: Any) -> bool:
    """Whether this code supports steps of ``model``, a ``PartModel`` or a ``WholeModel``, with this transformers."""
    is_known = isinstance(model, PartModel) and model.config.model_type in FAMILIES
    return is_known and not model.switches and hasattr(Cache, "get_query_offset")


class PassRunner:
    """Computes a part's sessions: steps that a session repeats by replays, other passes as usual. After a capture that
    failed it captures no more."""

    def __init__(self, model: PartModel, capture: Capture) -> None:
        self._model = model
        self._capture: Capture | None = capture

    def forward(self, x: Tensor, start: int, cache: KeyValueCache, steps: SessionSteps, *, rows: int) -> Tensor:
        """``PartModel.forward`` at the positions from ``start``, for ``x`` (T,) or (T, width) and with a result without
        the batch's dimension: logits of the last ``rows``, or hidden states of all."""
        stop = start + len(x)
        step = self._step(x, start, cache, steps, rows)
        if step is None:
            return self._model.forward(x[None], torch.arange(start, stop, device=x.device), cache, logits=rows)[0]
        step.x.copy_(x)
        torch.arange(start, stop, out=step.positions)
        out = step.replay().clone()
        cache.advance(stop)
        return out

    def _step(self, x: Tensor, start: int, cache: KeyValueCache, steps: SessionSteps, rows: int) -> CapturedStep | None:
        shape, ahead = (len(x), rows), start + len(x) + STEPS_BEFORE_CAPTURE
        known = steps.get(shape, 0)
        if isinstance(known, CapturedStep) and start + len(x) <= known.bucket:
            return known
        if self._capture is None or start == 0 or len(x) > MOST_NEW or ahead > min(cache.positions, LARGEST_BUCKET):
            return None
        if isinstance(known, int) and known < STEPS_BEFORE_CAPTURE:
            steps[shape] = known + 1
            return None
        bucket = max(SMALLEST_BUCKET, 1 << (ahead - 1).bit_length())
        try:
            step = steps[shape] = self._captured(self._capture, bucket, x, start, cache, rows)
        except Exception as error:  # noqa: BLE001 - a model's code may fail in any way
            logging.getLogger(__name__).warning("decoding steps are not captured: %s", first_line(error))
            self._capture = None
            return None
        return step

    def _captured(
        self, capture: Capture, bucket: int, x: Tensor, start: int, cache: KeyValueCache, rows: int
    ) -> CapturedStep:
        model, x = self._model, x.clone()
        positions = torch.arange(start, start + len(x), device=x.device)
        layers = [_StaticLayer(*memory, positions) for memory in cache.memory(bucket)]
        static = cast(KeyValueCache, _StaticCache(layers, positions))
        replay = capture(lambda: model.forward(x[None], positions, static, logits=rows)[0])
        return CapturedStep(bucket, x, positions, replay)


class CudaCapture:
    """A ``Capture`` into CUDA graphs, as https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs describes.
    All share one pool of memory, because each result is copied before another graph runs."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    def __call__(self, step: Replay) -> Replay:
        usual = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(usual)
        graph, pool = torch.cuda.CUDAGraph(), next((other.pool() for other in self._graphs), None)
        with torch.cuda.stream(self._stream):  # ``graph`` does not leave it if the capture fails
            for _ in range(2):  # libraries load kernels and allocate workspaces, which a capture cannot
                step()
            # Other threads of the process may allocate meanwhile.
            with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                out = step()
        usual.wait_stream(self._stream)
        self._graphs.add(graph)

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay
