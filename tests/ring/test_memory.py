"""What a ring costs in memory while it reduces, and that ten thousand reductions leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import os
import tracemalloc
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import uvloop

from ring.codecs import codec_named
from ring.session import MOST_SUB_CHUNK_BYTES
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
WARM, ALL, PARTS = 500, 2_000, 6


def count_open() -> tuple[int, int, int]:
    """Files, tasks, and objects of the whole process, those of other tests included."""
    gc.collect()
    return len(os.listdir("/dev/fd")), len(asyncio.all_tasks()), len(gc.get_objects())


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
            counts = [count_open()]
            for _ in range(PARTS):
                await many((ALL - WARM) // PARTS)
                counts.append(count_open())
        assert all(after[:2] == before[:2] for before, after in pairwise(counts))
        # Objects of others come and go, those of a leak come each time.
        growth = min(after[2] - before[2] for before, after in pairwise(counts))
        assert growth < WARM // 10 // PARTS, "more objects are alive"

    run(reduce())
