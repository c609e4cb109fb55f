"""Drafters that say too much, or too little, or come back all the time: the verifier hardly minds, nor do others."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from p2ptrain.core.serving import Sampling
from roles.line import MOST_BEATS
from roles.speculation.events import Told
from roles.speculation.received import packed
from roles.verifier.drafter_link import FARTHEST_S, MISBEHAVED_S, Tokens
from roles.verifier.drafters import Drafters
from tests.roles.drafter_hosts import (
    CONFIG,
    TOKENIZER,
    VOCAB,
    DrafterHost,
    Liar,
    Wobbly,
    around_of,
    drafter_hosts,
    model_serves,
    there,
    write,
)
from tests.roles.stage_stand_in import tokens_of
from wire.connection import Connection
from wire.memory import MemoryNetwork, run_virtual
from wire.messages import StillHere
from wire.text_messages import DrafterAt, Drafts, StreamRefused

PROMPT = [5, 80, 11, 11, 3]
GREEDY = Sampling(temperature=0)
EXPECTED = tokens_of(CONFIG, PROMPT, 400, GREEDY)


def says_nothing(stream: int, verdict: Told | None, number: int, connection: Connection) -> None:
    """It takes sessions in, and that is all."""


class Scene:
    def __init__(self, **options: Any) -> None:
        self.network = MemoryNetwork()
        self.told: list[tuple[str, str, str]] = []
        around = around_of(self.network.at("verifier"), lambda *notice: self.told.append(notice))
        self.source = Drafters(around, Tokens(VOCAB, TOKENIZER), **options)

    def liar(self, name: str, says: Any = says_nothing) -> Liar:
        return Liar(name, self.network.at(name), says)

    def good(self, name: str = "good") -> DrafterHost:
        return DrafterHost(name, self.network.at(name), model_serves(Wobbly(0.9)))

    @property
    def warnings(self) -> list[str]:
        return [text for level, _, text in self.told if level == "warning"]


def test_who_only_says_that_it_lives_and_all_the_time_is_cut_off() -> None:
    def says(stream: int, verdict: Told | None, number: int, connection: Connection) -> None:
        for _ in range(MOST_BEATS + 100 if verdict is None else 0):
            connection.send(StillHere())

    async def main() -> None:
        scene = Scene()
        liar = scene.liar("bad", says)
        async with drafter_hosts([liar]):
            scene.source.here([liar.at])
            await asyncio.sleep(1)
            assert (await write(scene.source, PROMPT, 40, GREEDY)).tokens == EXPECTED[:40]
            assert there(scene.source) == []
            await scene.source.close()

    run_virtual(main())


def says_what_cannot_be(stream: int, verdict: Told | None, number: int, connection: Connection) -> None:
    connection.send(Drafts(len(PROMPT) + 90, packed([1], VOCAB)), stream=stream)


def test_one_that_is_struck_is_not_dialled_sooner_for_calling_itself_another() -> None:
    async def main() -> None:
        scene = Scene()
        liar = scene.liar("bad", says_what_cannot_be)
        async with drafter_hosts([liar]):
            scene.source.here([liar.at])
            await asyncio.sleep(1)
            await write(scene.source, PROMPT, 20, GREEDY)
            for number in range(55):
                scene.source.here([] if number % 2 else [replace(liar.at, model=f"model {number}")])
                await asyncio.sleep(1)
                assert there(scene.source) == []
            scene.source.here([liar.at])
            await asyncio.sleep(MISBEHAVED_S - 30)
            assert there(scene.source) == ["bad"]
            await write(scene.source, PROMPT, 20, GREEDY)
            await asyncio.sleep(1.5 * MISBEHAVED_S)
            assert there(scene.source) == [], "the second time it is for longer"
            assert len(scene.warnings) == 1
            await scene.source.close()

    run_virtual(main())


def test_tokenizers_that_change_all_the_time_are_told_of_once_a_minute() -> None:
    async def main() -> None:
        scene = Scene()
        at = DrafterAt("bad", "bad", "bad", 1, "m", VOCAB, "")
        for number in range(600):
            scene.source.here([replace(at, tokenizer=f"tokenizer {number % 3}")])
            await asyncio.sleep(0.1)
        assert len(scene.warnings) <= 2
        await scene.source.close()

    run_virtual(main())


def test_whatever_reason_one_makes_up_for_each_refusal_people_hear_of_it_once() -> None:
    reasons = iter(range(1000))

    def says(stream: int, verdict: Told | None, number: int, connection: Connection) -> None:
        if verdict is None:
            connection.send(StreamRefused(f"reason {next(reasons)}", "\x1b[31mno", "why?"), stream=stream)

    async def main() -> None:
        scene = Scene()
        liar = scene.liar("bad", says)
        async with drafter_hosts([liar]):
            scene.source.here([liar.at])
            for _ in range(5):
                await asyncio.sleep(10)
                assert (await write(scene.source, PROMPT, 20, GREEDY)).tokens == EXPECTED[:20]
            assert liar.openings == 5
            assert len(scene.warnings) == 1
            assert scene.warnings[0].isprintable()
            await scene.source.close()

    run_virtual(main())


@pytest.mark.parametrize("says", [says_what_cannot_be, None])
def test_many_bad_ones_do_not_keep_a_good_one_out(says: Any, monkeypatch: pytest.MonkeyPatch) -> None:

    def is_wrong(stream: int, verdict: Told | None, number: int, connection: Connection) -> None:
        at = len(PROMPT) if verdict is None else verdict.start + len(verdict.tokens)
        token = (EXPECTED[at - len(PROMPT)] + 1) % VOCAB
        connection.send(Drafts(at, packed([token], VOCAB)), generation=number, stream=stream)

    async def main() -> None:
        scene = Scene()
        liars, good = [scene.liar(f"bad{number}", says or is_wrong) for number in range(6)], scene.good()
        async with drafter_hosts([*liars, good]):
            scene.source.here([*(liar.at for liar in liars), good.at])
            for _ in range(12):
                await asyncio.sleep(1)
                written = await write(scene.source, PROMPT, 60, GREEDY)
                assert written.tokens == EXPECTED[:60]
            assert "good" in there(scene.source)
            assert written.stats.accepted > 20
            await scene.source.close()

    run_virtual(main())


def test_who_answers_late_is_not_waited_for_the_longer() -> None:
    async def main() -> None:
        scene = Scene()
        far = scene.liar("far")
        far.late_s = 8.0
        async with drafter_hosts([far]):
            scene.source.here([far.at])
            await asyncio.sleep(20)
            (connected,) = scene.source.connected()
            assert connected.latency_s == FARTHEST_S
            await scene.source.close()
            await asyncio.sleep(far.late_s)

    run_virtual(main())
