"""Types shared by the code that trains and the code that moves bytes. Neither imports the other; both import this."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OnFinal = Callable[[int], None]
"""Called with n when elements [0, n) of the reduce buffer are final in this step and may go to the ring. n never
decreases. The call may come on any thread, about once per parameter."""


@dataclass(frozen=True, slots=True)
class Blob:
    """Named, writable, C-contiguous bytes of the live training state. Healing reads and writes them in place."""

    name: str
    view: memoryview


@dataclass(frozen=True, slots=True)
class BlobRange:
    """Bytes [start, stop) of a blob.

    Attributes:
        blob: its name; or a function that returns bytes that never change, called when they are written.
        halve: applied to every piece when it is written, of whole elements: returns half as many bytes.
    """

    blob: str | Callable[[], memoryview]
    start: int
    stop: int
    halve: Callable[[memoryview], memoryview] | None = None

    @property
    def size_bytes(self) -> int:
        return (self.stop - self.start) // (1 if self.halve is None else 2)


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One file of a checkpoint: its content is the concatenation of ``parts``, literal bytes and ranges of the state's
    blobs. So the writer needs to know nothing about tensors."""

    name: str
    parts: tuple[bytes | BlobRange, ...]

    @property
    def size_bytes(self) -> int:
        return sum(len(part) if isinstance(part, bytes) else part.size_bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class Applied:
    """Result of one optimizer step.

    Attributes:
        step: number of applied steps, including this one.
        loss: mean loss of the global batch in nats per token, before the step.
        grad_norm: global L2 norm of the gradient, before clipping.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float


@dataclass(slots=True)
class TrainingData:
    """A member's text, as others need to know it.

    Attributes:
        digest: SHA-256, hex, of what must be the same at all members: the tokenized corpus unless it is private, and
            the first weights if some of them do not train. Empty if there is nothing to compare.
        note: what was left out or cut, for the person at this worker; empty if nothing was.
        windows: training sequences.
        tokens_per_micro_batch: positions in one micro-batch; with conversations fewer of them are targets.
        validation_batches: micro-batches of a validation, the same on every member, unless the data is private.
        store: the directory of its tokens; None: they are in memory only.
    """

    digest: str
    note: str
    windows: int
    tokens_per_micro_batch: int
    validation_batches: int
    store: Path | None = None


@dataclass(frozen=True, slots=True)
class SettingsPeriod:
    """Settings that apply from one step on, until the next period.

    Attributes:
        first_step: counted from 0.
        optimizer: the ``[optimizer]`` table. steps: of the whole run.
    """

    first_step: int
    optimizer: Mapping[str, Any]
    steps: int


def period_at(periods: Sequence[SettingsPeriod], step: int) -> SettingsPeriod:
    """The period of step ``step``, counted from 0. ``periods`` are in order."""
    return next(period for period in reversed(periods) if period.first_step <= step)
