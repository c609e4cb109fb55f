"""A client in a whole cluster, plain and encrypted: the seed tells of workers, and certificates say who may what."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from p2ptrain.core.errors import NetworkError, Refused
from p2ptrain.core.serving import Sampling
from p2ptrain.lab.memory import MemoryNetwork
from roles.serving.chain import StageChain
from roles.serving.worker_peer import ClientContext
from roles.serving.worker_pool import WorkerPool, model_of_directory, workers_of
from tests.roles.in_process import Cluster, Peer
from tests.roles.stage_stand_in import WIDTH, StandIns, sizes_of, tokens_of, write_model
from wire.handshake import dial, local_hello

from .decoding import decode
from .scene import CONFIG

SEEDED = Sampling(temperature=1.5, top_k=40, top_p=0.95, seed=4)
PROMPT = [5, 80, 11, 11, 3]


@asynccontextmanager
async def cluster_at(tmp_path: Path, *, encrypted: bool) -> AsyncIterator[Cluster]:
    made = Cluster(tmp_path / "cluster", MemoryNetwork(), encrypted=encrypted)
    await made.start_seed()
    try:
        yield made
    finally:
        await made.close()


async def joined(cluster: Cluster, count: int) -> list[Peer]:
    peers = [cluster.join(holding=StandIns().holding) for _ in range(count)]
    async with asyncio.timeout(30):
        for peer in peers:
            await peer.joined.wait()
    return peers


async def context(cluster: Cluster, role: str = "operator") -> ClientContext:
    if not cluster.encrypted:
        return ClientContext(cluster.world(), "client", "client", cluster.address[0])
    member = await cluster.member(cluster.ticket(role))
    return ClientContext(cluster.world(member.network), member.peer_id, "client", cluster.address[0])


@asynccontextmanager
async def loaded(cluster: Cluster, tmp_path: Path) -> AsyncIterator[StageChain]:
    me = await context(cluster)
    async with cluster.operator() as seed:
        workers = await workers_of(seed.request)
    replica = await WorkerPool.connect(me, workers)
    model = await model_of_directory(me, write_model(tmp_path / "model", CONFIG))
    plan = await replica.plan(
        model, sizes_of(CONFIG), positions=200, activation_bytes=4 * WIDTH, dtype="fp32", stages=3
    )
    chain = await StageChain.load(replica, model, plan)
    yield chain
    await chain.close()
    await replica.close()


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
async def test_tokens_come_though_a_worker_is_killed(tmp_path: Path, encrypted: bool) -> None:
    async with cluster_at(tmp_path, encrypted=encrypted) as cluster:
        peers = await joined(cluster, 4)
        async with loaded(cluster, tmp_path) as chain:
            victim = next(peer for peer in peers if peer.identity.name == chain.plan.stages[1].peer.name)

            async def kill(tokens: int) -> None:
                if tokens == 6:
                    await victim.die()

            session = await chain.open(positions=60, sampling=SEEDED, sample_from=1)
            async with asyncio.timeout(30), cluster.operator() as seed:
                await seed.request("subscribe")
                states: dict[str, str] = {}
                async for update in seed.updates():
                    if update.topic == "peers":
                        states |= {item["name"]: item["state"] for item in update.items}
                    if {name for name in states if states[name] == "serving"} == {
                        stage.peer.name for stage in chain.plan.stages
                    }:
                        break
                await decode(session, PROMPT, tokens_of(CONFIG, PROMPT, 20, SEEDED), before=kill)
            await session.close()
            assert len(chain.times.mendings) == 1


async def test_only_operators_use_chains(tmp_path: Path) -> None:
    async with cluster_at(tmp_path, encrypted=True) as cluster:
        (peer,) = await joined(cluster, 1)
        worker = await cluster.member(cluster.ticket("worker"))
        operator = await cluster.member(cluster.ticket("operator"))
        for member, roles, purpose in (
            (worker, ["worker"], "chain"),
            (worker, ["worker"], "give"),
            (operator, [], "stage"),
        ):
            hello = local_hello(peer_id=member.peer_id, name="x", roles=roles, purpose=purpose, job="ab")
            with pytest.raises(Refused) as caught:
                await dial(member.network, *peer.address, hello, timeout_s=5)
            assert caught.value.code == "not-permitted"
        async with cluster.operator() as seed:
            workers = await workers_of(seed.request)
        as_worker = await context(cluster, "worker")
        with pytest.raises(NetworkError, match="certificate"):
            await WorkerPool.connect(as_worker, workers)
