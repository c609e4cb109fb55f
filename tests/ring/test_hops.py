"""Hops whose bytes are hashed at both ends."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from p2ptrain.lab.memory import MemoryNetwork
from ring.codecs import codec_named
from tests.ring.local import local_ring


@pytest.mark.parametrize("codec", ["fp32", "int8"])
async def test_both_ends_of_an_audited_hop_come_to_the_same_sum(codec: str) -> None:
    async with local_ring(3, MemoryNetwork(), streams=2, sub_chunk_bytes=1024) as ring:
        sessions = [member.session for member in ring]
        assert [session.take_hop_sums() for session in sessions] == [(0, 0)] * 3
        for session in sessions:
            session.audit()
        seen = []
        for _ in range(2):
            arrays = [np.arange(4000, dtype=np.float32) + session.rank for session in sessions]
            chosen = codec_named(codec) if codec != "fp32" else None
            await asyncio.gather(
                *(session.submit(array, codec=chosen) for session, array in zip(sessions, arrays, strict=True)),
                *(session.all_gather(bytes([session.rank])) for session in sessions),
            )
            sums = [session.take_hop_sums() for session in sessions]
            assert all(sums[rank][0] == sums[(rank + 1) % 3][1] for rank in range(3))
            seen += [sent for sent, _ in sums]
        assert len(set(seen)) == 3, "the same bytes, the same sum; each hop has its own"


async def test_a_hop_that_spoils_what_it_carries_is_found() -> None:
    async with local_ring(3, MemoryNetwork()) as ring:
        sessions = [member.session for member in ring]
        for session in sessions:
            session.audit()
        lane = sessions[2]._lanes[0]
        arrived, spoiled = lane._arrived, []

        def spoiling() -> None:
            _, receive, scratch = lane._posted[0]
            if receive.reduce and not spoiled:
                scratch[0] ^= 1
                spoiled.append(scratch)
            arrived()

        lane._arrived = spoiling  # type: ignore[method-assign]
        arrays = [np.ones(40_000, np.float32) for _ in ring]
        await asyncio.gather(*(session.submit(array) for session, array in zip(sessions, arrays, strict=True)))
        assert arrays[0].tobytes() == arrays[1].tobytes() == arrays[2].tobytes(), "all hold the same wrong sum"
        sums = [session.take_hop_sums() for session in sessions]
        assert [sums[rank][0] == sums[(rank + 1) % 3][1] for rank in range(3)] == [True, False, True]
