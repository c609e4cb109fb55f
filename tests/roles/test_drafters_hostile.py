"""Drafters that lie, and verifiers that ask for what cannot be: no text changes, and nobody else is hurt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, replace
from typing import Any

import pytest

from p2ptrain.core.activations import encode_ids
from p2ptrain.core.errors import DeadlineExceeded, P2PTrainError, ProtocolError, ResourceError
from p2ptrain.core.serving import Pass, Ran, Sampling
from p2ptrain.lab.memory import MemoryNetwork
from roles.drafter.draft_server import MAX_CALLERS
from roles.line import Line
from roles.verifier.drafters import Drafters
from tests.roles.drafter_hosts import (
    CONFIG,
    PORT,
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
from wire.handshake import dial, local_hello
from wire.messages import Message, Response
from wire.schema import instance_untrusted
from wire.text_messages import DraftOpen, DraftReady, Drafts, StreamRefused, Verdict

pytestmark = pytest.mark.virtual_time

PROMPT = [5, 80, 11, 11, 3]
GREEDY = Sampling(temperature=0)
EXPECTED = tokens_of(CONFIG, PROMPT, 120, GREEDY)
Says = Callable[[int, int, int, Connection], None]


def drafts(connection: Connection, stream: int, epoch: int, position: int, tokens: list[int]) -> None:
    connection.send(Drafts(position, encode_ids(tokens)), generation=epoch, stream=stream)


def says_what_cannot_be(stream: int, verified: int, number: int, connection: Connection) -> None:
    drafts(connection, stream, 0, len(PROMPT) + 90, [1])


def says_nothing_right(stream: int, verified: int, number: int, connection: Connection) -> None:
    right = EXPECTED[verified - len(PROMPT)]
    drafts(connection, stream, number, verified, [(right + 1) % VOCAB])


@pytest.mark.parametrize("says", [says_what_cannot_be, says_nothing_right])
async def test_many_bad_drafters_do_not_displace_a_good_one(says: Says) -> None:
    network = MemoryNetwork()
    liars = [Liar(f"bad{number}", network.at(f"bad{number}"), says) for number in range(6)]
    good = DrafterHost("good", network.at("good"), model_serves(Wobbly(0.9)))
    source = Drafters(around_of(network.at("verifier")), VOCAB, TOKENIZER)
    async with drafter_hosts([*liars, good]):
        source.update_list([*(liar.at for liar in liars), good.at])
        for _ in range(12):
            await asyncio.sleep(1)
            written = await write(source, PROMPT, 60, GREEDY)
            assert written.tokens == EXPECTED[:60]
        assert "good" in there(source)
        assert written.stats.accepted > 20
        await source.close()


def garbage(message: Message, *, generation: int = 0, offset: int = 0) -> Says:
    """Says this message once the session runs; its stream is ``offset`` beside the session's."""

    def says(stream: int, verified: int, number: int, connection: Connection) -> None:
        if not number:
            connection.send(message, generation=generation, stream=stream + offset)

    return says


def late_garbage(stream: int, verified: int, number: int, connection: Connection) -> None:
    if number:
        drafts(connection, stream, number, verified + 2, [1])  # a hole


