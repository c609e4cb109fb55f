"""Several streams where the network gives each flow its share, on a virtual clock: the times are exact."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from p2ptrain.lab.memory import MemoryNetwork, run_virtual
from ring.session import RingSession
from tests.ring.local import local_ring
from wire.emulate import EmulatedNetwork, LinkPreset

CAPPED = LinkPreset("capped", delay_ms=20.0, rate_bps=50e6, burst_bytes=64 << 10)
"""Far, and each flow is held to 50 Mbit/s."""
NUMEL = 4 << 20  # 16 MiB


def seconds(streams: int, count: int, sub_chunk_bytes: int) -> float:
    """Virtual time of an all-reduce of ``NUMEL`` float32."""

    async def main() -> float:
        network = EmulatedNetwork(MemoryNetwork(), CAPPED, 1)
        async with local_ring(count, network, sub_chunk_bytes=sub_chunk_bytes, streams=streams) as members:

            async def act(session: RingSession) -> float:
                buffer = np.ones(NUMEL, np.float32)
                await session.barrier()
                began = asyncio.get_running_loop().time()
                await session.submit(buffer)
                assert (buffer == count).all()
                return asyncio.get_running_loop().time() - began

            return max(await asyncio.gather(*(act(member.session) for member in members)))

    return run_virtual(main())


@pytest.mark.parametrize("count", [2, 3])
def test_eight_streams_are_several_times_one(count):
    sub_chunk_bytes = 256 << 10
    one, eight = seconds(1, count, sub_chunk_bytes), seconds(8, count, sub_chunk_bytes)
    ideal = 2 * (count - 1) / count * NUMEL * 4 * 8 / CAPPED.rate_bps
    print(f"{count} members: one stream {one:.2f} s (the flow's rate allows {ideal:.2f} s), eight {eight:.2f} s")
    assert one < 1.1 * ideal, "one stream does not fill its share"
    assert one / eight >= 5
