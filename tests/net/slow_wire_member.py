"""One of two members on a slow wire: times this ring with a codec, and Gloo, in turn. Run by ``test_slow_wire``.

    python slow_wire_member.py RANK THIS_HOST OTHER_HOST INTERFACE CODEC NUMEL ROUNDS

Prints a line of JSON: seconds of each round of ``ours`` and of ``gloo``, and the largest relative error of ours.
"""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
import uvloop

from ring.codecs import codec_named
from ring.local import LocalMember
from ring.view import View
from wire.job_messages import MemberRecord
from wire.transport import TcpNetwork

RING_PORT, STORE_PORT = 7400, 7401


async def main() -> None:
    rank, hosts, codec = int(sys.argv[1]), sys.argv[2:4], codec_named(sys.argv[5])
    numel, rounds = int(sys.argv[6]), int(sys.argv[7])
    os.environ["GLOO_SOCKET_IFNAME"] = sys.argv[4]
    by_rank = hosts if rank == 0 else hosts[::-1]
    records = (
        MemberRecord(f"peer-{r}", f"peer-{r}", host, RING_PORT, 0, 0, healthy=True) for r, host in enumerate(by_rank)
    )
    member = LocalMember(f"peer-{rank}", TcpNetwork(), seed=rank)
    await member.listen("0.0.0.0", RING_PORT)
    session = await member.form(View("job", 1, 0, "", tuple(records)), sub_chunk_bytes=256 << 10, timeout_s=60)
    store = f"tcp://{by_rank[0]}:{STORE_PORT}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    parts = [np.random.default_rng(r).standard_normal(numel).astype(np.float32) for r in range(2)]
    wanted = parts[0] + parts[1]
    times: dict[str, list[float]] = {"ours": [], "gloo": []}
    error = 0.0
    for _ in range(rounds):
        buffer = parts[rank].copy()
        await session.barrier()
        began = time.perf_counter()
        await session.all_reduce(buffer, codec=codec)
        times["ours"].append(time.perf_counter() - began)
        error = max(error, float(np.linalg.norm(buffer - wanted) / np.linalg.norm(wanted)))
        tensor = torch.from_numpy(parts[rank].copy())
        await session.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        times["gloo"].append(time.perf_counter() - began)
    await session.barrier()
    print(json.dumps({**times, "error": error}), flush=True)
    dist.destroy_process_group()
    await member.stop()


uvloop.run(main())
