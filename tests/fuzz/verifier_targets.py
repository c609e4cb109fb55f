"""Verifiers and their clients: questions, and what is answered to them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict

import msgpack
from hypothesis import strategies as st

from p2ptrain.compute.text import Turn
from p2ptrain.core.errors import P2PTrainError
from p2ptrain.core.serving import SamplingOptions
from p2ptrain.core.world import real_world
from p2ptrain.lab.memory import MemoryNetwork
from roles.serving.texts import TextRequest
from roles.serving.worker_peer import ClientContext
from roles.verifier.client import RemoteText, VerifierClient
from roles.verifier.server import request_untrusted
from wire import text_messages as wire
from wire.connection import Connection
from wire.handshake import local_welcome, serve
from wire.http_messages import HttpPart, HttpRequest
from wire.messages import Hello, KeepAlive, Message, Welcome
from wire.records import ServingInfo
from wire.text_messages import MOST_STOPS, MOST_TURNS

from .engine import send_if_valid, target
from .strategies import FREE, REAL, TEXT, WHOLE, made, mostly, mutated

PORT = 5000

# ----------------------------------------------------------------------------------------------------------- questions

_FEW = mostly(st.integers(0, 9), WHOLE)
_SAMPLING = st.fixed_dictionaries(
    {
        "temperature": st.none() | mostly(st.sampled_from([0.0, 0.7]), REAL),
        "top_k": st.none() | _FEW,
        "top_p": st.none() | mostly(st.just(1.0), REAL),
        "seed": _FEW,
        "logit_bias": st.lists(st.lists(_FEW, max_size=3), max_size=2),
    }
).map(lambda changed: asdict(SamplingOptions()) | changed)
_TURN = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "x" * 99]), "text": TEXT})
_ASK = st.fixed_dictionaries(
    {
        "prompt": TEXT | st.just("é€😀" * 1000),
        "turns": st.lists(_TURN.map(lambda turn: asdict(Turn("", "")) | turn), max_size=3) | st.just([{}] * 4000),
        "max_new_tokens": st.none() | _FEW,
        "sampling": mostly(_SAMPLING, TEXT),
        "stop": st.lists(TEXT, max_size=2) | st.just(["x"] * 17),
        "priority": _FEW,
        "grammar": mostly(st.just(""), TEXT),
        "logprobs": mostly(st.none(), _FEW),
    }
).map(lambda changed: asdict(TextRequest()) | changed)


@target(
    "questions",
    st.binary(max_size=20) | _ASK.map(lambda asked: msgpack.packb(asked)),
    "roles.verifier.server.request_untrusted",
    peak_bytes=40 << 20,
)
def _check_question(data: bytes) -> None:
    wish = request_untrusted(data)
    assert isinstance(wish, TextRequest)
    assert len(wish.turns) <= MOST_TURNS
    assert len(wish.stop) <= MOST_STOPS
    assert 0 <= (wish.max_new_tokens or 0) < 1 << 31


_AT = ServingInfo(id="v1/m", peer="v1", name="big one", role="verifier", host="there", port=PORT, model="m", context=64)

# --------------------------------------------------------------------------------------------------------- both of them

_NEWS = st.fixed_dictionaries(
    {},
    optional={
        "prompt_tokens": mostly(st.just(0), WHOLE),
        "left_out": mostly(st.just(0), WHOLE),
        "text": TEXT,
        "tokens": st.lists(mostly(st.just(5), WHOLE), max_size=3),
        "ended": mostly(st.sampled_from(["", "stop", "end", "length", "cancelled"]), TEXT),
        "stats": st.dictionaries(TEXT, FREE, max_size=3),
    },
)
_DATA = mutated(_NEWS.map(msgpack.packb), most=1)
_BEGUN = mostly(st.just([HttpPart(msgpack.packb({"prompt_tokens": 3}), False, 200)]), st.just([]))
_ANSWERS = st.lists(
    st.builds(HttpPart, _DATA, mostly(st.just(False), st.booleans()))
    | made(wire.StreamRefused, code=mostly(st.sampled_from(["busy", "bad-request", "protocol-error"]), TEXT))
    | made(HttpPart)
    | st.just(KeepAlive()),
    max_size=6,
)


@target(
    "verifier-clients",
    st.tuples(_BEGUN, _ANSWERS).map(lambda both: [*both[0], *both[1]]),
    "roles.verifier.client.RemoteText.take_untrusted",
    "wire.text_messages.error_untrusted",
    peak_bytes=8 << 20,
    weight=30,
)
async def _answered(said: list[Message]) -> None:
    """A client whose verifier says anything: its text ends, or an error tells why it does not."""
    network = MemoryNetwork()

    async def decide(hello: Hello, connection: Connection) -> Welcome:
        return local_welcome(peer_id="v1", name="odd", wall=0.0)

    async def odd(connection: Connection, hello: Hello) -> None:
        data = bytearray((await connection.expect(HttpRequest, timeout_s=5)).size_bytes)
        connection.post(memoryview(data), generation=0, stream=0, done=lambda: None)
        for message in said:
            send_if_valid(connection, message)
        await connection.flush(timeout_s=5)

    server = await serve(network, "there", PORT, decide=decide, serve=odd, on_problem=lambda problem, _: None)
    client = VerifierClient(ClientContext(real_world(network), "c", "c", seed_host=""), _AT)
    text: RemoteText | None = None
    try:
        async with asyncio.timeout(900):
            text = await client.write(TextRequest(prompt="abc"))
            async for piece in text:
                assert all(token >= 0 for token in piece.tokens)
            assert text.ended
            json.dumps(text.stats(), allow_nan=False)
    except P2PTrainError:
        pass  # as it should be told
    finally:
        if text is not None:
            await text.close()
        await server.close()
