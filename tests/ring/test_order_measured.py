"""The order that measured links lead to, against every other order, on a clock where time is exact."""

from __future__ import annotations

import asyncio
import itertools
import random

import numpy as np
import pytest

from ring.local import LocalMember, local_view
from ring.order import LinkQuality, best_order
from roles.worker.links import Prober, Sink
from roles.worker.stage_requests import Place
from wire.connection import Connection
from wire.emulate import EmulatedNetwork, LinkPreset, PresetOf
from wire.handshake import local_welcome, serve
from wire.memory import MemoryNetwork, run_virtual
from wire.messages import Hello, Welcome

PEERS = "abcde"
NUMEL = 1 << 16
WITHIN = 1.1
Weather = dict[frozenset[str], LinkPreset]


def two_sites_and_a_hut(seed: int) -> Weather:
    """Links that differ ten times: fast within each of two sites, slower between them, and a hut far from both."""
    rng = random.Random(seed)
    order = rng.sample(PEERS, len(PEERS))
    site = dict(zip(order, (0, 0, 1, 1, 2), strict=True))
    result = {}
    for one, other in itertools.combinations(PEERS, 2):
        near = site[one] == site[other]
        figures = (0.2, 200e6) if near else (rng.uniform(2, 4), rng.uniform(20e6, 40e6))
        result[frozenset((one, other))] = LinkPreset(f"{one}{other}", figures[0], rate_bps=figures[1])
    return result


def all_different(seed: int) -> Weather:
    rng = random.Random(seed)
    return {
        frozenset(pair): LinkPreset("".join(pair), rng.uniform(0.2, 2), rate_bps=20e6 * 10 ** rng.random())
        for pair in itertools.combinations(PEERS, 2)
    }


def network_of(hub: MemoryNetwork, name: str, weather: Weather) -> EmulatedNetwork:
    to: PresetOf = lambda host, port: weather[frozenset((name, host))]  # noqa: E731
    return EmulatedNetwork(hub.at(name), to, seed=1)


async def measured(weather: Weather) -> dict[tuple[str, str], LinkQuality]:
    """What the workers find: each measures the way to all others."""
    hub = MemoryNetwork()
    members = {name: LocalMember(name, network_of(hub, name, weather)) for name in PEERS}

    def welcome(name: str) -> Welcome:
        return local_welcome(peer_id=name, name=name, wall=0.0)

    targets, servers, problems = [], [], []
    for name, member in members.items():

        async def decide(hello: Hello, connection: Connection, name: str = name) -> Welcome:
            return welcome(name)

        server = await serve(
            member.world.network,
            "0.0.0.0",
            0,
            decide=decide,
            serve=Sink().serve,
            on_problem=lambda problem, address: problems.append(problem),
        )
        targets.append(Place(name, name, server.address[1]))
        servers.append(server)
    links = {}
    for name, member in members.items():
        prober = Prober(member.world, peer_id=name, name=name, seed_host="")
        others = [target for target in targets if target.peer != name]
        found = await prober.measure(others, deadline_s=10)
        links.update({(name, other): quality for other, quality in found.items()})
    for server in servers:
        await server.close()
    assert not problems
    return links


async def reduced_s(weather: Weather, circle: tuple[str, ...]) -> float:
    """How long an all-reduce takes in a ring of this order."""
    hub = MemoryNetwork()
    members = {name: LocalMember(name, network_of(hub, name, weather)) for name in circle}
    ports = {name: await member.listen("0.0.0.0") for name, member in members.items()}
    view = local_view(ports, hosts=True)
    await asyncio.gather(
        *(member.form(view, sub_chunk_bytes=0, heartbeat_s=60, death_s=180) for member in members.values())
    )
    arrays = [np.full(NUMEL, float(rank), np.float32) for rank in range(len(circle))]
    loop = asyncio.get_running_loop()
    began = loop.time()
    rings = zip(members.values(), arrays, strict=True)
    await asyncio.gather(*(member.session.all_reduce(array) for member, array in rings))
    took_s = loop.time() - began
    assert all((array == sum(range(len(circle)))).all() for array in arrays)
    await asyncio.gather(*(member.stop() for member in members.values()))
    return took_s


@pytest.mark.parametrize("weather", [two_sites_and_a_hut(1), all_different(3)])
def test_the_order_from_measured_links_is_nearly_the_best_of_all(weather: Weather) -> None:
    links = run_virtual(measured(weather))
    assert len(links) == 20
    found = best_order(PEERS, links, total_bytes=4 * NUMEL)
    assert found is not None
    circles = [(PEERS[0], *rest) for rest in itertools.permutations(PEERS[1:]) if rest[0] < rest[-1]]
    assert len(circles) == 12  # the links are alike both ways, so each circle stands for two
    seconds = {circle: run_virtual(reduced_s(weather, circle)) for circle in circles}
    best_s, joined_s = min(seconds.values()), seconds[tuple(PEERS)]
    order = found[0]
    chosen = order if order[1] < order[-1] else (order[0], *order[:0:-1])
    print(
        f"best {best_s:.3f} s, chosen {seconds[chosen]:.3f}, joined {joined_s:.3f}, worst {max(seconds.values()):.3f}"
    )
    assert seconds[chosen] <= WITHIN * best_s
    assert max(seconds.values()) > 1.25 * best_s, "the order made no difference: the test shows nothing"
