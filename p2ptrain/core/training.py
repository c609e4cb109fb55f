"""What passes between whatever computes and whatever moves bytes. Neither side imports the other; both import this."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Blob:
    """A named, writable, C-contiguous run of bytes of the live training state. Healing reads and writes it in place."""

    name: str
    view: memoryview


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
