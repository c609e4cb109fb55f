"""Split models, the client's side: what workers answer, and what their stages say of its sessions."""

from __future__ import annotations

import asyncio
import random
import tempfile
from dataclasses import asdict, replace
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import P2PTrainError
from p2ptrain.core.footprint import ModelSizes
from p2ptrain.core.serving import Sampling, token_logprobs
from p2ptrain.core.threads import LoopThreads
from p2ptrain.core.world import LoopClock, World
from p2ptrain.lab.memory import MemoryNetwork
from roles.serving.chain import StageChain
from roles.serving.chain_session import _position_untrusted, samples_untrusted
from roles.serving.model import Decoding
from roles.serving.worker_peer import ClientContext, WorkerAddress
from roles.serving.worker_pool import ModelReference, WorkerPool, model_of_directory
from tests.roles.stage_doubles import PORT, Stage
from tests.roles.stage_stand_in import WIDTH, StandIns, stand_in_config, write_model
from wire.chain_messages import MAX_REQUEST_POSITIONS, ChainBroken, PartLoading, Sampled, SampledBatch
from wire.job_messages import MAX_STAGES
from wire.messages import KeepAlive, Message, Request, Response
from wire.schema import instance_untrusted

from .engine import send_if_valid, target
from .strategies import FREE, TEXT, WHOLE, made

CONFIG = stand_in_config(layers=3, rows=1)
VOCAB = 97


@target(
    "chain-positions",
    st.fixed_dictionaries({}, optional={"position": FREE | WHOLE}),
    "roles.serving.chain_session._position_untrusted",
)
def _check_position(answer: dict[str, Any]) -> None:
    assert _position_untrusted(answer) >= 0


# ------------------------------------------------------------------------------------------------- a session's answers

_TOKENS = st.lists(st.integers(-1, VOCAB), max_size=4).map(
    lambda ids: b"".join(each.to_bytes(4, "little", signed=True) for each in ids)
)
_SPENT = st.lists(st.integers(0, 1000), max_size=4) | st.lists(WHOLE, max_size=3) | st.just([0] * 65)
_SMALL = st.integers(-1, 6)
_ATTEMPT = st.sampled_from([1, 1, 1, 2, 2, 0, -1, 3])  # what is not of the one that counts is not looked at
_ENDED = st.builds(
    Sampled,
    st.just("s"),
    _ATTEMPT,
    _SMALL,
    _TOKENS | st.binary(max_size=9) | st.just(bytes(4 * MAX_REQUEST_POSITIONS + 4)),
    _SPENT,
    st.binary(max_size=9),
    st.binary(max_size=17) | st.just(bytes(16)),
)


@target("chain-works", _ENDED, "roles.serving.chain_session.samples_untrusted")
def _check_ended(message: Sampled) -> None:
    found = samples_untrusted(instance_untrusted(Sampled, asdict(message)), VOCAB)
    assert len(found.spent_us) <= MAX_STAGES
    assert all(0 <= token < VOCAB for token in found.tokens)
    assert len(found.scores) % 4 == 0
    rows = len(found.tops) // 8
    for each in token_logprobs(range(rows), bytes(4 * rows), found.tops):
        assert all(0 <= token < VOCAB and isfinite(score) for token, score in each.top)


# ------------------------------------------------------------------------------------------------------ a whole client

_BROKEN = st.builds(
    ChainBroken, st.just("s"), _ATTEMPT, _SMALL, st.sampled_from(["next-stage", "failed", "", "x" * 99]), TEXT, TEXT
)
_LOADING = st.builds(PartLoading, _SMALL, _SMALL) | made(PartLoading)
_SAID = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.lists(_ENDED, max_size=3).map(SampledBatch)
        | _BROKEN
        | _LOADING
        | made(Response)
        | made(Request)
        | made(SampledBatch)
        | st.just(KeepAlive()),
    ),
    max_size=8,
)


@cache
def _model() -> tuple[Path, tempfile.TemporaryDirectory[str]]:
    kept = tempfile.TemporaryDirectory(prefix="p2ptrain-fuzz-")
    return write_model(Path(kept.name) / "model", CONFIG), kept


@target(
    "chain-clients",
    _SAID | st.just([(0, ChainBroken("s", 1, 0, "failed", "it failed", ""))]),
    "roles.serving.worker_peer.WorkerPeer._take_untrusted",
    "roles.serving.chain_session.ChainSession._sender_untrusted",
    "roles.serving.chain_session.ChainSession.take_untrusted",
    peak_bytes=16 << 20,
    weight=10,
)
async def _talked(said: list[tuple[int, Message]]) -> None:
    """Two stages of a session lie between its tokens. It goes on, or ends with an error, and nothing else breaks."""
    directory, kept = _model()
    network = MemoryNetwork()
    stages = [Stage(name, network.at(name), Path(kept.name) / name, StandIns()) for name in ("w0", "w1", "w2")]
    for stage in stages:
        await stage.start()
    world = World(LoopClock(), network.at("client"), RealDisk(), random.Random(1), LoopThreads())
    context = ClientContext(world, "client", "client", "seed")
    replica = await WorkerPool.connect(
        context, [WorkerAddress(stage.name, stage.name, stage.name, PORT) for stage in stages]
    )
    try:
        async with asyncio.timeout(900):
            await _generated(replica, await model_of_directory(context, directory), stages, said)
    finally:
        await replica.close()
        for stage in stages:
            await stage.stop()


async def _generated(
    replica: WorkerPool, model: ModelReference, stages: list[Stage], said: list[tuple[int, Message]]
) -> None:
    sizes = ModelSizes((32,) * 3, (4 * WIDTH,) * 3, 4 * WIDTH * VOCAB, 4 * WIDTH * (VOCAB + 1))
    plan = await replica.plan(model, sizes, positions=64, activation_bytes=4 * WIDTH, dtype="fp32", stages=2)
    chain = await StageChain.load(replica, model, plan)
    try:
        session = await chain.open(positions=9, sampling=Sampling(temperature=0), sample_from=3)
        decoding, left = Decoding([1, 2, 3], max_new_tokens=6), list(said)
        while not decoding.ended:
            result = await session.append(decoding.next_pass())
            assert all(0 <= token < VOCAB for token in result.tokens)
            decoding.take_samples(result.tokens, result.took_s, 0.0)
            for index, message in left[:3]:
                _say(stages[index], session.id, message)
            del left[:3]
            await asyncio.sleep(0.01)
    except P2PTrainError:
        return  # nobody is left to take a liar's place, or the works make no sense
    finally:
        await chain.close()


def _say(stage: Stage, session: str, message: Message) -> None:
    """To each client of a worker, of its session where it is of one."""
    if isinstance(message, SampledBatch):
        message = SampledBatch([replace(result, session=session) for result in message.results])
    elif isinstance(message, ChainBroken):
        message = replace(message, session=session)
    for client in stage.stages._clients:
        send_if_valid(client.line.connection, message)
