"""What a stage of a chain needs of whatever computes its part of the model: the seam between payloads and tensors.

All methods block and are called on one dedicated compute thread (``roles.compute_thread``), never on the event loop.
``roles.part_stand_in`` has stand-ins without torch.
"""

from __future__ import annotations

from typing import Protocol

from ring.chain import Payload

__all__ = ["PartEngine", "Payload"]


class PartEngine(Protocol):
    """A run of layers of a model, ready to train. The first stage brings the data, the last one keeps the loss.

    Attributes:
        activation_bytes: of what ``forward`` makes for the next stage, the same on all stages.
        gradient_bytes: of what ``backward`` makes for the stage before, the same on all stages.
    """

    activation_bytes: int
    gradient_bytes: int

    def forward(self, step: int, index: int, inputs: Payload | None) -> Payload | None:
        """Run micro-batch ``index`` of step ``step`` through the part, and keep what its backward needs.

        Args:
            inputs: activations of the stage before, shape (activation_bytes,); None on the first stage. They are the
                caller's, who changes them when this has returned: what is needed later is copied.

        Returns:
            activations for the next stage, shape (activation_bytes,), uint8, contiguous, on the host; None on the last
            stage. They are the caller's until the step is over: nobody changes them before.

        Raises:
            ProtocolError: ``inputs`` are no activations. The stage before counts as lost.
        """
        ...

    def backward(self, index: int, gradient: Payload | None) -> Payload | None:
        """Add the micro-batch's gradients to those of the step, and let go of what was kept for it.

        Args:
            gradient: of the loss by what ``forward`` made, shape (gradient_bytes,); None on the last stage. The
                caller's, as ``inputs``.

        Returns:
            the gradient by the inputs, as ``forward`` returns activations; None on the first stage.

        Raises:
            ProtocolError: ``gradient`` is none. The next stage counts as lost.
        """
        ...
