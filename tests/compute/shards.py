"""Shards of one model in threads of this process, over a group that exchanges tensors through memory."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from p2ptrain.compute.fsdp import mesh_of

T = TypeVar("T")
_NUMBERS = itertools.count()


class _Done(dist._Work):
    def wait(self, timeout: Any = None) -> bool:
        return True


class Exchange:
    """What the members of a group put in, by rank. ``lose`` fails the exchange of all, from now on."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.number = next(_NUMBERS)
        self.renew()

    def renew(self) -> None:
        self._slots: list[Tensor] = [torch.empty(0)] * self.size
        self._barrier = threading.Barrier(self.size)

    def lose(self) -> None:
        self._barrier.abort()

    def all_of(self, rank: int, mine: Tensor) -> list[Tensor]:
        self._slots[rank] = mine.clone()
        self._barrier.wait(60)
        found = list(self._slots)
        self._barrier.wait(60)
        return found


class MemoryGroup(dist.ProcessGroup):
    def __init__(self, exchange: Exchange, rank: int) -> None:
        super().__init__(rank, exchange.size)
        self._exchange, self._place = exchange, rank

    @property
    def group_name(self) -> str:
        return f"memory-{self._exchange.number}-{self._place}"

    def all_gather_single(self, output: Tensor, mine: Tensor, options: Any = None) -> _Done:
        torch.cat([each.view(-1) for each in self._exchange.all_of(self._place, mine)], out=output.view(-1))
        return _Done()

    def reduce_scatter_single(self, output: Tensor, mine: Tensor, options: Any = None) -> _Done:
        parts = [
            each.view(-1).chunk(self._exchange.size)[self._place] for each in self._exchange.all_of(self._place, mine)
        ]
        output.view(-1).copy_(torch.stack(parts).sum(0))
        return _Done()

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single


def meshes(exchange: Exchange) -> list[dist.DeviceMesh]:
    return [mesh_of(MemoryGroup(exchange, rank), "cpu") for rank in range(exchange.size)]


def in_lockstep(size: int, work: Callable[[int], T]) -> list[T]:
    """Call ``work`` with each rank, all at the same time."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))
