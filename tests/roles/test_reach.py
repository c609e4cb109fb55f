"""Members that nobody can dial take part: their connections are circuits, which the seed arranges."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Profile
from p2ptrain.core.disk import RealDisk
from p2ptrain.core.world import LoopClock, World
from p2ptrain.lab.memory import MemoryNetwork
from ring.token import balance_counts
from roles.circuits import MADE, OPEN
from roles.member import ServingMember
from roles.seed.run import serving_seed
from tests.roles.in_process import Cluster, Gate
from tests.roles.scripted import DEADLINE_S, ScriptedPeer
from wire.circuits import CircuitNetwork
from wire.messages import (
    ANSWERER,
    CALLER,
    PUNCHED,
    RELAYED,
    REVERSED,
    Circuit,
    CircuitOffer,
    CircuitOrder,
    Request,
    Response,
)
from wire.relay import _RelayEnd

HOMES = ("home-1", "home-2", "home-3")
"""Hosts that cannot be dialled."""


@pytest.fixture
async def apart(tmp_path: Path, never_hung: None, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    """Members that share each step equally, so that a gate stops each of them."""
    monkeypatch.setattr("ring.token.balance_counts", lambda total, units: balance_counts(total, [0] * len(units)))
    network = MemoryNetwork()
    network.closed |= set(HOMES)
    made = Cluster(tmp_path, network, host="seed", encrypted=True)
    await made.start_seed()
    yield made
    await made.close()


def profile(workers: int, steps: int = 40) -> Profile:
    return Profile.model_validate({"job": {"workers": workers, "steps": steps}, "validation": {"every": 0}})


async def idle(member: ServingMember) -> None:
    await asyncio.Event().wait()


async def ways_until(apart: Cluster, job: str, fits: Callable[[list[str]], bool]) -> None:
    """Wait until the ways of the links of the job's ring, in rank order, fit; empty: of one that is no circuit."""
    ways: dict[str, dict[str, str]] = {}
    members: list[str] = []

    def heard(topic: str, items: list[dict[str, Any]]) -> bool:
        nonlocal members
        if topic == "peers":
            ways.update({item["id"]: item["ways"] for item in items})
        if topic == "jobs":
            members = next((item["members"] for item in items if item["id"] == job), members)
        edges = zip(members, [*members[1:], *members[:1]], strict=True)
        return bool(members) and fits([ways.get(origin, {}).get(target, "") for origin, target in edges])

    await apart._until(job, heard)


async def test_workers_behind_routers_train_over_the_seed_and_say_so_to_a_new_one(apart: Cluster) -> None:
    gate = Gate(10)
    job = await apart.create(profile(3))
    for host in HOMES:
        apart.join(gate.build, host=host)
    await ways_until(apart, job, lambda ways: ways == ["relayed by the seed"] * 3)
    await apart.restart_seed()
    await ways_until(apart, job, lambda ways: ways == ["relayed by the seed"] * 3)
    gate.away()
    assert (await apart.job_until(job, lambda item: item["state"] == "done"))["step"] == 40
    peers = (await apart.ask("peers.list"))["peers"]
    assert {peer["router"] for peer in peers} == set(HOMES)


async def test_a_member_that_can_be_dialled_relays_and_its_death_costs_no_step(apart: Cluster) -> None:
    gate = Gate(10)
    job = await apart.create(profile(2))
    relay = apart.serve("drafter", idle, host="vps")
    await relay.joined.wait()
    workers = [apart.join(gate.build, host=host) for host in HOMES[:2]]
    await ways_until(apart, job, lambda ways: ways == [f"relayed by {relay.identity.name}"] * 2)
    await gate.reached(10, 2)
    await relay.die()
    apart.network.crash("vps")
    await ways_until(apart, job, lambda ways: ways == ["relayed by the seed"] * 2)
    gate.away()
    await apart.job_until(job, lambda item: item["state"] == "done")
    assert all(sorted(worker.steps) == list(range(1, 41)) for worker in workers), "each step once, and none left out"


