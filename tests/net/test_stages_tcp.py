"""A split model over real sockets and threads: megabytes of weights, long prompts, a worker that dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from p2ptrain.core.serving import Sampling
from roles.model_directory import ModelDirectory
from tests.roles.in_process import Cluster, Peer
from tests.roles.stage_doubles import (
    Generation,
    TestClient,
    client_of,
    giving,
    ids_work,
    load_params,
    model_at,
    open_params,
)
from tests.roles.stage_stand_in import StandIns, stand_in_config, tokens_of, write_model
from wire.chain_messages import ChainBroken, Picked
from wire.transport import TcpNetwork

ROWS = 200_000  # 6.1 MiB a layer: two ranges
CONFIG = stand_in_config(layers=6, rows=ROWS)
CUTS = (0, 2, 4, 6)
PROMPT = [(7 * number) % 97 for number in range(3000)]


class Chain:
    """Three workers of a seed, and a client of each."""

    def __init__(
        self, peers: list[Peer], stand_ins: list[StandIns], clients: list[TestClient], parts: list[str]
    ) -> None:
        self.peers, self.stand_ins, self.clients, self.parts = peers, stand_ins, clients, parts

    async def open(self, session: str) -> None:
        for index in reversed(range(3)):
            params = open_params(session, self.parts[index], index, 3, positions=3100, prefill_encoding="fp32")
            if index < 2:
                host, port = self.peers[index + 1].address
                params["next"] = {"peer": self.peers[index + 1].identity.peer_id, "host": host, "port": port}
            await self.clients[index].ask("session.open", params)


@asynccontextmanager
async def chain_over(network: TcpNetwork, root: Path, model: ModelDirectory) -> AsyncIterator[Chain]:
    cluster = Cluster(root / "cluster", network)
    await cluster.start_seed()
    stand_ins = [StandIns() for _ in range(3)]
    peers = [cluster.join(holding=each.holding) for each in stand_ins]
    async with asyncio.timeout(60), AsyncExitStack() as stack:
        stack.push_async_callback(cluster.close)
        clients, parts = list[TestClient](), list[str]()
        for index, peer in enumerate(peers):
            await peer.joined.wait()
            host, port = peer.address
            clients.append(await stack.enter_async_context(client_of(network, host, port)))
            async with giving(network, host, model, port):
                loaded = await clients[-1].ask("part.load", load_params(model, CUTS[index], CUTS[index + 1], 6))
            assert loaded["received_bytes"] >= 2 * 4 * 8 * ROWS
            parts.append(loaded["part"])
        yield Chain(peers, stand_ins, clients, parts)


@pytest.fixture
def model(tmp_path: Path) -> ModelDirectory:
    return model_at(write_model(tmp_path / "model", CONFIG), tmp_path)


async def test_a_long_prompt_flows_through_three_processes_worth_of_sockets(
    tmp_path: Path, model: ModelDirectory
) -> None:
    async with chain_over(TcpNetwork(), tmp_path, model) as chain:
        await chain.open("s1")
        cuts = (0, 2048, 2999)
        for number, (start, stop) in enumerate(pairwise(cuts)):
            work = ids_work("s1", PROMPT[start:stop], keep=start, last=2, number=number, picks=0)
            chain.clients[0].give(*work)
        for number in range(2):
            took = await chain.clients[2].next()
            assert isinstance(took, Picked)
            assert took.number == number
        generation = Generation("s1", PROMPT[2999:], 2, keep=2999)
        while len(generation.made) < 5:
            chain.clients[0].give(*generation.work())
            generation.take(await chain.clients[2].next())
    assert generation.made == tokens_of(CONFIG, PROMPT, 5, Sampling(temperature=0))


async def test_a_worker_that_dies_is_told_of_at_once(tmp_path: Path, model: ModelDirectory) -> None:
    async with chain_over(TcpNetwork(), tmp_path, model) as chain:
        await chain.open("s1")
        generation = Generation("s1", [1, 2, 3], 2)
        chain.clients[0].give(*generation.work())
        generation.take(await chain.clients[2].next())
        await chain.peers[1].die()
        broken = await chain.clients[0].next(timeout_s=1.0)
        assert isinstance(broken, ChainBroken)
        assert (broken.lost, broken.code) == (1, "next-stage")
        resume = {"session": "s1", "attempt": 1, "keep": 0, "next": None}
        assert await chain.clients[2].ask("session.resume", resume) == {"position": 0}
