"""Whatever members and operators say, if it can be decoded at all, the seed lives and serves everybody else."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
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
from roles.seed.operator_api import ClusterRequests
from tests.fuzz.strategies import FREE, REAL, TEXT, WHOLE, made
from tests.roles.in_process import Cluster
from tests.roles.scripted import DEADLINE_S, ScriptedPeer
from wire.chain_messages import PartsHeld
from wire.codec import MESSAGE_TYPES
from wire.job_messages import CheckpointSaved, Report, StepMetrics
from wire.messages import EventNotice, Heartbeat, HeartbeatAck, Leave, Message, Response
from wire.text_messages import Serving

PROFILE = Profile.model_validate({"job": {"workers": 2, "steps": 100}, "batch": {"micro_batches": 4}})
JOB = "the job"
"""Stands for the id of the job that there is."""
FUZZ = settings(
    max_examples=30,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # a seed that was taken down takes seconds: no shrinking
)
FIGURES = st.dictionaries(
    st.sampled_from(["loss", "members", "tokens_per_s", "step_ms", "memory_bytes", "rtt_ms", "gpu_load"]), REAL
)
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "job": st.just(JOB) | TEXT,
    "step": st.integers(0, 3) | WHOLE,
    "generation": st.just(1) | WHOLE,
    "values": FIGURES,
    "stats": FIGURES,
}
"""Fields that would otherwise rarely be taken seriously."""


def likely(kind: Any) -> st.SearchStrategy[Any]:
    names = {item.name for item in dataclasses.fields(kind)}
    return made(kind, **{name: values for name, values in LIKELY.items() if name in names})


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
    [likely(kind) for kind in TOLD] + [REPORTS] * 4 + [st.sampled_from(list(MESSAGE_TYPES.values())).flatmap(likely)]
)
METHODS = sorted(ClusterRequests(*[MagicMock()] * 6).methods() | JobRequests(*[MagicMock()] * 4).methods())
PARAMS = st.dictionaries(
    st.sampled_from(["job", "name", "profile", "spec", "id", "limit", "after_step", "after_id", "port"]),
    FREE | st.sampled_from([PROFILE.to_spec(), "[" * 9000, '{"job": {"steps": 1e999}}', "tiny"]), max_size=5,
)  # fmt: skip


class FuzzedPeer(ScriptedPeer):
    async def tell(self, message: Message) -> None:
        """Say it and wait until it was heard; where that ended the connection, come back."""
        if isinstance(message, Report | StepMetrics | CheckpointSaved | EventNotice) and message.job == JOB:
            message = dataclasses.replace(message, job=self.job)
        try:
            self.say(message)
            self.say(Heartbeat(1, 1, 1, "training", {}))
            while not isinstance((await self.connection.receive(timeout_s=DEADLINE_S)).message, HeartbeatAck):
                pass
        except ValueError:
            return  # it cannot be sent: too long for a frame
        except P2PTrainError:
            await self.connection.close()
            await self.join(job=self.job, generation=1 if self.job else 0)


async def beside_a_ring(talk: Callable[[Cluster, list[FuzzedPeer]], Awaitable[None]]) -> None:
    """Two workers train beside those that talk; nothing may go wrong but what is answered or ends a connection."""
    wrong: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: wrong.append(context))
    with tempfile.TemporaryDirectory() as root:
        cluster = Cluster(Path(root), MemoryNetwork())
        await cluster.start_seed()
        job = await cluster.create(PROFILE)
        roles = {"a": "worker", "b": "worker", "verifier": "verifier", "drafter": "drafter"}
        peers = [FuzzedPeer(cluster.network, cluster.address, peer_id, (role,)) for peer_id, role in roles.items()]
        for peer in peers:
            await peer.listen()
            await peer.join()
        for peer in peers[:2]:
            await peer.assigned()
        for peer in peers[:2]:
            await peer.viewed()
        await talk(cluster, peers)
        for method in ("cluster.info", "peers.list", "jobs.list", "checkpoints.list", "events.list", "serving.list"):
            await cluster.ask(method)
        if job in [item["id"] for item in (await cluster.ask("jobs.list"))["jobs"]]:
            await cluster.job_until(job, lambda job: True)
        for peer in peers:
            await peer.close()
        await cluster.close()  # raises what ended the seed, if anything did
    assert not wrong, wrong


@FUZZ
@given(said=st.lists(st.tuples(st.integers(0, 3), SAID), min_size=1, max_size=12))
def test_no_member_takes_the_seed_down(said: list[tuple[int, Message]]) -> None:
    async def talk(cluster: Cluster, peers: list[FuzzedPeer]) -> None:
        for index, message in said:
            await peers[index].tell(message)

    asyncio.run(beside_a_ring(talk))


@FUZZ
@given(requests=st.lists(st.tuples(st.sampled_from(METHODS) | TEXT, PARAMS), min_size=1, max_size=12))
def test_no_operator_takes_the_seed_down(requests: list[tuple[str, dict[str, Any]]]) -> None:
    async def talk(cluster: Cluster, peers: list[FuzzedPeer]) -> None:
        async with cluster.operator() as client:
            for method, params in requests:
                with suppress(Refused, ValueError):  # refused, or too long for a frame
                    await client.request(method, params)

    asyncio.run(beside_a_ring(talk))
