"""A split model as a target: the tokens of plain decoding, whatever drafts are tried and whichever stage dies."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from p2ptrain.core.errors import P2PTrainError, Refused, UserError
from p2ptrain.core.serving import Sampling
from roles.serving.chain import MOST_SESSIONS
from roles.serving.model import ModelSession, PassRequest, PassResult, ServedModel
from tests.roles.serving.scene import CONFIG, Scene, play
from tests.roles.stage_stand_in import tokens_of

from .decoding import decoded

GREEDY, SAMPLED = Sampling(temperature=0), Sampling(temperature=1.5, top_k=40, top_p=0.95, seed=4)
PROMPT = [5, 80, 11, 11, 3]
NEAR_S, COMPUTE_S = 0.0005, 0.01


def slowly(scene: Scene) -> None:
    for worker in scene.workers.values():
        worker.threads.call_s["compute"] = COMPUTE_S


class Disturbed:
    """A session, of which something happens within each pass.

    Args:
        happens: in pass number n, so many seconds after it began, a worker dies.
    """

    def __init__(self, session: ModelSession, scene: Scene, happens: dict[int, tuple[float, str]]) -> None:
        self._session, self._scene, self._happens = session, scene, happens
        self._passes = self.sample_from = 0
        self.lost = False

    async def append(self, request: PassRequest) -> PassResult:
        self._session.sample_from = self.sample_from
        number, self._passes = self._passes, self._passes + 1
        running = asyncio.create_task(self._session.append(request))
        if number in self._happens:
            after_s, victim = self._happens[number]
            await asyncio.sleep(after_s)
            assert not running.done()
            self._scene.kill(victim)
        return await running

    async def close(self) -> None:
        await self._session.close()


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("stages", [1, 3])
def test_the_tokens_are_those_of_plain_decoding(tmp_path: Path, sampling: Sampling, stages: int) -> None:
    async def test(scene: Scene) -> None:
        slowly(scene)
        wanted = tokens_of(CONFIG, PROMPT, 30, sampling)
        async with scene.chain(stages=stages) as chain:
            target: ServedModel = chain
            assert (target.vocab_size, target.context, target.dtype) == (97, 6000, "fp32")
            for drafts in (0, 1, 4, 16):
                session = await target.open(positions=60, sampling=sampling, sample_from=1)
                made = await decoded(session, PROMPT, wanted, drafts=drafts, seed=drafts, chunk=2)
                assert list(made.tokens) == wanted
                assert bool(made.stats.accepted) == bool(drafts)
                await session.close()
        await asyncio.sleep(1)  # virtual: what was told of their ends arrives
        assert set(scene.sessions().values()) == {0}

    play(tmp_path, test, delay_s=lambda source, target: NEAR_S)


@pytest.mark.parametrize("victim", ["w0", "w1", "w2"])
@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.015, 0.025])
def test_a_stage_dies_while_drafts_are_verified(tmp_path: Path, victim: str, after_s: float) -> None:
    """Before it has the work, within it, and when it has given it on."""

    async def test(scene: Scene) -> None:
        slowly(scene)
        wanted = tokens_of(CONFIG, PROMPT, 30, SAMPLED)
        async with scene.chain() as chain:
            session = await chain.open(positions=60, sampling=SAMPLED, sample_from=1)
            disturbed = Disturbed(session, scene, {4: (after_s, victim)})
            made = await decoded(disturbed, PROMPT, wanted, drafts=6, right=0.8, seed=3)
            assert list(made.tokens) == wanted
            assert made.stats.passes >= 5
            assert len(chain.times.mendings) == 1
            assert victim in chain.times.mendings[0][0]

    play(tmp_path, test, delay_s=lambda source, target: NEAR_S)


def test_several_sessions_are_in_the_chain_at_once(tmp_path: Path) -> None:
    async def test(scene: Scene) -> None:
        slowly(scene)
        wanted = tokens_of(CONFIG, PROMPT, 12, SAMPLED)
        now = asyncio.get_running_loop().time
        async with scene.chain() as chain:

            async def one() -> float:
                session = await chain.open(positions=60, sampling=SAMPLED, sample_from=1)
                began = now()
                assert (await decoded(session, PROMPT, wanted, drafts=0)).tokens == tuple(wanted)
                took_s = now() - began
                await session.close()
                return took_s

            alone_s = await one()
            together_s = max(await asyncio.gather(one(), one(), one()))
            assert together_s < 1.5 * alone_s

    play(tmp_path, test, delay_s=lambda source, target: NEAR_S)


def test_invalid_sessions_and_passes_are_refused(tmp_path: Path) -> None:
    async def test(scene: Scene) -> None:
        async with scene.chain() as chain:
            for positions, words in ((6001, "context of 6000"), (0, "0 positions")):
                with pytest.raises(UserError, match=words):
                    await chain.open(positions=positions, sampling=GREEDY, sample_from=1)
            sessions = [await chain.open(positions=10, sampling=GREEDY, sample_from=1) for _ in range(MOST_SESSIONS)]
            with pytest.raises(Refused, match="64 sessions are open"):
                await chain.open(positions=10, sampling=GREEDY, sample_from=1)
            for session in sessions:
                await session.close()
            for request, kind in (
                (PassRequest(8, (1, 2, 3), 1), UserError),
                (PassRequest(1, (1,), 1), ValueError),
                (PassRequest(0, (1,), 2), ValueError),
            ):
                session = await chain.open(positions=10, sampling=GREEDY, sample_from=1)
                with pytest.raises(kind):
                    await session.append(request)
                await session.close()
            await chain.close()
            with pytest.raises(UserError, match="closed"):
                await chain.open(positions=10, sampling=GREEDY, sample_from=1)

    play(tmp_path, test)


def test_a_session_that_is_closed_within_a_pass(tmp_path: Path) -> None:
    async def test(scene: Scene) -> None:
        slowly(scene)
        async with scene.chain() as chain:
            session = await chain.open(positions=10, sampling=GREEDY, sample_from=1)
            running = asyncio.create_task(session.append(PassRequest(0, (1, 2), 2)))
            await asyncio.sleep(COMPUTE_S)
            await session.close()
            for late in (running, session.append(PassRequest(0, (1,), 1))):
                with pytest.raises(P2PTrainError, match="closed"):
                    await late
            other = await chain.open(positions=10, sampling=GREEDY, sample_from=1)
            cancelled = asyncio.create_task(other.append(PassRequest(0, (1, 2), 2)))
            await asyncio.sleep(COMPUTE_S)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            await other.close()
        await asyncio.sleep(1)  # virtual: what was told of their ends arrives
        assert set(scene.sessions().values()) == {0}

    play(tmp_path, test, delay_s=lambda source, target: NEAR_S)
