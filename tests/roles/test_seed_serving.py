"""What the seed keeps of verifiers and drafters: checked, told to verifiers, and gone with the link."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import MagicMock

import pytest

from p2ptrain.core.errors import P2PTrainError, ProtocolError, Refused
from roles.seed.operator_api import planned
from roles.seed.peers import Link
from roles.seed.serving import Services, info_of
from tests.roles.in_process import HOST, Cluster
from tests.roles.test_planned import PROFILE, SHAPE
from wire.chain_messages import PartsHeld
from wire.connection import Connection
from wire.handshake import RefusalCode, dial, local_hello, local_welcome, serve
from wire.job_messages import CheckpointSaved, LedgerRows, Report, StepMetrics
from wire.messages import EventNotice, Hello, Message, Welcome
from wire.records import ServingInfo
from wire.schema import instance_untrusted
from wire.text_messages import MAX_DRAFTERS, DraftersHere, Serving

DEADLINE_S = 10.0
SERVING = Serving("small", 100, 0, "ab", "", 0)


class Sent:
    """Stands for a connection: what it was given to send."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def send(self, message: Message) -> None:
        self.messages.append(message)

    @property
    def told(self) -> list[list[tuple[str, str]]]:
        """Of each ``DraftersHere``, ids and hosts."""
        here = [message for message in self.messages if isinstance(message, DraftersHere)]
        return [[(item.peer_id, item.host) for item in message.drafters] for message in here]


def link(peer_id: str, role: str, host: str = "10.0.0.1") -> tuple[Link, Sent]:
    hello = local_hello(peer_id=peer_id, name=f"name-{peer_id}", roles=[role], purpose="peer", port=7000)
    sent: Any = Sent()
    return Link(sent, hello, host, 7000, 1.0, 0.0, 0.0, MagicMock()), sent


def test_what_is_served_is_kept_as_it_was_told() -> None:
    made = Serving("big", 50257, 1024, "ab12", "10.0.0.1:8000", 3, {"alpha": 0.5, "tokens_per_s": 3}, ["d1", "d2"],
                   [0.5, -1], [10, 20], [1, 0])  # fmt: skip
    info = info_of(link("v1", "verifier")[0], made)
    assert info == ServingInfo(
        "v1", "name-v1", "verifier", "10.0.0.1", 7000, "big", 50257, 1024, "ab12", "10.0.0.1:8000", 3,
        {"alpha": 0.5, "tokens_per_s": 3.0}, ["d1", "d2"], [0.5, -1.0], [10.0, 20.0], [1.0, 0.0],
    )  # fmt: skip
    told, fields = dataclasses.asdict(made), info.to_map()
    assert {name: fields[name] for name in told} == told  # nothing of what a member says is left out


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": -1},
        {"vocab_size": 2**32},
        {"context": -1},
        {"context": 2**54},
        {"sessions": -1},
        {"sessions": 2**54},
        {"tokenizer": "a b"},
        {"tokenizer": "a" * 129},
        {"tokenizer": "\x1b"},
        {"weights": "a b"},
        {"stats": {"alpha": math.nan}},
        {"stats": {"alpha": math.inf}},
        {"stats": {"alpha": 1e300}},
        {"stats": {"": 1.0}},
        {"stats": {"Alpha": 1.0}},
        {"stats": {"a" * 41: 1.0}},
        {"stats": {f"x{index}": 1.0 for index in range(65)}},
        {"drafters": ["no id"]},
        {"drafters": [f"d{index}" for index in range(MAX_DRAFTERS + 1)]},
        {"drafters": ["d1"], "drafter_alpha": [0.5, 0.5]},
        {"drafters": ["d1"], "drafter_latency_ms": [math.nan]},
        {"drafter_share": [0.5]},
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        instance_untrusted(Serving, dataclasses.asdict(SERVING) | changes)


def test_texts_are_clipped() -> None:
    info = info_of(link("v1", "verifier")[0], dataclasses.replace(SERVING, model="m\n" * 99, http="h" * 999))
    assert info.model.isprintable()
    assert (len(info.model.encode()), len(info.http)) == (64, 253)


def test_verifiers_are_told_when_it_changes_and_not_when_it_does_not() -> None:
    links: dict[str, Link] = {}
    touched: list[str] = []
    services = Services(links, lambda *ids: touched.extend(ids))
    near, far = link("v1", "verifier", "127.0.0.1"), link("v2", "verifier")
    worker = link("w1", "worker")
    for each, _ in (near, far, worker):
        links[each.id] = each
        services.joined(each)
    drafter, _ = link("d1", "drafter", "127.0.0.1")
    links["d1"] = drafter
    services.joined(drafter)
    assert (near[1].told, far[1].told, worker[1].messages) == ([[]], [[]], [])
    services.told(drafter, SERVING)
    services.told(drafter, SERVING)
    services.told(drafter, dataclasses.replace(SERVING, sessions=2, stats={"alpha": 0.5}))
    assert near[1].told == [[], [("d1", "127.0.0.1")]]
    assert far[1].told == [[], [("d1", "")]]  # the seed's machine
    assert touched == ["d1", "d1"]
    services.told(near[0], dataclasses.replace(SERVING, model="big"))
    assert [info.id for info in services.infos()] == ["v1", "d1"]
    del links["d1"]
    services.gone(drafter)
    assert near[1].told[2:] == [[]]
    assert (services.info("d1"), services.infos()[0].id) == (None, "v1")
    assert worker[1].messages == []


