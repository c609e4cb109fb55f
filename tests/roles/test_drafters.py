"""Drafters and verifiers over emulated links, with engines that notice whatever goes wrong."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from typing import Any

import pytest

from p2ptrain.core.serving import Sampling
from p2ptrain.lab.memory import MemoryNetwork
from roles.verifier.drafters import Drafters
from tests.roles.drafter_hosts import (
    CONFIG,
    TOKENIZER,
    VOCAB,
    DrafterHost,
    Wobbly,
    around_of,
    drafter_hosts,
    model_serves,
    there,
    write,
)
from tests.roles.stage_stand_in import tokens_of
from wire.emulate import EmulatedNetwork, LinkPreset

pytestmark = pytest.mark.virtual_time

PROMPT = [5, 80, 11, 11, 3]
SEEDED = Sampling(temperature=1.5, top_k=40, top_p=0.95, seed=4)
GREEDY = Sampling(temperature=0)
TOKENS = (VOCAB, TOKENIZER)


class Scene:
    """A verifier and its drafters on one network, each link with the same weather."""

    def __init__(self, *, one_way_ms: float = 0.0, jitter_ms: float = 0.0) -> None:
        self.memory = MemoryNetwork()
        self.preset = LinkPreset("test", one_way_ms / 1e3, jitter_ms / 1e3)
        self.told: list[tuple[str, str, str]] = []
        self.drafters = Drafters(around_of(self.at("verifier"), lambda *notice: self.told.append(notice)), *TOKENS)

    def at(self, host: str) -> Any:
        network = self.memory.at(host)
        return EmulatedNetwork(network, self.preset, len(host)) if self.preset.delay_s else network

    def host(self, name: str, engine: Any, *, step_s: float = 0.005, **more: Any) -> DrafterHost:
        return DrafterHost(name, self.at(name), model_serves(engine, **more), step_s)

    @asynccontextmanager
    async def running(self, *hosts: DrafterHost, wait_s: float = 5.0) -> Any:
        async with drafter_hosts(hosts):
            self.drafters.update_list([host.at for host in hosts])
            await asyncio.sleep(wait_s)  # virtual
            yield
            await self.drafters.close()


def expected(prompt: list[int], tokens: int, sampling: Sampling) -> list[int]:
    return tokens_of(CONFIG, prompt, tokens, sampling)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
@pytest.mark.parametrize("one_way_ms", [0.0, 40.0])
async def test_the_text_is_that_of_plain_decoding_and_comes_sooner(sampling: Sampling, one_way_ms: float) -> None:
    scene = Scene(one_way_ms=one_way_ms)
    async with scene.running(scene.host("d1", Wobbly(0.9))):
        began = asyncio.get_running_loop().time()
        written = await write(scene.drafters, PROMPT, 100, sampling)
        assert written.tokens == expected(PROMPT, 100, sampling)
        assert written.stats.accepted > 40
        assert written.ends[-1] - began < 0.8 * 100 * 0.05
        (facts,) = written.facts
        assert abs(facts.latency_ms - one_way_ms) < 2
        assert 0 < facts.bytes_in + facts.bytes_out < 48 * 100


async def test_a_drafter_reports_verifiers_that_connect_and_leave() -> None:
    scene, told = Scene(), list[str]()
    host = scene.host("d1", Wobbly(0.9))
    host.options["on_news"] = told.append
    async with scene.running(host):
        assert told == ["verifier connected: this drafter drafts for its texts"]
        for _ in range(2):  # a text is no event
            written = await write(scene.drafters, PROMPT, 100, GREEDY)
        assert written.stats.accepted > 40
    assert told[1:] == [f"the connection to verifier has ended; {host.drafter.right} of its tokens were drafted here"]
    assert host.drafter.right > 80


async def test_listed_drafters_are_dialled_and_lost_ones_are_not_waited_for() -> None:
    scene = Scene(one_way_ms=5)
    hosts = [scene.host(f"d{number}", Wobbly(0.9)) for number in range(3)]
    first, second, third = hosts
    async with scene.running(first, second):
        assert there(scene.drafters) == ["d0", "d1"]
        scene.drafters.update_list([second.at, third.at])
        await asyncio.sleep(1)
        assert there(scene.drafters) == ["d0", "d1"], "the seed may have lost it; it is there all the same"
        await first.stop()
        await asyncio.sleep(0.5)
        assert there(scene.drafters) == ["d1"]
        await first.start()
        await third.start()
        await asyncio.sleep(60)
        assert there(scene.drafters) == ["d1", "d2"]
        await third.stop()
        scene.drafters.update_list([])
        await asyncio.sleep(1)
        assert there(scene.drafters) == ["d1"]


async def test_a_running_text_uses_a_drafter_that_joins_and_survives_its_loss() -> None:
    scene = Scene(one_way_ms=5)
    first, second = (scene.host(f"d{number}", Wobbly(1.0)) for number in range(2))
    async with drafter_hosts([second]):
        writing = asyncio.create_task(write(scene.drafters, PROMPT, 150, SEEDED, pass_s=0.2))
        await asyncio.sleep(1)
        async with drafter_hosts([first]):
            scene.drafters.update_list([first.at])
            await asyncio.sleep(0.5)
            assert first.drafter.sessions == 1
            scene.drafters.update_list([first.at, second.at])
            await asyncio.sleep(0.5)
            assert not second.drafter.sessions
        await asyncio.sleep(0.1)
        assert second.drafter.sessions == 1
        written = await writing
        assert written.tokens == expected(PROMPT, 150, SEEDED)
        assert [facts.peer_id for facts in written.facts] == ["d0", "d1"]
        await scene.drafters.close()


@pytest.mark.parametrize("seed", range(3))
async def test_drafters_that_die_and_come_back_change_nothing(seed: int) -> None:
    dice = random.Random(seed)

    scene = Scene(one_way_ms=dice.choice([1.0, 30.0]), jitter_ms=20)
    names = [f"d{number}" for number in range(dice.randint(1, 3))]
    hosts = {name: scene.host(name, Wobbly(dice.choice([0.0, 0.6, 0.9, 1.0]), seed=seed)) for name in names}

    async def churn() -> None:
        while True:
            await asyncio.sleep(dice.uniform(0.05, 0.6))
            name = dice.choice(names)
            match dice.randint(0, 2):
                case 0:
                    scene.memory.crash(name)
                    await asyncio.sleep(dice.uniform(0, 1))
                    await hosts[name].stop()
                    await hosts[name].start()
                case 1:
                    scene.memory.cut("verifier", name)
                    await asyncio.sleep(dice.uniform(0, 1))
                    scene.memory.mend("verifier", name)
                case 2:
                    scene.memory.silence("verifier", name)
                    await asyncio.sleep(dice.uniform(0, 4))
                    scene.memory.mend("verifier", name)

    async with scene.running(*hosts.values(), wait_s=0.2):
        churning = asyncio.create_task(churn())
        sampling = dice.choice([GREEDY, SEEDED])
        prompts = [[number + 1, seed] for number in range(2)]
        written = await asyncio.gather(*(write(scene.drafters, prompt, 120, sampling) for prompt in prompts))
        churning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await churning
        assert [each.tokens for each in written] == [expected(prompt, 120, sampling) for prompt in prompts]
        for name in names:
            scene.memory.mend("verifier", name)
