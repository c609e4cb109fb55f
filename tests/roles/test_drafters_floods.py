"""Drafters that say too much, or too little, or come back all the time: the verifier hardly minds, nor do others."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from p2ptrain.core.serving import Sampling
from roles.drafter.testing import (
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
from roles.speculation.events import Tell, Told
from roles.speculation.received import packed
from roles.stage_stand_in import tokens_of
from roles.verifier.drafter_link import FARTHEST_S, LATE_FRAMES, Tokens
from roles.verifier.drafter_record import SILENT_TOKENS, UNREADY, DraftRecord, SeatRecord
from roles.verifier.drafters import Drafters
from roles.verifier.standing import LONGEST_STRUCK_S, REDIAL_S, STRUCK_S, Standing
from roles.worker.stage_links import MOST_BEATS
from wire.connection import Connection
from wire.memory import MemoryNetwork, run_virtual
from wire.messages import StillHere
from wire.speculation_messages import DrafterAt, DraftRefused, Drafts

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
        self.source = Drafters(around, Tokens(VOCAB, TOKENIZER), look_up=False, **options)

    def liar(self, name: str, says: Any = says_nothing) -> Liar:
        return Liar(name, self.network.at(name), says)

    def good(self, name: str = "good") -> DrafterHost:
        return DrafterHost(name, self.network.at(name), model_serves(Wobbly(0.9)))

    @property
    def warnings(self) -> list[str]:
        return [text for level, _, text in self.told if level == "warning"]


def goes_on(texts: int, frames: int) -> list[str]:
    """A drafter of so many texts that are over drafts for them: it is kept for so many frames, and not for one more.
    Returns the warnings."""
    connections: list[Connection] = []

    def says(stream: int, verdict: Told | None, number: int, connection: Connection) -> None:
        connections.append(connection)

    async def main() -> list[str]:
        scene = Scene()
        liar = scene.liar("bad", says)
        async with drafter_hosts([liar]):
            scene.source.here([liar.at])
            await asyncio.sleep(1)
            for _ in range(texts):
                await write(scene.source, PROMPT, 10, GREEDY)
            for more, listed in ((frames, ["bad"]), (1, [])):
                for _ in range(more):
                    connections[-1].send(Drafts(len(PROMPT), packed([1], VOCAB)), stream=1)
                await asyncio.sleep(1)
                assert there(scene.source) == listed
            warnings = scene.warnings
            await scene.source.close()
            return warnings

    return run_virtual(main())


def test_who_goes_on_about_a_session_that_is_over_is_cut_off() -> None:
    assert "sessions that are over" in goes_on(1, LATE_FRAMES)[0]


def test_many_sessions_that_are_over_let_nobody_go_on_about_them_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roles.verifier.drafter_link.MOST_LATE_FRAMES", 2 * LATE_FRAMES)
    goes_on(4, 2 * LATE_FRAMES)


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
            await asyncio.sleep(STRUCK_S - 50)
            assert there(scene.source) == ["bad"]
            await write(scene.source, PROMPT, 20, GREEDY)
            await asyncio.sleep(1.5 * STRUCK_S)
            assert there(scene.source) == [], "the second time it is for longer"
            assert len(scene.warnings) == 1
            await scene.source.close()

    run_virtual(main())


def test_one_that_is_another_all_the_time_is_dialled_now_and_then() -> None:
    async def main() -> None:
        scene = Scene()
        liar = scene.liar("bad")
        async with drafter_hosts([liar]):
            writing = asyncio.create_task(write(scene.source, PROMPT, 400, GREEDY))
            for number in range(200):
                scene.source.here([replace(liar.at, model=f"model {number}")])
                await asyncio.sleep(0.1)
            assert (await writing).tokens == EXPECTED
            assert liar.openings <= 1 + 20 / REDIAL_S
            assert len(scene.told) <= 2
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
            connection.send(DraftRefused(f"reason {next(reasons)}", "\x1b[31mno", "why?"), stream=stream)

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
    monkeypatch.setattr("roles.verifier.drafters.MAX_LINKS", 3)

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


def test_one_that_never_drafts_gives_its_place_away() -> None:
    async def main() -> None:
        scene = Scene(seats=1)
        silent, good = scene.liar("bad"), scene.good()
        async with drafter_hosts([silent, good]):
            scene.source.here([silent.at])
            await asyncio.sleep(1)
            writing = asyncio.create_task(write(scene.source, PROMPT, 400, GREEDY))
            await asyncio.sleep(0.5)
            scene.source.here([silent.at, good.at])
            written = await writing
            assert written.tokens == EXPECTED
            assert [facts.peer_id for facts in written.facts] == ["bad", "good"]
            assert written.stats.accepted > 50
            await scene.source.close()

    run_virtual(main())


@pytest.mark.parametrize(("texts", "tokens"), [(1, 400), (UNREADY + 1, 20)])
def test_those_that_never_take_a_session_in_keep_nobody_out(texts: int, tokens: int) -> None:
    """In a long text they are slow; of short ones they were never ready."""

    async def main() -> None:
        scene = Scene(seats=2)
        duds = [Liar(name, scene.network.at(name), says_nothing, takes_in=lambda stream: False) for name in ("a", "b")]
        good = scene.good()
        async with drafter_hosts([*duds, good]):
            scene.source.here([*(dud.at for dud in duds), good.at])
            await asyncio.sleep(1)
            for _ in range(texts):
                written = await write(scene.source, PROMPT, tokens, GREEDY)
                assert written.tokens == EXPECTED[:tokens]
            assert [facts.peer_id for facts in written.facts] == ["good"]
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


def test_silence_counts_only_where_drafts_are_wanted_and_only_after_long() -> None:
    def misses(depth: int) -> int:
        seat = SeatRecord(5)
        tells = [Tell(1, at, 5 + at, (7,), depth, 0) for at in range(SILENT_TOKENS + 20)]
        return sum(wrong for _, wrong in map(seat.judged, tells))

    assert misses(8) == 20
    assert misses(0) == 0


def test_who_says_that_it_is_fast_and_is_rarely_right_is_not_preferred() -> None:
    boasts, unknown, good = DraftRecord(), DraftRecord(), DraftRecord()
    boasts.step_s, good.step_s = 1e-9, 0.01
    for _ in range(200):
        boasts.count(0, wrong=True)
        boasts.count(0, wrong=True)
        boasts.count(1, wrong=False)
        good.count(4, wrong=True)
    assert not boasts.hopeless
    assert good.cost_s(0) < unknown.cost_s(0) < boasts.cost_s(0)
    assert good.cost_s(0) < good.cost_s(3)


def test_strikes_weigh_more_each_time_up_to_an_hour() -> None:
    standing, now, waits = Standing(), 0.0, list[float]()
    for _ in range(12):
        waits.append(standing.struck(now))
        now = standing.not_before
    assert waits[:3] == [STRUCK_S, 2 * STRUCK_S, 4 * STRUCK_S]
    assert waits[-1] == LONGEST_STRUCK_S
    now += LONGEST_STRUCK_S
    assert standing.struck(now) == LONGEST_STRUCK_S
    now = standing.not_before + LONGEST_STRUCK_S + 1
    assert standing.struck(now) == STRUCK_S, "that was long ago"
