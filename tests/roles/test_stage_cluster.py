"""Parts in a whole cluster: workers of a real seed, over memory, TLS and all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from p2ptrain.core.serving import Sampling
from p2ptrain.lab.memory import MemoryNetwork
from tests.roles.in_process import Cluster, Peer
from tests.roles.stage_doubles import TestChain, client_of, giving, load_params, model_at, open_params
from tests.roles.stage_stand_in import StandIns, stand_in_config, tokens_of, write_model

CONFIG = stand_in_config(layers=6)


@pytest.fixture(params=[False, True], ids=["plain", "encrypted"])
async def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Cluster]:
    made = Cluster(tmp_path / "cluster", MemoryNetwork(), encrypted=request.param)
    await made.start_seed()
    yield made
    await made.close()


async def joined(cluster: Cluster, count: int, **holding: object) -> list[Peer]:
    peers = [cluster.join(holding=StandIns(**holding).holding) for _ in range(count)]  # type: ignore[arg-type]
    async with asyncio.timeout(30):
        for peer in peers:
            await peer.joined.wait()
    return peers


async def test_three_workers_give_what_one_gives(cluster: Cluster, tmp_path: Path) -> None:
    model = model_at(write_model(tmp_path / "model", CONFIG), tmp_path)
    peers = await joined(cluster, 3)
    network, peer_id = cluster.network, "client"
    if cluster.encrypted:
        member = await cluster.member(cluster.ticket("operator"))
        network, peer_id = member.network, member.peer_id  # type: ignore[assignment]
    cuts = (0, 2, 4, 6)
    async with AsyncExitStack() as stack:
        chain = TestChain([], [], [], model)
        for index, peer in enumerate(peers):
            host, port = peer.address
            client = await stack.enter_async_context(client_of(network, host, port, peer_id=peer_id))
            async with giving(network, host, model, port, peer_id=peer_id):
                loaded = await client.ask("part.load", load_params(model, cuts[index], cuts[index + 1], 6))
            chain.clients.append(client)
            chain.parts.append(loaded["part"])
        for index in reversed(range(3)):
            params = open_params("s1", chain.parts[index], index, 3)
            if index < 2:
                following = peers[index + 1]
                params["next"] = {
                    "peer": following.identity.peer_id,
                    "host": following.address[0],
                    "port": following.address[1],
                }
            await chain.clients[index].ask("session.open", params)
        chain.stages = peers  # type: ignore[assignment]
        assert await chain.generate("s1", [1, 2, 3], 8) == tokens_of(CONFIG, [1, 2, 3], 8, Sampling(temperature=0))
