"""torch's own collectives, the baseline of ``p2ptrain bench allreduce``. Without transformers, which takes seconds."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from p2ptrain.core.errors import ConfigError, ConnectionLost

HOST = "127.0.0.1"
TORCH_VERSION = torch.__version__


def why_no_gloo() -> str:
    """Why this torch has no Gloo; empty if it has."""
    if not dist.is_available():
        return "this torch was built without torch.distributed"
    return "" if dist.is_gloo_available() else "this torch was built without Gloo"


class GlooGroup:
    """This process's membership in groups of these backends on the loopback. A process can have only one.

    Args:
        store_port: port of rank 0's rendezvous store.
        timeout_s: deadline of every operation, including the rendezvous.

    Raises:
        ConnectionLost: the other members did not come.
        ConfigError: this torch lacks a backend.
    """

    def __init__(self, rank: int, size: int, store_port: int, backends: Sequence[str], *, timeout_s: float) -> None:
        if not set(backends) <= set(dist.Backend.backend_list):
            raise ConfigError(
                "this torch does not know the backend p2p",
                remedy=f"install p2ptrain for {sys.executable}; `import torch` then finds the backend",
            )
        place, timeout = f"tcp://{HOST}:{store_port}", timedelta(seconds=timeout_s)
        self.size = size
        try:
            dist.init_process_group("gloo", init_method=place, rank=rank, world_size=size, timeout=timeout)
            self.groups: dict[str, Any] = {name: dist.new_group(backend=name, timeout=timeout) for name in backends}
        except RuntimeError as error:
            raise ConnectionLost(f"Gloo could not connect the workers: {line_of(error)}") from error

    def all_reduce(self, buffer: npt.NDArray[np.generic], backend: str) -> None:
        """Sum over all members, in place. Raises ``ConnectionLost``."""
        try:
            dist.all_reduce(torch.from_numpy(buffer), group=self.groups[backend])
        except RuntimeError as error:
            raise ConnectionLost(f"the all-reduce of {backend} failed: {line_of(error)}") from error


def line_of(error: BaseException) -> str:
    """The first sentence of an error, without the place in torch's source."""
    text = re.sub(r"^\[[^\]]*\] ", "", " ".join(str(error).split()))
    return (text.partition(". ")[0] or type(error).__name__)[:200]