@pytest.mark.parametrize("first", ["drafter", "verifier"])
def test_who_lends_a_drafter_hears_that_a_verifier_has_another_tokenizer(first: str) -> None:
    links, sent = dict[str, Link](), dict[str, Sent]()
    services = Services(links, lambda *ids: None)
    for peer_id, role in (("d1", "drafter"), ("d2", "drafter"), ("n1", "drafter"), ("v1", "verifier")):
        links[peer_id], sent[peer_id] = link(peer_id, role)
    said = {
        "d1": SERVING,
        "d2": dataclasses.replace(SERVING, model="small", tokenizer="another"),
        "n1": dataclasses.replace(SERVING, model="n-gram", tokenizer=""),
        "v1": dataclasses.replace(SERVING, model="big"),
    }
    for _ in range(3):
        for peer_id in sorted(said, reverse=first == "verifier"):
            services.told(links[peer_id], said[peer_id])
    notices = {each: [one for one in sent[each].messages if isinstance(one, EventNotice)] for each in sent}
    assert [len(notices[each]) for each in ("d1", "d2", "n1", "v1")] == [0, 1, 0, 0]
    assert notices["d2"][0].text == (
        "name-v1 writes with big, which has another tokenizer than small: "
        "nothing is drafted for it; draft with a model of the same family"
    )


def test_another_model_takes_another_link() -> None:
    links = {"d1": link("d1", "drafter")[0]}
    services = Services(links, lambda *ids: None)
    services.told(links["d1"], SERVING)
    with pytest.raises(ProtocolError, match="now it is another model"):
        services.told(links["d1"], dataclasses.replace(SERVING, model="other"))
    with pytest.raises(ProtocolError, match="now it is another model"):
        services.told(links["d1"], dataclasses.replace(SERVING, weights="12"))


def test_no_more_drafters_are_told_of_than_a_verifier_takes() -> None:
    links: dict[str, Link] = {}
    services = Services(links, lambda *ids: None)
    verifier, sent = link("v1", "verifier")
    links["v1"] = verifier
    ids = [f"d{index}" for index in range(MAX_DRAFTERS + 3, 0, -1)]  # whoever is called first came last
    for at, peer_id in enumerate(ids):
        links[peer_id] = dataclasses.replace(link(peer_id, "drafter")[0], joined_at=float(at))
        services.told(links[peer_id], SERVING)
    assert [peer_id for peer_id, _ in sent.told[-1]] == ids[:MAX_DRAFTERS], "those that were here first"


async def test_a_plan_is_of_workers_alone() -> None:
    links = {"v1": link("v1", "verifier")[0], "d1": link("d1", "drafter")[0]}
    with pytest.raises(Refused, match=r"begins with 2 workers, and 0 of them are free$"):
        await planned(PROFILE, SHAPE, links, MagicMock())


# ------------------------------------------------------------------------------------------------------------ the seed


@asynccontextmanager
async def member(cluster: Cluster, peer_id: str, *roles: str) -> AsyncIterator[Connection]:
    """A member as far as the seed can tell."""

    async def decide(hello: Hello, connection: Connection) -> Welcome:
        return local_welcome(peer_id=peer_id, name=peer_id, wall=0.0)

    async def hang_up(connection: Connection, hello: Hello) -> None: ...

    def ignore(problem: P2PTrainError, address: tuple[str, int]) -> None: ...

    server = await serve(cluster.network, HOST, 0, decide=decide, serve=hang_up, on_problem=ignore)
    hello = local_hello(peer_id=peer_id, name=peer_id, roles=roles, purpose="peer", port=server.address[1])
    try:
        connection, _ = await dial(cluster.network, *cluster.address, hello, timeout_s=DEADLINE_S)
        try:
            yield connection
        finally:
            await connection.close()
    finally:
        await server.close()


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
        ("verifier", LedgerRows("j", "", [])),
        ("verifier", DraftersHere([])),
    ],
)
async def test_nobody_says_what_is_for_others_to_say(cluster: Cluster, role: str, message: Message) -> None:
    async with member(cluster, "x1", role) as connection:
        connection.send(message)
        async with asyncio.timeout(DEADLINE_S):
            await connection.closed.wait()
        problem = connection.close_cause
        assert isinstance(problem, Refused)
        assert problem.code == RefusalCode.PROTOCOL