LIES = {
    "another epoch": garbage(Drafts(len(PROMPT), encode_ids([1])), generation=3),
    "far ahead": garbage(Drafts(len(PROMPT) + 90, encode_ids([1]))),
    "no such token": garbage(Drafts(len(PROMPT), encode_ids([VOCAB]))),
    "another session": garbage(Drafts(len(PROMPT), encode_ids([1])), offset=5),
    "ready twice": garbage(DraftReady()),
    "a verifier's word": garbage(Verdict(0, 1, b"")),
    "a hole": late_garbage,
    "an answer to nothing": garbage(Response(77, {})),
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_drafter_that_violates_the_protocol_is_dropped_and_reported_once(lie: str) -> None:
    network = MemoryNetwork()
    liar = Liar("bad", network.at("bad"), LIES[lie])
    good = DrafterHost("good", network.at("good"), model_serves(Wobbly(0.9)))
    told: list[tuple[str, str, str]] = []
    context = around_of(network.at("verifier"), lambda *notice: told.append(notice))
    source = Drafters(context, VOCAB, TOKENIZER)
    async with drafter_hosts([liar, good]):
        source.update_list([liar.at, good.at])
        await asyncio.sleep(1)
        assert there(source) == ["bad", "good"]
        written = await write(source, PROMPT, 40, GREEDY)
        assert written.tokens == EXPECTED[:40]
        assert written.stats.accepted > 20
        assert there(source) == ["good"]
        await asyncio.sleep(40)
        assert there(source) == ["good"], "it was dialled again at once"
        warnings = [text for level, _, text in told if level == "warning"]
        assert len(warnings) == 1
        assert "bad" in warnings[0]
        await asyncio.sleep(45)
        assert there(source) == ["bad", "good"], "it has its chance again, long after"
        await source.close()


async def test_a_drafter_that_is_silent_is_lost_in_seconds() -> None:
    network = MemoryNetwork()
    good = DrafterHost("good", network.at("good"), model_serves(Wobbly(1.0)))
    source = Drafters(around_of(network.at("verifier")), VOCAB, TOKENIZER)
    async with drafter_hosts([good]):
        source.update_list([good.at])
        await asyncio.sleep(1)
        writing = asyncio.create_task(write(source, PROMPT, 120, GREEDY))
        await asyncio.sleep(0.5)
        network.silence("verifier", "good")
        await asyncio.sleep(3)
        assert there(source) == []
        assert not good.drafter.sessions
        assert (await writing).tokens == EXPECTED
        network.mend("verifier", "good")
        await asyncio.sleep(60)
        assert there(source) == ["good"]
        await source.close()


# ------------------------------------------------------------------------------------------------- hostile verifiers

OPENING = DraftOpen(5, 5, 64, VOCAB, TOKENIZER, 8, 2.0, Sampling())
IDS = encode_ids(PROMPT)


class Verifier:
    """A verifier's connection that says what it is told to say."""

    def __init__(self, connection: Connection) -> None:
        self.line = Line(connection)
        self.connection = connection

    def open(self, message: DraftOpen = OPENING, data: bytes = IDS, *, stream: int = 1) -> None:
        self.connection.send(message, stream=stream)
        if data:
            self.connection.send_bulk(memoryview(data), generation=0, stream=stream)

    async def told_off(self) -> None:
        """Listen until the connection ends, which is for cause."""
        with pytest.raises(P2PTrainError) as ended:
            await self._until_the_end()
        assert not isinstance(ended.value, DeadlineExceeded)

    async def _until_the_end(self) -> None:
        while True:
            await self.next()

    async def rest(self) -> AsyncIterator[tuple[int, Message]]:
        """What comes until the connection ends."""
        with suppress(P2PTrainError):
            while True:
                yield await self.next()

    async def next(self) -> tuple[int, Message]:
        frame = await self.line.receive()
        return frame.stream, frame.message


@asynccontextmanager
async def verifier_of(network: Any, host: str = "d", name: str = "v") -> AsyncIterator[Verifier]:
    hello = local_hello(peer_id=name, name=name, roles=["verifier"], purpose="draft")
    connection, _ = await dial(network.at(name), host, PORT, hello, timeout_s=5)
    verifier = Verifier(connection)
    try:
        async with verifier.line.keep_alive():
            yield verifier
    finally:
        connection.abort()


@asynccontextmanager
async def drafter_beside(
    engine: Any = None, *, serves: Any = None, **options: Any
) -> AsyncIterator[tuple[MemoryNetwork, DrafterHost]]:
    """A drafter, and an honest session for which it drafts to its end."""
    network = MemoryNetwork()
    host = DrafterHost("d", network.at("d"), serves or model_serves(engine or Wobbly(1.0)), options=options)
    source = Drafters(around_of(network.at("honest")), VOCAB, TOKENIZER)
    async with drafter_hosts([host]):
        source.update_list([host.at])
        await asyncio.sleep(1)
        writing = asyncio.create_task(write(source, PROMPT, 60, GREEDY))
        yield network, host
        written = await writing
        assert written.tokens == EXPECTED[:60]
        assert written.stats.accepted > 30
        await source.close()


BAD_OPENINGS: dict[str, dict[str, Any]] = {
    "no ids": {"count": 0},
    "a huge count": {"count": 1 << 40, "positions": 1 << 40},
    "many positions": {"positions": 1 << 21},
    "endless patience": {"silence_s": float("inf")},
    "an impossible temperature": {"sampling": asdict(GREEDY) | {"temperature": float("nan")}},
    "an impossible top_p": {"sampling": asdict(GREEDY) | {"top_p": 0.0}},
}


@pytest.mark.parametrize("name", BAD_OPENINGS)
def test_an_invalid_opening_is_no_message(name: str) -> None:
    with pytest.raises(ProtocolError):
        instance_untrusted(DraftOpen, asdict(OPENING) | BAD_OPENINGS[name])


def says(message: Message, *, stream: int = 1, generation: int = 1) -> Callable[[Verifier], None]:
    return lambda verifier: verifier.connection.send(message, stream=stream, generation=generation)


BAD_WORDS = {
    "a token out of range": lambda verifier: verifier.open(data=encode_ids([1, 2, 3, 4, VOCAB]), stream=2),
    "the same number again": lambda verifier: verifier.open(stream=1),
    "fewer ids than it says": lambda verifier: verifier.open(data=IDS[4:], stream=2),
    "a verdict of no session": says(Verdict(0, 8, encode_ids([1])), stream=9),
    "a verdict of another number": says(Verdict(0, 8, encode_ids([1])), generation=2),
    "a verdict from nowhere": says(Verdict(55, 8, encode_ids([1]))),
    "a drafter's word": says(DraftReady()),
}


@pytest.mark.parametrize("name", BAD_WORDS)
async def test_an_invalid_message_of_a_verifier_ends_its_connection(name: str) -> None:
    async with drafter_beside() as (network, host):
        async with verifier_of(network) as verifier:
            verifier.open(replace(OPENING, depth=0))
            assert isinstance((await verifier.next())[1], DraftReady)
            assert host.drafter.sessions == 2
            BAD_WORDS[name](verifier)
            await verifier.told_off()
        await asyncio.sleep(0.01)  # virtual: it is told of the end in another turn of the loop
        assert host.drafter.sessions == 1


@pytest.mark.parametrize(
    ("opening", "options", "code", "text"),
    [
        (replace(OPENING, tokenizer="another"), {}, "other-tokenizer", "another tokenizer"),
        (OPENING, {"max_sessions": 1}, "busy", "1 sessions are open"),
    ],
)
async def test_a_session_that_cannot_be_drafted_for_is_refused_with_its_code(
    opening: DraftOpen, options: dict[str, Any], code: str, text: str
) -> None:
    async with drafter_beside(**options) as (network, _), verifier_of(network) as verifier:
        verifier.open(opening)
        stream, message = await verifier.next()
        assert isinstance(message, StreamRefused)
        assert (stream, message.code) == (1, code)
        assert text in message.reason
        assert message.remedy


async def test_a_session_longer_than_the_drafters_context_is_drafted_for_up_to_it() -> None:
    network = MemoryNetwork()
    host = DrafterHost("d", network.at("d"), model_serves(Wobbly(1.0), context=40))
    told: list[str] = []
    context = around_of(network.at("honest"), lambda level, kind, text: told.append(text))
    source = Drafters(context, VOCAB, TOKENIZER)
    async with drafter_hosts([host]):
        source.update_list([host.at])
        await asyncio.sleep(1)
        written = await write(source, PROMPT, 120, GREEDY)
        assert written.tokens == EXPECTED
        assert written.stats.accepted > 5
        assert not host.drafter.sessions
        assert any("has a context of 40" in text for text in told)
        assert there(source) == ["d"]
        assert (await write(source, PROMPT, 30, GREEDY)).stats.accepted > 15
        long = await write(source, PROMPT * 9, 10, GREEDY)
        assert long.tokens == tokens_of(CONFIG, PROMPT * 9, 10, GREEDY)
        assert not long.facts
        await source.close()


async def test_an_engine_that_fails_ends_that_session_with_its_reason() -> None:
    class Failing(Wobbly):
        def run(self, passes: Mapping[str, Pass]) -> dict[str, Ran | P2PTrainError]:
            error = ResourceError("the device has no memory left", remedy="use a smaller model")
            return {**super().run(passes), **{name: error for name, work in passes.items() if work.count == 4}}

    async with drafter_beside(Failing(1.0)) as (network, host), verifier_of(network) as verifier:
        verifier.open(replace(OPENING, count=4, prompt=4), IDS[4:])
        assert (await verifier.next())[1] == StreamRefused(
            "no-memory", "the device has no memory left", "use a smaller model"
        )
        assert host.drafter.sessions == 1
        verifier.connection.send(Verdict(4, 8, encode_ids([1])), generation=1, stream=1)  # was on its way
        verifier.open(stream=2)
        assert (await verifier.next())[0] == 2


async def test_callers_and_their_sessions_are_bounded() -> None:
    async with drafter_beside(max_sessions=5) as (network, _):
        hello = local_hello(peer_id="v", name="v", roles=["verifier"], purpose="draft")
        dialled = [await dial(network.at("v"), "d", PORT, hello, timeout_s=5) for _ in range(MAX_CALLERS - 1)]
        with pytest.raises(P2PTrainError, match=f"{MAX_CALLERS} verifiers"):
            await dial(network.at("v"), "d", PORT, hello, timeout_s=5)
        for connection, _ in dialled:
            connection.abort()
        await asyncio.sleep(0.01)
        async with verifier_of(network) as verifier:
            for stream in range(1, 9):
                verifier.open(replace(OPENING, depth=0), stream=stream)
            answers = [(await verifier.next())[1] for _ in range(8)]
            assert sum(isinstance(answer, DraftReady) for answer in answers) == 4
            assert sum(isinstance(answer, StreamRefused) for answer in answers) == 4
