"""Process groups of several members in one process, over real sockets, without ``init_process_group``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist

from p2ptrain.compute.process_group import RingProcessGroup, RingWork
from roles.process_group import GroupHost, GroupNetwork, start_host
from wire.transport import TcpNetwork

TIMEOUT = timedelta(seconds=30)
_numbers = itertools.count()


@cache
def host(member: int) -> GroupHost:
    """The host of one member; its thread ends with the tests."""

    async def open_network(peer_id: str) -> GroupNetwork:
        return GroupNetwork(TcpNetwork())

    return start_host(None, open_network)


@cache
def group(size: int) -> list[RingProcessGroup]:
    """The members of a group that all tests share."""
    return new_group(size)


def new_group(
    size: int, *, timeout: timedelta = TIMEOUT, hosts: Callable[[int], GroupHost] = host
) -> list[RingProcessGroup]:
    store, name = dist.HashStore(), f"group {next(_numbers)}"
    names = [f"rank {rank}" for rank in range(size)]

    def member(rank: int) -> RingProcessGroup:
        operations = hosts(rank).join(store, name, rank, size, names, TIMEOUT.total_seconds())
        return RingProcessGroup(rank, size, operations, timeout=timeout, group_name=name)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(member, range(size)))


def everyone(members: Sequence[RingProcessGroup], act: Callable[[RingProcessGroup], Any]) -> list[RingWork]:
    """Begin ``act`` at every member, then wait for all."""
    works = [act(member) for member in members]
    for work in works:
        work.wait(TIMEOUT)
    return works
