"""Drafters and verifiers: what they say to each other, and both sides whole, told anything by the other one."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache

from hypothesis import strategies as st

from p2ptrain.core.activations import encode_ids
from p2ptrain.core.errors import ConnectionLost
from p2ptrain.core.serving import Sampling
from p2ptrain.lab.memory import MemoryNetwork
from roles.drafter.drafting import (
    ids_untrusted,
    verdict_untrusted,
)
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
    write,
)
from tests.roles.stage_stand_in import tokens_of
from wire.chain_messages import MAX_POSITIONS
from wire.connection import Connection
from wire.handshake import dial, local_hello
from wire.messages import Message, Request
from wire.schema import instance_untrusted
from wire.text_messages import (
    MAX_DEPTH,
    DraftOpen,
    DraftReady,
    Drafts,
    StreamClose,
    StreamRefused,
    Verdict,
    error_untrusted,
)

from .engine import send_if_valid, target
from .strategies import WHOLE, made, mutated

PROMPT = [5, 80, 11]
GREEDY = Sampling(temperature=0)

_SMALL = st.integers(-1, 12)
_IDS = st.lists(st.integers(0, VOCAB) | st.just((1 << 16) - 1), max_size=6).map(encode_ids)
_BYTES = _IDS | mutated(_IDS)
_OPENING = DraftOpen(3, 3, 40, VOCAB, TOKENIZER, 8, 2.0, Sampling())
_OPENINGS = made(
    DraftOpen,
    count=st.integers(0, 6),
    prompt=st.integers(0, 6),
    positions=st.integers(0, 64),
    vocab_size=st.sampled_from([VOCAB, VOCAB, VOCAB, 0, 96]),
    tokenizer=st.sampled_from([TOKENIZER, TOKENIZER, ""]),
    depth=st.integers(0, 20),
    silence_s=st.sampled_from([0.5, 2.0]),
)
_DRAFTS = made(Drafts, position=st.integers(0, 20), tokens=_BYTES)
_VERDICTS = made(Verdict, right=st.integers(0, 20), tokens=_BYTES, depth=st.integers(0, 20))
_REFUSALS = made(StreamRefused)
_NUMBERS = st.integers(0, 5) | WHOLE.filter(lambda number: 0 <= number < 1 << 64)


@target(
    "draft-words",
    st.tuples(_OPENINGS | _DRAFTS | _VERDICTS | made(DraftReady) | _REFUSALS, _NUMBERS),
    "roles.drafter.drafting.verdict_untrusted",
    "roles.drafter.drafting.ids_untrusted",
    "wire.text_messages.error_untrusted",
    weight=60,
)
def _check_words(case: tuple[Message, int]) -> None:
    message, number = case
    message = instance_untrusted(type(message), asdict(message))
    match message:
        case DraftOpen():
            assert 0 < message.sampling.top_p <= 1
            assert 0 < message.prompt <= message.count <= message.positions <= MAX_POSITIONS
        case Drafts():
            tokens = ids_untrusted(message.tokens, vocab_size=VOCAB)
            assert 0 < len(tokens) <= 2 * MAX_DEPTH
            assert all(0 <= token < VOCAB for token in tokens)
        case Verdict():
            told = verdict_untrusted(message, number, vocab_size=VOCAB)
            assert ids_untrusted(message.tokens, vocab_size=VOCAB) == told.tokens
            assert told.right == message.right
            assert 0 <= told.depth <= MAX_DEPTH
        case StreamRefused():
            refused = error_untrusted(message)
            assert (refused.message + refused.remedy).isprintable()


# ----------------------------------------------------------------------------------------------------- a whole drafter


@cache
def _expected(tokens: int) -> list[int]:
    return tokens_of(CONFIG, PROMPT, tokens, GREEDY)


def _say(connection: Connection, said: list[tuple[Message, int, int, bytes]]) -> None:
    for message, generation, stream, payload in said:
        if send_if_valid(connection, message, generation=generation, stream=stream) and payload:
            with suppress(ConnectionLost):
                connection.send_bulk(memoryview(payload), generation=0, stream=stream)


_STREAMS = st.sampled_from([1, 1, 1, 2, 2, 3, 0])
_AS_VERIFIER = st.tuples(
    _VERDICTS | _OPENINGS | st.just(StreamClose()) | st.just(Request(1, "probe.clock", {})) | _DRAFTS,
    st.sampled_from([1, 1, 2, 0]),
    _STREAMS,
    st.sampled_from([b"", b"", encode_ids(PROMPT), bytes(16)]),
) | st.tuples(st.just(_OPENING), st.just(0), _STREAMS, st.just(encode_ids(PROMPT)))


@target(
    "drafters",
    st.lists(_AS_VERIFIER, max_size=6),
    "roles.drafter.draft_server.DraftServer._open_untrusted",
    "roles.drafter.draft_server.DraftServer._find_untrusted",
    "roles.drafter.draft_server.DraftServer._take_verdict_untrusted",
    "roles.drafter.drafting.ids_untrusted",
    peak_bytes=16 << 20,
    weight=8,
)
async def _asked(said: list[tuple[Message, int, int, bytes]]) -> None:
    """A hostile verifier beside an honest one, whose text must come, and sooner, all the same."""
    network = MemoryNetwork()
    host = DrafterHost("d", network.at("d"), model_serves(Wobbly(1.0)))
    source = Drafters(around_of(network.at("v")), VOCAB, TOKENIZER)
    async with drafter_hosts([host]):
        hello = local_hello(peer_id="liar", name="liar", roles=["verifier"], purpose="draft")
        connection, _ = await dial(network.at("liar"), "d", PORT, hello, timeout_s=5)
        connection.send(_OPENING, stream=1)
        connection.send_bulk(memoryview(encode_ids(PROMPT)), generation=0, stream=1)
        _say(connection, said)
        source.update_list([host.at])
        await asyncio.sleep(1)
        written = await write(source, PROMPT, 16, GREEDY)
        connection.abort()
        await source.close()
    assert written.tokens == _expected(16)
    assert written.stats.accepted


# ----------------------------------------------------------------------------------------------- a verifier's links


_AS_DRAFTER = st.tuples(
    made(Drafts, position=_SMALL.map(lambda at: max(at - 8, -1)), tokens=_BYTES)
    | made(DraftReady)
    | _REFUSALS
    | _VERDICTS
    | st.just(Drafts(0, encode_ids([1, 2]))),
    st.sampled_from([0, 0, 0, -1, 1]),
    st.sampled_from([0, 0, 0, 0, 1, -1]),
)


@target(
    "drafter-links",
    st.lists(st.lists(_AS_DRAFTER, max_size=2), max_size=6),
    "roles.verifier.drafters.DrafterLink._take_untrusted",
    "roles.verifier.speculation.DraftLine.receive_untrusted",
    "roles.verifier.speculation.Speculation.receive_untrusted",
    peak_bytes=16 << 20,
    weight=8,
)
async def _drafted(said: list[list[tuple[Message, int, int]]]) -> None:
    """A hostile drafter beside an honest one: the text is that of plain decoding."""
    network = MemoryNetwork()
    words = iter(said)

    def says(stream: int, at: int, number: int, connection: Connection) -> None:
        for message, epoch, offset in next(words, []):
            if isinstance(message, Drafts):  # where drafts are due, give or take a few
                message = replace(message, position=at + message.position)
            send_if_valid(connection, message, generation=max(0, number + epoch), stream=max(0, stream + offset))

    liar = Liar("liar", network.at("liar"), says)
    host = DrafterHost("d", network.at("d"), model_serves(Wobbly(0.8)))
    source = Drafters(around_of(network.at("v")), VOCAB, TOKENIZER)
    async with drafter_hosts([liar, host]):
        source.update_list([liar.at, host.at])
        await asyncio.sleep(1)
        written = await write(source, PROMPT, 16, GREEDY)
        await source.close()
    assert written.tokens == _expected(16)
