"""Whatever a worker or an operator says, if it can be decoded at all, the seed lives and serves everybody else."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
import types
import typing
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from configs.schema import Profile
from p2ptrain.core.errors import P2PTrainError, Refused
from p2ptrain.lab.memory import MemoryNetwork
from roles.seed.job_requests import JobRequests
from roles.seed.operator_api import PeerRequests, RecordRequests
from tests.roles.in_process import HOST, Cluster
from wire.chain_messages import PartsHeld
from wire.codec import MESSAGE_TYPES
from wire.connection import Connection
from wire.handshake import PeerServer, dial, local_hello, local_welcome, serve
from wire.job_messages import Assign, CheckpointSaved, Report, StepMetrics, ViewAnnounced
from wire.messages import EventNotice, Heartbeat, HeartbeatAck, Hello, Leave, Message, Response, Welcome
from wire.text_messages import Serving

DEADLINE_S = 10.0
PROFILE = Profile.model_validate({"job": {"workers": 2, "steps": 100}, "batch": {"micro_batches": 4}})
JOB = "the job"
"""Stands for the id of the job that there is."""
FUZZ = settings(
    max_examples=30,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # a seed that was taken down takes seconds: no shrinking
)

WHOLE = st.sampled_from([0, 1, 2, 3, 50, 100, 101, 2**31, 2**53, 2**53 + 1, 2**63, 2**64 - 1, -1, -(2**63)])
REAL = st.floats() | st.sampled_from([0.0, 1.0, 1e308, -1e308, 2.0**63, float("nan"), float("inf")])
TEXT = st.text(max_size=20) | st.sampled_from(
    [JOB, "", "a", "first", "held", "ready", "broken", "training", "healed", "done", "failed", "\x00", "x" * 20000,
     "0" * 32, f"{1:032x}", "c0ffee", "loss", "members", "tokens_per_s", "step_ms", "memory_bytes"]
)  # fmt: skip
FREE = st.recursive(
    st.none() | st.booleans() | WHOLE | REAL | TEXT, lambda inner: st.lists(inner, max_size=3), max_leaves=5
)
BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    int: WHOLE,
    float: REAL,
    str: TEXT,
    bool: st.booleans(),
    bytes: st.binary(),
}

METRICS = ["loss", "members", "tokens_per_s", "step_ms", "memory_bytes", "rtt_ms", "gpu_load"]
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "job": st.just(JOB) | TEXT,
    "step": st.integers(0, 3) | WHOLE,
    "generation": st.just(1) | WHOLE,
    "values": st.dictionaries(st.sampled_from(METRICS), REAL),
    "stats": st.dictionaries(st.sampled_from(METRICS), REAL),
}
"""Fields that would otherwise rarely be taken seriously."""


def of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of an annotation of ``wire.messages``."""
    if hint is Any:
        return FREE
    if hint is types.NoneType:
        return st.none()
    if isinstance(hint, types.UnionType):
        return st.one_of([of(arm) for arm in typing.get_args(hint)])
    if dataclasses.is_dataclass(hint):
        return made(hint)
    args = typing.get_args(hint)
    if typing.get_origin(hint) in (list, tuple):
        return st.lists(of(args[0]), max_size=3).map(typing.get_origin(hint))
    if typing.get_origin(hint) is dict:
        return st.dictionaries(TEXT.filter(lambda text: len(text) < 100), of(args[1]), max_size=6)
    return BY_TYPE[hint]


def made(kind: Any) -> st.SearchStrategy[Any]:
    told = {item.name for item in dataclasses.fields(kind)}
    hints = {name: hint for name, hint in typing.get_type_hints(kind).items() if name in told}
    return st.builds(kind, **{name: LIKELY[name] if name in LIKELY else of(hint) for name, hint in hints.items()})


TOLD = [Heartbeat, Report, Report, Report, StepMetrics, StepMetrics, CheckpointSaved, EventNotice, Leave, Response,
        PartsHeld, Serving]  # fmt: skip
"""What members say; any other message but seldom."""
REPORTS = st.builds(
    lambda status, generation, applied, ahead: Report(JOB, generation, status, applied, applied + ahead,
        f"{applied:032x}", f"{applied + 1:032x}" if ahead else "", corpus="c0ffee", suspect="b"),
    st.sampled_from(["held", "ready", "broken", "training", "healed", "done", "failed"]), st.integers(0, 3),
    st.integers(0, 100), st.integers(0, 1),
)  # fmt: skip
SAID = st.one_of(
    [made(kind) for kind in TOLD] + [REPORTS] * 4 + [st.sampled_from(list(MESSAGE_TYPES.values())).flatmap(made)]
)
REQUESTS = PeerRequests(*[MagicMock()] * 6), JobRequests(*[MagicMock()] * 4), RecordRequests(*[MagicMock()] * 3)
METHODS = [method for requests in REQUESTS for method in requests.methods()]
PARAMS = st.dictionaries(
    st.sampled_from(["job", "name", "profile", "spec", "id", "limit", "after_step", "after_id", "port"]),
    FREE | st.sampled_from([PROFILE.to_spec(), "[" * 9000, '{"job": {"steps": 1e999}}', "first"]), max_size=5,
)  # fmt: skip


