"""Passes of sessions that have few new positions each, in the form that suits a GPU, which replays repeated ones.

For few rows, launching the kernels takes a GPU longer than running them. A CUDA graph captures the kernels of a pass
once and launches all of them in one call, on the same memory. So what differs between passes is in tensors: token ids
or hidden states, positions, and where the memory has them. The sizes of these tensors are *buckets*: the numbers of
sessions, of rows of each, and of positions that they attend to, each rounded up to a power of two. Missing rows
are copies of their session's first one, and missing sessions copies of the first one.

A part of which a capture failed, for example because its code reads a value from the device, runs as usual.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from weakref import WeakSet

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import Tensor

from p2ptrain.compute.key_value_cache import KeyValueMemory, PaddedCache, SessionRows
from p2ptrain.compute.model import first_line
from p2ptrain.compute.part import PartModel

Replay = Callable[[], Tensor]
Capture = Callable[[Replay], Replay]
"""Takes a pass, which reads and writes the same tensors at each call, and may run it several times. Returns a call that
repeats its kernels and returns its result, each time in the same memory. Raises anything: it cannot be captured."""
PASSES_BEFORE_CAPTURE = 8
"""Usual passes of a bucket before its capture, which takes about as long."""
MOST_NEW = 16
"""New positions of a session: one token, or it and drafts."""
SMALLEST_BUCKET, LARGEST_BUCKET = 256, 4096
"""Positions. The largest is an estimate: a long text's attention may take longer than the launches that a replay
saves."""
MOST_CAPTURES = 32
"""Captures that are kept, those used last; each keeps the memory of its tensors."""
Bucket = tuple[int, int, int, str]
"""Sessions, rows of each, positions that they attend to; their adapter, whose kernels are captured."""


@dataclass(frozen=True, slots=True)
class CapturedPass:
    """``x`` (S R, ...), ``positions`` (S, R), ``slots`` (S R,) and ``read`` (S, K) are the memory of its input, see
    ``PaddedCache``. ``replay``: see ``Capture``."""

    x: Tensor
    positions: Tensor
    slots: Tensor
    read: Tensor
    replay: Replay

    def run(self, *inputs: Tensor) -> Tensor:
        for own, new in zip((self.x, self.positions, self.slots, self.read), inputs, strict=True):
            own.copy_(new)
        return self.replay()


class PassRunner:
    """Computes passes; those with up to ``MOST_NEW`` rows of each session, which repeat a bucket, by replays. After a
    capture that failed it captures no more."""

    def __init__(self, model: PartModel, memory: KeyValueMemory, capture: Capture) -> None:
        self._model, self._memory = model, memory
        self._capture: Capture | None = capture
        self._passes: OrderedDict[Bucket, int | CapturedPass] = OrderedDict()
        self._positions = memory.positions

    def forward(self, x: Tensor, sessions: Sequence[SessionRows], wanted: Sequence[int], adapter: str = "") -> Tensor:
        """Hidden states of the rows ``x`` (T,) or (T, width), session by session; on the last stage the logits of the
        rows with the indices ``wanted``."""
        counts = [rows.stop - rows.start for rows in sessions]
        bucket = *self._sizes(counts, sessions), adapter
        inputs, real = self._inputs(x, sessions, counts, bucket)
        index = real[torch.tensor(wanted, device=real.device)] if self._model.part.last else real
        known = self._known(bucket)
        if known is None:
            return self._compute(*inputs, index)
        if not isinstance(known, CapturedPass):
            try:
                known = self._passes[bucket] = self._captured(known, inputs)
            except Exception as error:  # noqa: BLE001 - a model's code may fail in any way
                logging.getLogger(__name__).warning("decoding steps are not captured: %s", first_line(error))
                self._capture = None
                return self._compute(*inputs, index)
        return known.run(*inputs).index_select(0, index)

    def _sizes(self, counts: Sequence[int], sessions: Sequence[SessionRows]) -> tuple[int, int, int]:
        most = max(rows.extent for rows in sessions)
        if max(counts) > MOST_NEW:  # not one that repeats
            return len(sessions), max(counts), most
        return power_of_two(len(sessions)), power_of_two(max(counts)), max(SMALLEST_BUCKET, power_of_two(most))

    def _inputs(
        self, x: Tensor, sessions: Sequence[SessionRows], counts: Sequence[int], bucket: Bucket
    ) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """Inputs of ``CapturedPass``, and the index of each row of ``x`` among its rows."""
        sessions_count, rows_count, extent, _ = bucket
        owners = [*zip(sessions, counts, accumulate(counts, initial=0), strict=False)]  # with each one's first row
        source: list[int] = []
        positions: list[list[int]] = []
        slots: list[Tensor] = []
        reads: list[Tensor] = []
        for rows, count, first in owners + owners[:1] * (sessions_count - len(owners)):
            fill, own = rows_count - count, rows.slots(rows.start, rows.stop)
            source += [*range(first, first + count), *[first] * fill]
            positions.append([*range(rows.start, rows.stop), *[rows.start] * fill])
            slots.append(torch.cat([own, own[:1].expand(fill)]))
            reads.append(F.pad(rows.slots(0, rows.extent), (0, extent - rows.extent)))
        real = [number * rows_count + row for number, count in enumerate(counts) for row in range(count)]
        device = x.device
        at, where = torch.tensor(positions).to(device), torch.cat(slots).to(device)
        inputs = x[torch.tensor(source).to(device)], at, where, torch.stack(reads).to(device)
        return inputs, torch.tensor(real).to(device)

    def _known(self, bucket: Bucket) -> CapturedPass | Capture | None:
        """A capture of the bucket, or the way to make it now; None: it runs as usual."""
        if self._positions != self._memory.positions:  # the captures' memory is no longer the part's
            self._passes.clear()
            self._positions = self._memory.positions
        known = self._passes.get(bucket, 0)
        if isinstance(known, CapturedPass):
            self._passes.move_to_end(bucket)
            return known
        if self._capture is None or bucket[1] > MOST_NEW or bucket[2] > LARGEST_BUCKET:
            return None
        if known < PASSES_BEFORE_CAPTURE:
            self._passes[bucket] = known + 1
            return None
        captures = [key for key, made in self._passes.items() if isinstance(made, CapturedPass)]
        for oldest in captures[: len(captures) - MOST_CAPTURES + 1]:
            del self._passes[oldest]
        return self._capture

    def _captured(self, capture: Capture, inputs: tuple[Tensor, Tensor, Tensor, Tensor]) -> CapturedPass:
        own = tuple(tensor.clone() for tensor in inputs)
        x, positions, slots, read = own
        every = torch.arange(len(x), device=x.device)
        return CapturedPass(x, positions, slots, read, capture(lambda: self._compute(x, positions, slots, read, every)))

    def _compute(self, x: Tensor, positions: Tensor, slots: Tensor, read: Tensor, index: Tensor) -> Tensor:
        cache = PaddedCache(self._memory, positions, slots, read)
        out = self._model.forward(x[None], positions.flatten(), cache, logits=index, rows=cache)[0]
        return out if self._model.part.last else out.index_select(0, index)


def power_of_two(number: int) -> int:
    """The least power of two that is no smaller."""
    return 1 << (number - 1).bit_length()


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
