"""What the seed knows of links: how it asks, what it believes, and that nobody waits for it for long."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any, cast

import pytest

from configs.schema import Profile
from p2ptrain.core.errors import ConnectionLost, ProtocolError
from p2ptrain.core.world import LoopClock
from p2ptrain.lab.memory import run_virtual
from ring.planning.measurements import LinkQuality
from roles.seed import links as seed_links
from roles.seed.links import MAX_AT_ONCE, START_S, LinkTable, Survey, measured_untrusted
from roles.seed.peers import ConnectedPeer
from tests.roles.in_process import Cluster
from wire.handshake import local_hello

GOOD = LinkQuality(0.01, 1e8)


class FakePeer:
    """A worker that measures all ways as ``GOOD``, after ``takes_s``."""

    def __init__(self, peer_id: str, takes_s: float = 0.5, *, measures: bool = True, host: str = "10.0.0.1") -> None:
        capabilities = {"measures": True} if measures else {}
        self.hello = local_hello(
            peer_id=peer_id, name=peer_id, roles=["worker"], purpose="peer", capabilities=capabilities
        )
        self.id, self.host, self.port, self.takes_s = peer_id, host, 7000, takes_s
        self.asked: list[dict[str, Any]] = []
        self.answer: Any = None

    async def ask(self, method: str, params: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        assert method == "links.measure"
        self.asked.append(params)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.sleep(self.takes_s)
        except TimeoutError:
            raise ConnectionLost("it never answers") from None
        if self.answer is not None:
            return cast(dict[str, Any], self.answer)
        return {"links": [asdict(GOOD) | {"peer": peer["peer"]} for peer in params["peers"]]}


class SurveyBench:
    """A survey of fake workers, and who was let in when."""

    def __init__(self, *workers: FakePeer) -> None:
        self.links = {worker.id: worker for worker in workers}
        self.survey = Survey(LoopClock(), cast(dict[str, ConnectedPeer], self.links))
        self.let_in: list[tuple[str, float]] = []

    def ready(self, peer_id: str) -> bool:
        def then() -> None:
            self.let_in.append((peer_id, asyncio.get_running_loop().time()))

        return self.survey.measure_before(cast(ConnectedPeer, self.links[peer_id]), list(self.links), then)


def surveyed(bench: SurveyBench, act: Any, until_s: float = 60.0) -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            bench.survey.start(tasks)
            act()
            await asyncio.sleep(until_s)

    run_virtual(main())


def test_a_worker_is_let_in_when_it_has_measured() -> None:
    bench = SurveyBench(FakePeer("a"), FakePeer("b"), FakePeer("c", host="127.0.0.1"))
    surveyed(bench, lambda: bench.ready("a"))
    assert bench.let_in == [("a", pytest.approx(0.5))]
    assert bench.survey.table.known == {("a", "b"): GOOD, ("a", "c"): GOOD}
    (asked,) = bench.links["a"].asked
    assert [(peer["peer"], peer["host"]) for peer in asked["peers"]] == [("b", "10.0.0.1"), ("c", "127.0.0.1")]
    assert asked["deadline_s"] < START_S


def test_the_table_does_not_grow_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seed_links, "MAX_PAIRS", 10)
    table = LinkTable()
    for number in range(20):
        table.put("a", {f"p{number}": GOOD}, float(number))
    assert [there for _, there in table.known] == [f"p{number}" for number in range(10, 20)]


def test_no_request_is_longer_than_a_worker_takes() -> None:
    bench = SurveyBench(*(FakePeer(f"p{number}") for number in range(3 * MAX_AT_ONCE)))
    surveyed(bench, lambda: bench.ready("p0"))
    assert len(bench.links["p0"].asked[0]["peers"]) == MAX_AT_ONCE
    surveyed(bench, lambda: bench.survey.view_began("job", sorted(bench.links)), until_s=1000.0)
    assert max(len(asked["peers"]) for link in bench.links.values() for asked in link.asked) == MAX_AT_ONCE
    assert len(bench.survey.table.known) == 3 * MAX_AT_ONCE * (3 * MAX_AT_ONCE - 1)


FIELDS = ("peer", "latency_s", "bandwidth_bps")


@pytest.mark.parametrize(
    "links",
    [
        "none",
        [["b", 0.1, 1e6]] * 2,
        [["x", 0.1, 1e6]],
        [["b", -0.1, 1e6]],
        [["b", float("nan"), 1e6]],
        [["b", 0.1, 0.0]],
        [["b", 0.1, "much"]],
        [["b", 0.1, 1e6], ["c", 0.1, 1e6], ["d", 0.1, 1e6]],
    ],
)
def test_what_cannot_be_is_not_believed(links: Any) -> None:
    with pytest.raises(ProtocolError):
        measured_untrusted(
            {"links": [dict(zip(FIELDS, link, strict=False)) if isinstance(link, list) else link for link in links]},
            {"b", "c"},
        )


async def test_a_cluster_measures_its_links_and_says_what_it_makes_of_them(cluster: Cluster) -> None:
    """Three workers: measured before they are let in, planned with, and shown."""
    profile = Profile.model_validate({"job": {"workers": 3, "steps": 60}, "validation": {"every": 0}})
    job = await cluster.create(profile)
    for _ in range(3):
        cluster.join()
    running = await cluster.job_until(job, lambda item: item["state"] == "running" and all(item["edge_bps"] or [0]))
    streams = running["streams"]  # more than one if this machine was busy while they measured
    assert (streams > 0, running["codec"]) == (True, "fp32")
    assert len(running["edge_ms"]) == 3
    assert all(latency_ms >= 0 for latency_ms in running["edge_ms"])
    ranked = {peer["rank"]: peer for peer in (await cluster.ask("peers.list"))["peers"]}
    assert [ranked[rank]["id"] for rank in range(3)] == running["members"]
    shown = (await cluster.ask("jobs.show", job=job))["job"]
    assert len(shown["edge_bps"]) == 3
    events = (await cluster.ask("events.list", after_id=0, limit=100))["events"]
    told = {event["kind"]: event["text"] for event in events}
    assert " → " in told["view"]
    assert "; slowest edge " in told["ring-order"]
    assert told["ring-transport"].startswith(f"{streams} connection{'s' * (streams > 1)} per link (round trip ")
    assert told["ring-transport"].endswith("; codec fp32, as the profile says")