class Peer:
    """A member as far as the seed can tell: it is reached back, and says what it is told to say."""

    def __init__(self, cluster: Cluster, peer_id: str, role: str = "worker") -> None:
        self.cluster, self.id, self.role, self.job = cluster, peer_id, role, ""
        self.server: PeerServer
        self.connection: Connection

    async def join(self) -> None:
        async def decide(hello: Hello, connection: Connection) -> Welcome:
            return local_welcome(peer_id=self.id, name=self.id, wall=0.0)

        async def hang_up(connection: Connection, hello: Hello) -> None: ...

        def ignore(problem: P2PTrainError, address: tuple[str, int]) -> None: ...

        network = self.cluster.network
        self.server = await serve(network, HOST, 0, decide=decide, serve=hang_up, on_problem=ignore)
        await self.connect()

    async def connect(self) -> None:
        port, generation = self.server.address[1], 1 if self.job else 0
        hello = local_hello(peer_id=self.id, name=self.id, roles=[self.role], purpose="peer", job=self.job,
                            generation=generation, port=port)  # fmt: skip
        network = self.cluster.network
        self.connection, _ = await dial(network, *self.cluster.address, hello, timeout_s=DEADLINE_S)

    async def ready(self) -> None:
        self.job = (await self.connection.expect(Assign, timeout_s=DEADLINE_S)).job
        self.connection.send(Report(self.job, 0, "ready", 0, 0, "0" * 32, corpus="c0ffee"))

    async def say(self, message: Message) -> None:
        """Say it and wait until it was heard; where that ended the connection, come back."""
        if isinstance(message, Report | StepMetrics | CheckpointSaved | EventNotice) and message.job == JOB:
            message = dataclasses.replace(message, job=self.job)
        try:
            self.connection.send(message)
            self.connection.send(Heartbeat(1, 1, 1, "training", {}))
            while not isinstance((await self.connection.receive(timeout_s=DEADLINE_S)).message, HeartbeatAck):
                pass
        except ValueError:
            return  # it cannot be sent: too long for a frame
        except P2PTrainError:
            await self.connection.close()
            await self.connect()

    async def close(self) -> None:
        await self.connection.close()
        await self.server.close()


async def beside_a_ring(talk: Callable[[Cluster, list[Peer]], Awaitable[None]]) -> None:
    """Run ``talk`` where two workers train; nothing may go wrong but what is answered or ends that connection."""
    wrong: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: wrong.append(context))
    with tempfile.TemporaryDirectory() as root:
        cluster = Cluster(Path(root), MemoryNetwork())
        await cluster.start_seed()
        job = await cluster.create(PROFILE)
        peers = [Peer(cluster, peer_id) for peer_id in ("a", "b")]
        for peer in peers:
            await peer.join()
            await peer.ready()
        for peer in peers:
            while not isinstance((await peer.connection.receive(timeout_s=DEADLINE_S)).message, ViewAnnounced):
                pass
        others = [Peer(cluster, role, role) for role in ("verifier", "drafter")]
        for peer in others:
            await peer.join()
        await talk(cluster, [*peers, *others])
        for method in ("cluster.info", "peers.list", "jobs.list", "checkpoints.list", "events.list", "serving.list"):
            await cluster.ask(method)
        known = [item["id"] for item in (await cluster.ask("jobs.list"))["jobs"]]
        if job in known:
            await cluster.job_until(job, lambda job: True)
        for peer in [*peers, *others]:
            await peer.close()
        await cluster.close()  # raises what ended the seed, if anything did
    assert not wrong, wrong


@FUZZ
@given(said=st.lists(st.tuples(st.integers(0, 3), SAID), min_size=1, max_size=12))
def test_no_member_takes_the_seed_down(said: list[tuple[int, Message]]) -> None:
    async def talk(cluster: Cluster, peers: list[Peer]) -> None:
        for index, message in said:
            await peers[index].say(message)

    asyncio.run(beside_a_ring(talk))


@FUZZ
@given(asked=st.lists(st.tuples(st.sampled_from(METHODS) | TEXT, PARAMS), min_size=1, max_size=12))
def test_no_operator_takes_the_seed_down(asked: list[tuple[str, dict[str, Any]]]) -> None:
    async def talk(cluster: Cluster, peers: list[Peer]) -> None:
        async with cluster.operator() as client:
            for method, params in asked:
                with suppress(Refused, ValueError):  # refused, or too long for a frame
                    await client.request(method, params)

    asyncio.run(beside_a_ring(talk))
