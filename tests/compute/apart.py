"""A device that says that its memory is not the host's."""

from __future__ import annotations

import torch

from p2ptrain.compute.device import ComputeDevice


class Apart(ComputeDevice):
    """A device with memory of its own, as far as the trainer can tell: its tensors are on the CPU all the same."""

    @property
    def kind(self) -> str:
        return "mps"


APART = Apart(torch.device("cpu"), "a device apart")
