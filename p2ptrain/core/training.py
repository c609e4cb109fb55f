"""What passes between whatever computes and whatever moves bytes. Neither side imports the other; both import this."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Blob:
    """A named, writable, C-contiguous run of bytes of the live training state. Healing reads and writes it in place."""

    name: str
    view: memoryview


@dataclass(frozen=True, slots=True)
class BlobRange:
    """Bytes [start, stop) of the blob of that name."""

    blob: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One file of a checkpoint: its parts, one after the other, are what it is to hold.

    Bytes stand for themselves; ranges are of a state's blobs. So whoever writes it needs to know nothing of tensors.
    """

    name: str
    parts: tuple[bytes | BlobRange, ...]

    @property
    def size_bytes(self) -> int:
        return sum(len(part) if isinstance(part, bytes) else part.stop - part.start for part in self.parts)


@dataclass(frozen=True, slots=True)
class Applied:
    """What one optimizer step did.

    Attributes:
        step: steps applied now, this one included.
        loss: the global batch's mean in nats per token, before the step.
        lr: learning rate of the step.
        grad_norm: global L2 norm of the gradient, before clipping.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
