"""The times of a view and of a vote over an emulated link, by number of members: ``python -m tests.sim.votes 16 64``.

Real ring sessions on virtual time, without a seed and without torch: each member forms the ring of one view, then
gathers a token from every member, as a step's vote does.
"""

from __future__ import annotations

import asyncio
import sys
import time

from p2ptrain.lab.memory import MemoryNetwork, run_virtual
from p2ptrain.lab.ring_member import LocalMember, local_view
from ring.token import TOKEN_BYTES
from tests.ring.local import on_hosts
from wire.emulate import EmulatedNetwork, LinkPreset, preset_named

FORM_S = 600.0


async def view_and_vote_s(count: int, preset: LinkPreset, *, votes: int = 1) -> tuple[float, float]:
    """Seconds from the announcement of a view until its last member has formed the ring, and of one vote."""
    inner = MemoryNetwork()
    names = [f"peer{rank}" for rank in range(count)]
    networks = [EmulatedNetwork(inner.at(name), preset, rank) for rank, name in enumerate(names)]
    members = [LocalMember(name, networks[rank], seed=rank) for rank, name in enumerate(names)]
    ports = {member.peer_id: await member.listen(member.peer_id) for member in members}
    view, now = on_hosts(local_view(ports)), asyncio.get_running_loop().time
    began = now()
    sessions = await asyncio.gather(*(member.form(view, timeout_s=FORM_S, sub_chunk_bytes=0) for member in members))
    formed = now()
    for _ in range(votes):
        tokens = [rank.to_bytes(2) * (TOKEN_BYTES // 2) for rank in range(count)]
        found = await asyncio.gather(*(session.all_gather(tokens[session.rank]) for session in sessions))
        assert all(every == tokens for every in found)
    voted = now()
    for session in sessions:
        session.close()
    return formed - began, (voted - formed) / votes


if __name__ == "__main__":
    link, *sizes = sys.argv[1:]
    for size in map(int, sizes):
        real = time.process_time()
        view_s, vote_s = run_virtual(view_and_vote_s(size, preset_named(link)))
        cpu_s = time.process_time() - real
        print(f"{size} members over {link}: view {view_s:.2f} s, vote {vote_s:.2f} s (CPU {cpu_s:.1f} s)", flush=True)
