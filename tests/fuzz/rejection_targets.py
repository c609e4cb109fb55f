"""Drafts that are rejected by their probabilities: what drafters say of these, and who asks about them."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from p2ptrain.core.activations import encode_ids
from p2ptrain.core.errors import P2PTrainError, ProtocolError
from p2ptrain.core.serving import Sampling
from roles.drafter.testing import PORT, TOKENIZER, Liar, drafter_hosts
from roles.speculation.events import Told
from roles.speculation.probs import (
    SUM_ERROR,
    packed_weighed,
    probs_bytes_untrusted,
    probs_untrusted,
    wanted_untrusted,
    weighed_untrusted,
)
from roles.speculation.received import MAX_DEPTH
from roles.worker.stage_requests import MAX_POSITIONS
from tests.roles.rejecting import VOCAB, Chain, Scene
from wire.connection import Connection
from wire.handshake import dial, local_hello
from wire.messages import Message
from wire.speculation_messages import DraftOpen, Drafts, ProbsHere, ProbsWanted, Verdict
from wire.virtual import run_virtual

from .engine import Target
from .strategies import WHOLE, made, mutated

SAMPLING = Sampling(seed=1, method="rejection")

_FLOATS = st.lists(st.sampled_from([1.0, 0.5, 0.25, 0.125, 0.0, -0.5, 2.0, float("nan"), float("inf")]), max_size=6)
_PROBS = _FLOATS.map(lambda each: np.array(each, "<f4").tobytes())
_IDS = st.lists(st.integers(-1, VOCAB + 1), max_size=6).map(encode_ids)
_SOUND = [
    (True, encode_ids([1, 3]) + np.array([0.75, 0.25], "<f4").tobytes()),
    (True, encode_ids([1]) + np.array([1.0], "<f4").tobytes()),
    (False, np.array([0.25] * 4, "<f4").tobytes()),
    (False, np.array([0.5, 0.5], "<f4").tobytes()),
]
_BULK = st.sampled_from([data for _, data in _SOUND]) | st.tuples(_IDS, _PROBS).map(b"".join)
_WEIGHED = st.lists(st.tuples(st.integers(0, VOCAB), st.sampled_from([1.0, 0.25, 0.5, 0.0, 1.5])), max_size=4).map(
    lambda pairs: packed_weighed([token for token, _ in pairs], [weight for _, weight in pairs], VOCAB)
)
_DRAFTS = made(Drafts, position=st.integers(0, 20), tokens=_WEIGHED | mutated(_WEIGHED) | _PROBS)
_HERE = made(ProbsHere, position=st.integers(0, 9), entries=st.integers(0, 9), sparse=st.booleans())
_NUMBERS = st.integers(0, 5) | WHOLE.filter(lambda number: 0 <= number < 1 << 64)


def _check_words(case: tuple[Message, int, bytes]) -> None:
    message, number, data = case
    try:
        match message:
            case Drafts():
                tokens, weights = weighed_untrusted(message, number, vocab_size=VOCAB)
                assert 0 < len(tokens) == len(weights) <= MAX_DEPTH
                assert all(0 <= token < VOCAB for token in tokens)
                assert all(0 < weight <= 1 for weight in weights)
            case ProbsWanted():
                assert 0 < wanted_untrusted(message) <= MAX_POSITIONS
            case ProbsHere():
                size_bytes = probs_bytes_untrusted(message, vocab_size=VOCAB)
                assert 0 < size_bytes <= 8 * VOCAB
                _check_probs(message, data[:size_bytes].ljust(size_bytes, b"\0"))
    except ProtocolError:
        return


def _check_probs(message: ProbsHere, data: bytes) -> None:
    probs = probs_untrusted(message, data, vocab_size=VOCAB, token=1, weight=0.25)
    values = np.frombuffer(probs.probs, "<f4")
    ids = np.frombuffer(probs.ids, "<i4") if probs.ids else np.arange(len(values))
    assert len(ids) == len(values) == message.entries <= VOCAB
    assert dict(zip(ids.tolist(), values.tolist(), strict=True))[1] == 0.25
    assert abs(values.sum() - 1) <= 2 * SUM_ERROR
    assert 0 <= ids.min() <= ids.max() < VOCAB


_SAID_WELL = st.sampled_from(_SOUND).map(
    lambda sound: (ProbsHere(3, len(sound[1]) // (8 if sound[0] else 4), sound[0]), 0, sound[1])
)
WORDS = Target(
    "probability-words",
    st.tuples(_DRAFTS | made(ProbsWanted) | _HERE, _NUMBERS, _BULK) | _SAID_WELL,
    _check_words,
    (
        "roles.speculation.probs.weighed_untrusted",
        "roles.speculation.probs.wanted_untrusted",
        "roles.speculation.probs.probs_bytes_untrusted",
        "roles.speculation.probs.probs_untrusted",
    ),
    peak_bytes=64 << 10,
    weight=60,
)

# ---------------------------------------------------------------------------------------------- both sides, as a whole


def _say(connection: Connection, said: list[tuple[Message, int, bytes]]) -> None:
    for message, stream, payload in said:
        try:
            connection.send(message, generation=0, stream=stream)
            if payload:
                connection.send_bulk(memoryview(payload), generation=0, stream=stream)
        except (P2PTrainError, ValueError, TypeError):  # no message of ours, and so never on the wire
            continue


async def _drafted(said: list[tuple[Message, int, bytes]]) -> None:
    """A drafter that answers anything: a text is written to its end."""
    wrong: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: wrong.append(context))
    scene = Scene(Chain(torch.zeros(VOCAB, VOCAB)))
    drafts = packed_weighed([1, 1], [0.5, 0.5], VOCAB)  # more than the target has: half of them are rejected

    def says(stream: int, verdict: Told | None, number: int, connection: Connection) -> None:
        at = 1 if verdict is None else verdict.start + len(verdict.tokens)
        connection.send(Drafts(at, drafts), generation=number, stream=stream)

    def answers(stream: int, position: int, connection: Connection) -> None:
        def fitting(message: Message) -> Message:
            if isinstance(message, ProbsHere) and message.position < 8:
                return ProbsHere(position, message.entries, message.sparse)
            return message

        _say(connection, [(fitting(message), stream + offset, payload) for message, offset, payload in said])

    liar = Liar("liar", scene.at("liar"), says, answers)
    async with drafter_hosts([liar]):
        scene.drafters.here([liar.at])
        await asyncio.sleep(1)
        tokens, stats = await scene.write(16, SAMPLING)
        await scene.drafters.close()
    await scene.target.close()
    assert len(tokens) == 16
    assert stats["rejection"]["inexact"] <= 1
    assert not wrong, wrong


_ANSWER = st.tuples(_HERE | _DRAFTS, st.sampled_from([0, 0, 0, 1]), _BULK | st.just(b"")) | _SAID_WELL
LINKS = Target(
    "probability-links",
    st.tuples(_SAID_WELL | _ANSWER, st.lists(_ANSWER, max_size=1)).map(lambda said: [said[0], *said[1]]),
    lambda said: run_virtual(_drafted(said)),
    (
        "roles.verifier.drafter_link.DrafterLink._drafts_untrusted",
        "roles.verifier.drafter_link.DrafterLink._take_row_untrusted",
        "roles.verifier.rows.Rows.take_untrusted",
    ),
    peak_bytes=16 << 20,
    weight=8,
)

_OPENING = DraftOpen(2, 2, 40, VOCAB, TOKENIZER, 1.0, 0, 1.0, 0, "rejection", 8, 2.0)


async def _asked(said: list[tuple[Message, int, bytes]]) -> None:
    """A verifier that asks anything, beside an honest one."""
    wrong: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: wrong.append(context))
    scene = Scene(Chain(torch.zeros(VOCAB, VOCAB)))
    host = scene.host("d", Chain(torch.zeros(VOCAB, VOCAB)))
    async with drafter_hosts([host]):
        hello = local_hello(peer_id="liar", name="liar", roles=["verifier"], purpose="draft")
        connection, _ = await dial(scene.at("liar"), "d", PORT, hello, timeout_s=5)
        _say(connection, [(_OPENING, 1, encode_ids([0, 1]))])
        scene.drafters.here([host.at])
        await asyncio.sleep(1)  # drafts are made meanwhile
        _say(connection, [(ProbsWanted(2), 1, b""), *said])
        tokens, stats = await scene.write(16, SAMPLING)
        connection.abort()
        await scene.drafters.close()
    await scene.target.close()
    assert len(tokens) == 16
    assert stats["rejection"]["inexact"] == 0
    assert not wrong, wrong


_QUESTION = st.tuples(
    made(ProbsWanted, position=st.integers(0, 9)) | made(Verdict, right=st.integers(0, 3), depth=st.integers(0, 9)),
    st.sampled_from([1, 1, 1, 2]),
    st.just(b""),
)
DRAFTER = Target(
    "probability-drafters",
    st.lists(_QUESTION, max_size=4),
    lambda said: run_virtual(_asked(said)),
    ("roles.drafter.drafter.Drafter._tell_probs_untrusted",),
    peak_bytes=16 << 20,
    weight=8,
)

TARGETS = (WORDS, LINKS, DRAFTER)