async def test_a_relay_that_passes_nothing_on_is_left_for_the_seed(
    apart: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stall(end: _RelayEnd, nbytes: int) -> None:
        if end._transport.get_extra_info("sockname")[0] != "vps":
            usual(end, nbytes)

    usual = _RelayEnd.buffer_updated
    monkeypatch.setattr(_RelayEnd, "buffer_updated", stall)
    job = await apart.create(profile(2))
    await apart.serve("drafter", idle, host="vps").joined.wait()
    gate = Gate(10)
    for host in HOMES[:2]:
        apart.join(gate.build, host=host)
    await gate.reached(10, 2)
    await ways_until(apart, job, lambda ways: ways == ["relayed by the seed"] * 2)
    gate.away()
    await apart.job_until(job, lambda item: item["state"] == "done")


async def test_who_can_be_dialled_is_dialled_by_the_others(apart: Cluster) -> None:
    gate = Gate(10)
    job = await apart.create(profile(2))
    apart.join(gate.build, host=HOMES[0])
    apart.join(gate.build, host="vps")
    await ways_until(apart, job, lambda ways: sorted(ways) == ["", "reversed"])
    gate.away()
    await apart.job_until(job, lambda item: item["state"] == "done")


async def test_two_members_that_cannot_reach_each_other_get_a_relay(apart: Cluster) -> None:
    gate = Gate(10)
    apart.network.cut("lan-1", "lan-2")
    job = await apart.create(profile(2))
    for host in ("lan-1", "lan-2"):
        apart.join(gate.build, host=host)
    await ways_until(apart, job, lambda ways: ways == ["relayed by the seed"] * 2)
    gate.away()
    await apart.job_until(job, lambda item: item["state"] == "done")


async def test_a_ring_forms_again_without_losing_a_step_when_a_link_becomes_direct(
    apart: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def punch(network: CircuitNetwork, circuit: Circuit) -> str:
        return PUNCHED

    monkeypatch.setattr(CircuitNetwork, "try_direct", punch)  # memory has no routers
    gate = Gate(10)
    job = await apart.create(profile(2))
    workers = [apart.join(gate.build, host=host) for host in HOMES[:2]]
    await gate.reached(10, 2)
    await apart.job_until(job, lambda item: "better links" in item["reason"])
    gate.away()
    done = await apart.job_until(job, lambda item: item["state"] == "done")
    assert done["generation"] == 2
    assert all(sorted(worker.steps) == list(range(1, 41)) for worker in workers), "each step once, and none left out"


# ---------------------------------------------------------------------------------------------- what the seed arranges


class Meetings:
    """A seed that relays, and peers that speak its messages."""

    def __init__(self, network: MemoryNetwork, address: tuple[str, int]) -> None:
        self.network, self.address = network, address
        self._peers: list[ScriptedPeer] = []
        self._asked = 0
        self._offers: dict[str, list[CircuitOffer]] = {}  # that came before an answer

    async def peer(self, peer_id: str, *, dialled: bool = False, relays: bool = False) -> ScriptedPeer:
        made = ScriptedPeer(self.network, self.address, peer_id, ("drafter",))
        self._peers.append(made)
        await made.listen()
        await made.join(port=None if dialled else 1, capabilities={"relays": relays})
        return made

    async def ask(self, caller: ScriptedPeer, method: str, **params: str) -> Response:
        self._asked += 1
        caller.say(Request(self._asked, method, params))
        while not isinstance(message := (await caller.connection.receive(timeout_s=DEADLINE_S)).message, Response):
            assert isinstance(message, CircuitOffer)
            self._offers.setdefault(caller.id, []).append(message)
        return message

    async def offer(self, peer: ScriptedPeer) -> CircuitOffer:
        offers = self._offers.get(peer.id)
        return offers.pop(0) if offers else await peer.hear(CircuitOffer)

    async def open(self, caller: ScriptedPeer, answerer: ScriptedPeer) -> Circuit:
        answer = await self.ask(caller, OPEN, peer=answerer.id)
        assert not answer.error_code, answer
        return Circuit.from_map_untrusted(answer.result["circuit"])

    async def made(self, caller: ScriptedPeer, circuit: Circuit, way: str) -> None:
        await self.ask(caller, MADE, circuit=circuit.id, way=way)

    async def close(self) -> None:
        for peer in self._peers:
            await peer.close()


@pytest.fixture(params=[True])
async def meetings(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Meetings]:
    """``param``: whether the seed relays."""
    network = MemoryNetwork()
    circuits = CircuitNetwork(network)
    world, relays = World(LoopClock(), circuits, RealDisk(), random.Random(0)), circuits if request.param else None
    serving = serving_seed(world, state_dir=tmp_path, host="127.0.0.1", port=0, name="seed", circuits=relays)
    async with serving as listening:
        made = Meetings(network, listening.address)
        yield made
        await made.close()


async def test_the_seed_relays_if_no_member_does(meetings: Meetings) -> None:
    a, b = [await meetings.peer(peer_id) for peer_id in "ab"]
    circuit = await meetings.open(a, b)
    assert (circuit.side, circuit.host, circuit.port, circuit.relay) == (CALLER, "", 0, "the seed")
    offer = await meetings.offer(b)
    assert (offer.circuit.id, offer.circuit.side, offer.circuit.relay) == (circuit.id, ANSWERER, "the seed")
    assert (offer.circuit.caller, offer.circuit.answerer) == ("a", "b")
    assert not circuit.tries_direct, "it begins at once"


async def test_a_caller_that_is_dialled_is_the_meeting_point_itself(meetings: Meetings) -> None:
    a, b = await meetings.peer("a", dialled=True), await meetings.peer("b")
    circuit = await meetings.open(a, b)
    assert (circuit.host, circuit.port, circuit.relay) == ("", 0, "")
    offered = (await meetings.offer(b)).circuit
    assert (offered.host, offered.port, offered.relay) == ("127.0.0.1", a.server.address[1], "")


async def test_relays_share_the_pairs_and_one_that_fails_is_left_out(meetings: Meetings) -> None:
    a, b, c, d = [await meetings.peer(peer_id) for peer_id in "abcd"]
    r, s = [await meetings.peer(peer_id, dialled=True, relays=True) for peer_id in "rs"]
    first = await meetings.open(a, b)
    assert first.relay == "name-r"
    order = await r.hear(CircuitOrder)
    assert (order.id, set(order.peers)) == (first.id, {"a", "b"})
    await meetings.made(a, first, RELAYED)
    assert (await meetings.open(c, d)).relay == "name-s"
    failed = await meetings.open(a, b)
    assert failed.relay == "name-s", "the pair of a and b is the only one that is known to be relayed, by r"
    await meetings.made(a, failed, "")
    await meetings.made(a, failed, "")  # repeated: nothing
    assert (await meetings.open(a, b)).relay == "name-r"
    assert s.connection.close_cause is None


async def test_a_relayed_pair_tries_once_to_connect_directly_and_then_does(meetings: Meetings) -> None:
    a, b = [await meetings.peer(peer_id) for peer_id in "ab"]
    await meetings.made(a, await meetings.open(a, b), RELAYED)
    await meetings.offer(b)
    trial = await meetings.offer(a)
    assert (trial.trial, trial.circuit.side, trial.circuit.tries_direct) == (True, CALLER, True)
    assert (await meetings.offer(b)).trial
    again = await meetings.open(a, b)
    assert not again.tries_direct, "the trial has not ended"
    await meetings.made(a, again, RELAYED)  # no second trial
    await meetings.made(a, trial.circuit, PUNCHED)
    circuit = await meetings.open(b, a)
    assert circuit.tries_direct
    await meetings.made(b, circuit, RELAYED)
    assert not (await meetings.open(b, a)).tries_direct, "the path is gone again"


async def test_what_is_known_of_a_pair_ends_with_a_link(meetings: Meetings) -> None:
    a, b = [await meetings.peer(peer_id) for peer_id in "ab"]
    await meetings.peer("r", dialled=True, relays=True)
    await meetings.made(a, await meetings.open(a, b), "")
    assert (await meetings.open(a, b)).relay == "the seed"
    await a.join(port=1)  # it has moved
    assert (await meetings.open(a, b)).relay == "name-r"


async def test_the_only_meeting_point_is_chosen_again_after_a_failure(meetings: Meetings) -> None:
    a, b = [await meetings.peer(peer_id) for peer_id in "ab"]
    await meetings.made(a, await meetings.open(a, b), "")  # perhaps b was asleep
    assert (await meetings.open(a, b)).relay == "the seed"


async def test_a_relay_that_stalls_once_both_ends_are_there_is_left_out(meetings: Meetings) -> None:
    a, b = [await meetings.peer(peer_id) for peer_id in "ab"]
    await meetings.peer("r", dialled=True, relays=True)
    circuit = await meetings.open(a, b)
    await meetings.made(a, circuit, RELAYED)
    await meetings.made(a, circuit, "")  # the handshake of TLS failed
    assert (await meetings.open(a, b)).relay == "the seed"


async def test_requests_are_refused_with_reasons(meetings: Meetings) -> None:
    a = await meetings.peer("a")
    for peer_id in ("a", "nobody"):
        assert (await meetings.ask(a, OPEN, peer=peer_id)).error_code == "unknown-peer"


async def test_a_caller_that_never_comes_keeps_neither_its_relay_nor_its_answerers_busy(
    meetings: Meetings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roles.seed.circuits.MAX_ORDERS", 80)
    a, b, r = await meetings.peer("a"), await meetings.peer("b"), await meetings.peer("r", dialled=True, relays=True)
    while (answer := await meetings.ask(a, OPEN, peer="b")).error_code != "too-many":
        circuit = Circuit.from_map_untrusted(answer.result["circuit"])
        await meetings.made(a, circuit, REVERSED)  # a lie: nobody joined it
    offers = 0
    with suppress(TimeoutError):
        while True:
            await asyncio.wait_for(meetings.offer(b), 0.1)
            offers += 1
    assert offers == 80
    assert (await meetings.open(b, a)).relay == "name-r", "others are not held up"
    assert r.connection.close_cause is None


@pytest.mark.parametrize("meetings", [False], indirect=True)
async def test_a_seed_that_relays_nothing_says_so(meetings: Meetings) -> None:
    a, _ = [await meetings.peer(peer_id) for peer_id in "ab"]
    assert (await meetings.ask(a, OPEN, peer="b")).error_code == "no-relay"
