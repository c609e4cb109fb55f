"""What the seed keeps of verifiers, drafters and held parts: checked, told to others, and gone with the link."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from contextlib import AbstractAsyncContextManager
from typing import Any
from unittest.mock import MagicMock

import pytest

from p2ptrain.core.errors import ProtocolError, Refused
from roles.seed.peers import ConnectedPeer, Services, part_infos_of
from tests.roles.in_process import Cluster
from tests.roles.scripted import DEADLINE_S, ScriptedPeer, scripted_peer
from wire.chain_messages import HeldPart, PartsHeld
from wire.handshake import local_hello
from wire.job_messages import CheckpointSaved, LedgerRow, LedgerRows, Report, StepMetrics
from wire.messages import Leave, Message, RefusalCode
from wire.records import PartInfo, ServingInfo
from wire.schema import instance_untrusted
from wire.text_messages import MAX_DRAFTERS, MOST_MODELS, DrafterList, Serving

SERVING = Serving("small", 100, 0, "ab", "", 0)


class Sent:
    """Stands for a connection: what it was given to send."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def send(self, message: Message) -> None:
        self.messages.append(message)

    @property
    def reported(self) -> list[list[tuple[str, str]]]:
        """Of each ``DrafterList``, ids and hosts."""
        here = [message for message in self.messages if isinstance(message, DrafterList)]
        return [[(item.peer_id, item.host) for item in message.drafters] for message in here]


def link(peer_id: str, role: str, host: str = "10.0.0.1") -> tuple[ConnectedPeer, Sent]:
    hello = local_hello(peer_id=peer_id, name=f"name-{peer_id}", roles=[role], purpose="peer", port=7000)
    sent: Any = Sent()
    return ConnectedPeer(sent, hello, host, 7000, 1.0, 0.0, MagicMock()), sent


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": -1},
        {"context": -1},
        {"tokenizer": "a b"},
        {"tokenizer": "a" * 129},
        {"stats": {"alpha": math.nan}},
        {"stats": {"Alpha": 1.0}},
        {"stats": {"a" * 41: 1.0}},
        {"stats": {f"x{index}": 1.0 for index in range(65)}},
        {"drafters": [{"peer": "no id"}]},
        {"drafters": [{"peer": f"d{index}"} for index in range(MAX_DRAFTERS + 1)]},
        {"drafters": [{"peer": "d1", "latency_ms": math.nan}]},
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        instance_untrusted(Serving, dataclasses.asdict(SERVING) | changes)


def test_no_more_drafters_are_told_of_than_a_verifier_takes() -> None:
    links: dict[str, ConnectedPeer] = {}
    services = Services(links, lambda *ids: None)
    verifier, sent = link("v1", "verifier")
    links["v1"] = verifier
    ids = [f"d{index}" for index in range(MAX_DRAFTERS + 3, 0, -1)]  # whoever is called first came last
    for at, peer_id in enumerate(ids):
        links[peer_id] = dataclasses.replace(link(peer_id, "drafter")[0], joined_at=float(at))
        services.reported(links[peer_id], SERVING)
    assert [peer_id for peer_id, _ in sent.reported[-1]] == ids[:MAX_DRAFTERS], "those that were here first"


def test_facts_of_a_model_come_when_it_is_loaded_and_stay() -> None:
    links: dict[str, ConnectedPeer] = {}
    services = Services(links, lambda *ids: None)
    links["v1"], _ = link("v1", "verifier")
    links["d1"], drafter = link("d1", "drafter")
    services.reported(links["d1"], dataclasses.replace(SERVING, tokenizer="other"))
    services.reported(links["v1"], Serving("big", loaded=0.0))
    services.reported(links["v1"], Serving("big", loaded=0.5))
    assert drafter.messages == [], "its tokenizer is not known yet"
    services.reported(links["v1"], Serving("big", 100, 0, "ab"))
    assert [type(message).__name__ for message in drafter.messages] == ["EventNotice"]
    with pytest.raises(ProtocolError, match="changed its model"):
        services.reported(links["v1"], Serving("big", 101, 0, "ab"))


# ------------------------------------------------------------------------------------------------------------ the seed


def member(cluster: Cluster, peer_id: str, *roles: str) -> AbstractAsyncContextManager[ScriptedPeer]:
    return scripted_peer(cluster.network, cluster.address, peer_id, *roles)


async def test_verifier_may_have_several_models(cluster: Cluster) -> None:
    models = [dataclasses.replace(SERVING, model=f"model {number}", sessions=1) for number in range(MOST_MODELS)]
    async with member(cluster, "v1", "verifier") as verifier, member(cluster, "d1", "drafter") as drafter:
        await verifier.hear(DrafterList)
        for message in models:
            await verifier.say_and_wait(message)
        await drafter.say_and_wait(SERVING)
        found = [ServingInfo.from_map_untrusted(item) for item in (await cluster.ask("serving.list"))["serving"]]
        ids = [(f"v1/{each.model}", "v1", each.model) for each in models]
        assert [(info.id, info.peer, info.model) for info in found] == [*ids, ("d1/small", "d1", "small")]
        shown = {peer["id"]: peer for peer in (await cluster.ask("peers.list"))["peers"]}
        assert (shown["v1"]["model"][:16], shown["v1"]["sessions"]) == ("model 0, model 1", MOST_MODELS)
        for peer in (verifier, drafter):
            peer.say(dataclasses.replace(SERVING, model="one more"))
            async with asyncio.timeout(DEADLINE_S):
                await peer.connection.closed.wait()
            assert isinstance(peer.connection.close_cause, Refused)
            assert peer.connection.close_cause.code == RefusalCode.PROTOCOL


