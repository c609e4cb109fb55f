"""What a ring costs in memory while it reduces, and that ten thousand reductions leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import os
import tracemalloc
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import psutil
import pytest
import uvloop

from p2ptrain.lab.ring_member import LocalMember
from ring.codecs import codec_named
from ring.session import MOST_SUB_CHUNK_BYTES, RingSession
from tests.ring.local import local_ring
from wire.transport import TcpNetwork

DEADLINE_S = 120.0  # for a machine that does much else


def run(main: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await main

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(bounded())


# ------------------------------------------------------------------------------------------------ one large reduction

LARGE_NUMEL = 8 << 20
"""32 MiB of float32."""


@pytest.mark.parametrize("codec", [None, "int8"])
def test_an_all_reduce_needs_two_sub_chunks_and_a_fiftieth_of_its_array(codec: str | None):
    """For each member, from the first operation on, so that what is kept for the next one counts, too. With a codec the
    error feedback's residual is the caller's, and the codec's scratch memory is not. Counted by tracemalloc, to which
    numpy tells its arrays: of the whole process, and members of a ring are equal.
    """
    count = 3

    async def reduce() -> None:
        async with local_ring(count, TcpNetwork(), sub_chunk_bytes=0) as members:
            arrays = [np.full(LARGE_NUMEL, member.session.rank + 1, np.float32) for member in members]
            codecs = [codec_named(codec) if codec else None for _ in members]
            residuals = [np.zeros(LARGE_NUMEL, np.float32) if codec else None for _ in members]
            gc.collect()
            with ExitStack() as counting:
                tracemalloc.start()
                counting.callback(tracemalloc.stop)
                await asyncio.gather(
                    *(
                        member.session.submit(array, codec=each, residual=residual)
                        for member, array, each, residual in zip(members, arrays, codecs, residuals, strict=True)
                    )
                )
                _, peak_bytes = tracemalloc.get_traced_memory()
        assert all(np.allclose(array, count * (count + 1) / 2, rtol=0.02) for array in arrays)
        assert peak_bytes / count <= 2 * MOST_SUB_CHUNK_BYTES + 0.02 * arrays[0].nbytes

    run(reduce())


# ------------------------------------------------------------------------------------------------ many small reductions

NUMELS = (1, 300, 7_000, 30_000, 60_000)
"""The first three are gathered whole; the others go round in sub-chunks."""
AT_A_TIME = 10
WARM, ALL = 500, 2_000


@dataclass(frozen=True)
class Held:
    """What a process and its sessions hold between two operations."""

    resident_bytes: int
    descriptors: int
    tasks: int
    objects: int
    """All that the garbage collector knows."""
    queued: tuple[int, ...]
    """Lengths of the containers of each session, its lanes and connections."""


def held(members: list[LocalMember]) -> Held:
    gc.collect()
    return Held(
        psutil.Process().memory_info().rss,
        len(os.listdir("/dev/fd")),
        len(asyncio.all_tasks()),
        len(gc.get_objects()),
        tuple(length for member in members for part in parts_of(member.session) for length in lengths_of(part)),
    )


def parts_of(session: RingSession) -> list[object]:
    connections = [connection for neighbour in session.links.neighbours for connection in neighbour.connections]
    return [
        session,
        *session._lanes,
        *connections,
        *(connection._incoming for connection in connections),
        *(connection._incoming.decoder for connection in connections),
    ]


def lengths_of(part: object) -> list[int]:
    """Of every attribute that has a length."""
    return [len(value) for value in vars(part).values() if hasattr(value, "__len__")]


@pytest.mark.parametrize("codec", [None, "int8"])
def test_thousands_of_reductions_leave_nothing_behind(codec: str | None):
    async def reduce() -> None:
        async with local_ring(2, TcpNetwork(), sub_chunk_bytes=0) as members:
            arrays = [[np.zeros(numel, np.float32) for numel in NUMELS * (AT_A_TIME // len(NUMELS))] for _ in members]
            codecs = [codec_named(codec) if codec else None for _ in members]

            async def one(submit: Callable[..., asyncio.Future[None]], index: int) -> None:
                for future in [submit(array, codec=codecs[index]) for array in arrays[index]]:
                    await future

            async def many(count: int) -> None:
                for _ in range(count // AT_A_TIME):
                    await asyncio.gather(*(one(member.session.submit, at) for at, member in enumerate(members)))

            await many(WARM)
            looks = [held(members)]
            for _ in range(2):
                await many(ALL - WARM)
                looks.append(held(members))
        before, *_, after = looks
        assert after.queued == before.queued
        assert (after.descriptors, after.tasks) == (before.descriptors, before.tasks)
        assert after.objects - before.objects < WARM // 10, "more objects are alive"
        # Three kilobytes for each reduction would be 4.5 MB each time. Late in the suite the process moves by as much,
        # but not twice.
        assert min(then.resident_bytes - now.resident_bytes for now, then in pairwise(looks)) < 4 << 20

    run(reduce())
