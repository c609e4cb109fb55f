"""Shards of one model in threads of this process, over a group that exchanges arrays through memory."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar, cast

import numpy as np
from torch.distributed.device_mesh import DeviceMesh

from p2ptrain.compute.fsdp import mesh_of
from p2ptrain.compute.process_group import Array, Done, RingProcessGroup
from p2ptrain.core.errors import ConnectionLost

T = TypeVar("T")
_NUMBERS = itertools.count()


class Exchange:
    """What the members of a group put in, by rank. ``lose`` fails the exchange of all, until ``renew``."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.renew()

    def renew(self) -> None:
        self._slots: list[Array] = [np.empty(0)] * self.size
        self._barrier = threading.Barrier(self.size)

    def lose(self) -> None:
        self._barrier.abort()

    def all_of(self, rank: int, mine: Array) -> list[Array]:
        try:
            self._slots[rank] = mine.copy()
            self._barrier.wait(60)
            found = list(self._slots)
            self._barrier.wait(60)
        except threading.BrokenBarrierError:
            raise ConnectionLost("a member of the test is lost") from None
        return found


class MemoryOperations:
    """Those of ``Operations`` that FSDP2 needs. They block."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self._exchange, self._rank = exchange, rank

    def all_gather(self, array: Array, timeout_s: float, done: Done) -> Future[int]:
        def run() -> None:
            mine = np.split(array, self._exchange.size)[self._rank]
            array[:] = np.concatenate(self._exchange.all_of(self._rank, mine))

        return _ended(run, done)

    def reduce_scatter(
        self, source: Array, into: Array, dtype: str, reduction: str, timeout_s: float, done: Done
    ) -> Future[int]:
        assert (dtype, reduction) == ("float32", "sum")

        def run() -> None:
            total = np.sum([each.view(np.float32) for each in self._exchange.all_of(self._rank, source)], axis=0)
            into.view(np.float32)[:] = np.split(total, self._exchange.size)[self._rank]

        return _ended(run, done)


def _ended(run: Callable[[], None], done: Done) -> Future[int]:
    future: Future[int] = Future()
    try:
        run()
        done()
    except ConnectionLost as error:
        future.set_exception(error)
    else:
        future.set_result(-1)
    return future


def meshes(exchange: Exchange) -> list[DeviceMesh]:
    number = next(_NUMBERS)

    def group(rank: int) -> RingProcessGroup:
        operations = cast(Any, MemoryOperations(exchange, rank))
        return RingProcessGroup(rank, exchange.size, operations, group_name=f"memory-{number}-{rank}")

    return [mesh_of(group(rank), "cpu") for rank in range(exchange.size)]


def in_lockstep(size: int, work: Callable[[int], T]) -> list[T]:
    """Call ``work`` with each rank, all at the same time."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))