@pytest.mark.parametrize("roles", [(), ("operator",), ("seed",), ("worker", "verifier"), ("baker",)])
async def test_a_peer_is_one_of_three(cluster: Cluster, roles: tuple[str, ...]) -> None:
    with pytest.raises(Refused) as caught:
        async with member(cluster, "x1", *roles):
            pass
    assert (caught.value.code, "--role" in caught.value.remedy) == ("role", True)


@pytest.mark.parametrize(
    ("role", "message"),
    [
        ("worker", SERVING),
        ("drafter", PartsHeld([])),
        ("verifier", Report("j", 0, "ready", 0, 0, "0" * 32)),
        ("drafter", StepMetrics("j", 0, 1, {})),
        ("drafter", CheckpointSaved("j", 1, "/x", "d", 1)),
        ("verifier", LedgerRows("j", "0" * 32, [LedgerRow(1, 1, bytes(16), b"")])),
        ("verifier", DrafterList([])),
    ],
)
async def test_nobody_says_what_is_for_others_to_say(cluster: Cluster, role: str, message: Message) -> None:
    async with member(cluster, "x1", role) as peer:
        peer.say(message)
        async with asyncio.timeout(DEADLINE_S):
            await peer.connection.closed.wait()
        problem = peer.connection.close_cause
        assert isinstance(problem, Refused)
        assert problem.code == RefusalCode.PROTOCOL


# ------------------------------------------------------------------------------------------------- the parts of models

PART = HeldPart("p1", "ab" * 16, "llama", 0, 12, 32, "bfloat16", 900, 100, 4000, 2, 4.5, 0.75, 31.0, 4096.0, "b2")


def part(**changes: Any) -> HeldPart:
    return dataclasses.replace(PART, **changes)


def held(*parts: HeldPart) -> dict[str, PartInfo]:
    message = PartsHeld(list(parts))
    return part_infos_of("a1", "laptop", instance_untrusted(PartsHeld, dataclasses.asdict(message)))


@pytest.mark.parametrize(
    "changes",
    [
        {"start": -1},
        {"stop": 33},
        {"layers": 4097, "stop": 4097},
        {"weights_bytes": -1},
        {"compute_ms": math.nan},
        {"busy": math.nan},
        {"out_position_bytes": -math.inf},
        {"part": "a/b"},
        {"part": "x" * 129},
        {"model": ""},
        {"model": "\x1b[2J"},
        {"next": "no id"},
    ],
)
def test_a_part_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        held(part(**changes))


def test_no_worker_holds_a_part_twice_or_more_than_its_number() -> None:
    with pytest.raises(ProtocolError, match="twice"):
        held(PART, part(start=1))
    most = [part(part=f"p{index}") for index in range(17)]
    assert len(held(*most[:-1])) == 16
    with pytest.raises(ProtocolError, match="17 long"):
        held(*most)


async def test_operators_list_what_workers_hold_until_they_are_gone(cluster: Cluster) -> None:
    async with member(cluster, "a1", "worker") as one, member(cluster, "b2", "worker") as two:
        assert await cluster.ask("parts.list") == {"parts": [], "total": 0}
        await one.say_and_wait(PartsHeld([PART]))
        await two.say_and_wait(PartsHeld([part(start=12, stop=32, next="")]))
        answer = await cluster.ask("parts.list")
        parts = [PartInfo.from_map_untrusted(item) for item in answer["parts"]]
        assert [(item.peer, item.peer_name, item.start, item.stop) for item in parts] == [
            ("a1", "a1", 0, 12),
            ("b2", "b2", 12, 32),
        ]
        assert answer["total"] == 2
        async with cluster.operator() as client, asyncio.timeout(DEADLINE_S):
            await client.request("subscribe", {})
            updates = client.updates()
            seen: list[tuple[str, str]] = []

            async def until(topic: str, item_id: str) -> dict[str, Any]:
                async for update in updates:
                    for item in update.items:
                        if update.topic.startswith("parts"):
                            seen.append((update.topic, item["id"]))
                        if (update.topic, item.get("id")) == (topic, item_id):
                            return dict(item)
                raise AssertionError("the seed ended the updates")

            await until("parts", "b2/p1")
            assert seen == [("parts", "a1/p1"), ("parts", "b2/p1")]  # all that is held, at the beginning
            await one.say_and_wait(PartsHeld([part(tokens_per_s=77.0), part(part="p2", model="other")]))
            assert (await until("parts", "a1/p1"))["tokens_per_s"] == 77.0
            await one.say_and_wait(PartsHeld([part(part="p2", model="other")]))
            await until("parts-gone", "a1/p1")
            one.say(Leave("enough"))
            await until("parts-gone", "a1/p2")
            two.connection.abort()  # it dies
            await until("parts-gone", "b2/p1")
        assert await cluster.ask("parts.list") == {"parts": [], "total": 0}
