"""Workers that come later, come back, or have room later: a chain that lost a stage goes on without a restart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.core.errors import ConnectionLost, NetworkError, P2PTrainError
from p2ptrain.core.serving import Sampling
from roles.serving.chain import PoolUpdater, StageChain
from tests.roles.stage_doubles import PORT, Stage
from tests.roles.stage_stand_in import StandIns, tokens_of
from wire.records import PeerInfo

from .decoding import decode
from .scene import CONFIG, Scene, scene_of

pytestmark = pytest.mark.virtual_time

SAMPLED = Sampling(temperature=1.5, top_k=40, top_p=0.95, seed=4)
PROMPT = [5, 80, 11, 11, 3]
THREE = ("w0", "w1", "w2")
ONE_PART_BYTES = 58_000
"""For one part and its sessions, not for two."""


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    async with scene_of(tmp_path, names=THREE, limit_bytes=ONE_PART_BYTES) as made:
        yield made


@dataclass
class Seed:
    """What a seed answers of who is there. ``away``: it does not."""

    here: dict[str, int] = field(default_factory=lambda: dict.fromkeys(THREE, PORT))
    away: bool = False
    asked: int = 0
    holders: list[str] = field(default_factory=list)

    async def ask(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        assert method == "workers.list"
        self.holders = params["holders"]
        self.asked += 1
        if self.away:
            raise ConnectionLost("the seed is away")
        return {"peers": [_record(name, port).to_map() for name, port in self.here.items()]}


def _record(name: str, port: int) -> PeerInfo:
    return PeerInfo(name, name, ["worker"], "test", "idle", f"{name}:{port}", joined_at=0.0)


@asynccontextmanager
async def recruited(scene: Scene, seed: Seed) -> AsyncIterator[StageChain]:
    async with scene.chain() as chain:
        task = asyncio.create_task(PoolUpdater(chain, seed.ask, {"model": "test", "weights_bytes": 1}).run())
        try:
            yield chain
        finally:
            assert not task.done()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def start(scene: Scene, name: str, **holding: Any) -> Stage:
    """A worker that was not there, or not any more."""
    limits = {"limit_bytes": ONE_PART_BYTES} | holding
    made = Stage(name, scene.network.at(name), scene.directory / f"{name}-again", StandIns(**limits))
    scene.workers[name] = made
    await made.start()
    return made


async def write(chain: StageChain, tokens: int = 12, before: Callable[[int], Awaitable[None]] | None = None) -> None:
    session = await chain.open(positions=len(PROMPT) + tokens, sampling=SAMPLED, sample_from=len(PROMPT))
    try:
        await decode(session, PROMPT, tokens_of(CONFIG, PROMPT, tokens, SAMPLED), before=before)
    finally:
        await session.close()


async def goes_on(chain: StageChain, within_s: float) -> None:
    """A text is written, after so many virtual seconds at the latest."""
    async with asyncio.timeout(within_s):
        while True:
            try:
                await write(chain)
            except P2PTrainError:
                await asyncio.sleep(0.25)  # virtual
            else:
                return


def told(scene: Scene, kind: str) -> list[str]:
    return [text for _, each, text in scene.told if each == kind]


async def test_a_chain_that_lacks_a_stage_refuses_sessions_until_a_worker_joins(scene: Scene) -> None:
    seed = Seed()
    async with recruited(scene, seed) as chain:
        idle = await chain.open(positions=60, sampling=SAMPLED, sample_from=1)

        async def lose(tokens: int) -> None:
            if tokens == 1:
                scene.kill("w1")
                del seed.here["w1"]

        with pytest.raises(NetworkError, match="cannot be repaired"):
            await write(chain, 300, lose)
        with pytest.raises(NetworkError, match="cannot be repaired"):
            await decode(idle, PROMPT, tokens_of(CONFIG, PROMPT, 3, SAMPLED))
        assert chain.lacking == {1}
        for _ in range(2):
            with pytest.raises(NetworkError, match=r"no worker can hold stage 1 ") as caught:
                await chain.open(positions=60, sampling=SAMPLED, sample_from=1)
            assert "p2ptrain join" in caught.value.remedy
        await asyncio.sleep(60)  # virtual: a long time without any use
        assert len(told(scene, "stage-lacking")) == 1

        await start(scene, "w9")
        seed.here["w9"] = PORT
        await goes_on(chain, 5)
        assert not chain.lacking
        assert [stage.peer.name for stage in chain.plan.stages] == ["w0", "w9", "w2"]
        session = await chain.open(positions=60, sampling=SAMPLED, sample_from=1)
        await session.close()


@pytest.mark.parametrize("port", [PORT, PORT + 1], ids=["where it was", "elsewhere"])
@pytest.mark.parametrize("victims", [("w0",), ("w2",), ("w0", "w1", "w2")], ids=lambda names: "+".join(names))
async def test_lost_workers_are_used_again_when_they_return(
    scene: Scene, victims: tuple[str, ...], port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = Seed()
    async with recruited(scene, seed) as chain:
        await write(chain)
        for name in victims:
            scene.kill(name)
        await asyncio.sleep(20)  # virtual: the seed tells of them all the while, and nobody is there
        monkeypatch.setattr("tests.roles.stage_doubles.PORT", port)
        for name in victims:
            await start(scene, name)
            seed.here[name] = port
        await goes_on(chain, 70)
        assert {stage.peer.name for stage in chain.plan.stages} == set(THREE)
        assert {chain.pool.peers[stage.peer.id].worker.port for stage in chain.plan.stages} <= {PORT, port}


async def test_a_recruit_takes_a_stage_that_is_lost_at_the_same_moment(scene: Scene) -> None:
    """Another worker that is dialled and does not answer delays nothing."""

    seed = Seed()
    async with recruited(scene, seed) as chain:
        scene.network.silence("client", "far")
        seed.here["far"] = PORT

        async def replace(tokens: int) -> None:
            if tokens == 4:
                await start(scene, "w9")
                seed.here["w9"] = PORT
                while not told(scene, "spare"):  # noqa: ASYNC110 - on virtual time
                    await asyncio.sleep(0.01)
                scene.kill("w1")

        await write(chain, 30, replace)
        assert not told(scene, "stage-lacking")


async def test_stage_moves_to_a_worker_that_has_no_other_task(scene: Scene) -> None:
    seed = Seed()
    async with recruited(scene, seed) as chain:
        del seed.here["w1"]  # a job has it now, and no other worker is there: it holds its stage all the same
        await write(chain)
        await asyncio.sleep(5)  # virtual
        assert seed.holders == ["w0", "w1", "w2"]

        async def come(tokens: int) -> None:
            if tokens == 4:
                await start(scene, "w9")
                seed.here["w9"] = PORT
                await asyncio.sleep(5)  # virtual

        await write(chain, 30, come)
        await asyncio.sleep(5)  # virtual
        assert seed.holders == ["w0", "w2", "w9"]
        assert not told(scene, "stage-lacking")
