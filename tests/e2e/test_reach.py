"""Machines behind routers of different kinds train, hold stages, draft and ask: real processes, real routers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.cluster.access import operator
from p2ptrain.compute.model import build_model
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.core.serving import Sampling
from tests.compute.families import generated, opened
from tests.compute.tiny_trainer import tiny
from tests.e2e.conftest import DEADLINE_S
from tests.net.namespaces import Internet, Machine, namespaces

__all__ = ["namespaces"]
pytestmark = pytest.mark.slow
STEPS = 250


@pytest.fixture
def net(namespaces: None) -> Iterator[Internet]:
    with Internet() as made:
        yield made


class Cluster:
    """A seed on the Internet, and machines elsewhere. ``at``: the namespace of each."""

    def __init__(self, net: Internet, machine: Any) -> None:
        self.net, self.machine = net, machine
        self.seed_at, self.at = net.machine("seed", ipv6=True), dict[str, Machine]()
        self.ticket = ""

    async def start(self, *arguments: str) -> None:
        state = ["--state", str(self.machine.root)]
        place = ["--host", "0.0.0.0", "--port", "7337"]
        self.seed = await self.machine.start("seed", *place, *state, *arguments, network=self.seed_at.namespace)
        self.ticket = (await self.seed.until(r"^p2ptrain join (\S+)$"))[1]

    async def here(self, *arguments: str) -> dict[str, Any]:
        """Run a command at the seed's machine. Returns its JSON document."""
        seed = ["--seed", f"@{self.machine.root}", "--json"]
        process = await self.machine.start(*arguments, *seed, network=self.seed_at.namespace)
        assert await process.end() == 0, process.text
        return dict(json.loads("\n".join(process.out)))

    async def ticket_of(self, role: str, *, ipv6: bool = False) -> str:
        host = ["--host", self.seed_at.address6 if ipv6 else self.seed_at.address]
        made = await self.here("ticket", "new", "--role", role, *host)
        return str(made["text"])

    async def join(self, name: str, *arguments: str, role: str = "", **kind: Any) -> Any:
        at = self.at[name] = self.net.machine(name, **kind)
        ticket = await self.ticket_of(role) if role else self.ticket
        root = self.machine.root / name
        options = ["--state", str(root), "--name", name, *(["--role", role] if role else ["--threads", "1"])]
        home = {"XDG_STATE_HOME": str(root / "home")}
        return await self.machine.start("join", ticket, *options, *arguments, network=at.namespace, **home)

    async def until_ring_has(self, *ways: str) -> None:
        """Wait until a worker reports that a link of its ring has one of these ways."""

        async def watch() -> None:
            async with operator(f"@{self.machine.root}") as client:
                await client.request("subscribe")
                async for update in client.updates():
                    items = update.items
                    if update.topic == "peers" and any(set(ways) & set(peer["ways"].values()) for peer in items):
                        return
                    is_done = update.topic == "jobs" and any(job["state"] == "done" for job in items)
                    assert not is_done, "none of its links was like that"

        await asyncio.wrap_future(self.seed_at.run(watch, timeout_s=DEADLINE_S))

    async def audit(self) -> None:
        process = await self.machine.start(
            "jobs", "audit", "tiny", "--seed", f"@{self.machine.root}", network=self.seed_at.namespace
        )
        assert await process.end() == 0, process.text


async def test_workers_behind_routers_train_and_find_direct_links(net: Internet, machine: Any) -> None:
    cluster = Cluster(net, machine)
    await cluster.start(*machine.settings(job__steps=STEPS, job__workers=4, checkpoint__every=0, validation__every=0))
    kinds: dict[str, dict[str, Any]] = {
        "keeps-1": {"router": "keeps ports"},
        "keeps-2": {"router": "double"},
        "symmetric": {"router": "symmetric"},
        "firewall": {"firewall": True},
    }
    workers = [await cluster.join(name, **kind) for name, kind in kinds.items()]
    await cluster.until_ring_has("punched", "direct")
    for worker in workers:
        await worker.until(r"behind a router or a firewall")
        last = await worker.until(rf"step +{STEPS}/{STEPS}.* (\d) members")
        assert int(last[1]) == 4
    await cluster.audit()


async def test_a_worker_whose_address_changes_in_a_step_comes_back(net: Internet, machine: Any) -> None:
    cluster = Cluster(net, machine)
    await cluster.start(*machine.settings(job__steps=STEPS, job__workers=2, checkpoint__every=0, validation__every=0))
    stays, moves = await cluster.join("stays"), await cluster.join("moves", firewall=True)
    await stays.until(r"step +\d\d/.* 2 members")
    at = cluster.at["moves"]
    at.do(f"ip addr del {at.address}/24 dev eth0")
    at.do("ip addr add 203.0.113.200/24 dev eth0")
    at.do("ip route add default dev eth0")
    await stays.until(r"rank \d of 2, .*\(generation [2-9]\)")
    await moves.until(r"rank \d of 2, .*\(generation [2-9]\)")
    await cluster.audit()


async def test_a_stage_and_a_drafter_behind_routers_write_the_text_of_the_whole_model(
    net: Internet, machine: Any, tmp_path: Path
) -> None:
    large, small = tmp_path / "large", tmp_path / "small"
    for directory, layers in ((large, 4), (small, 1)):
        build_model(tiny(layers=layers, context=2048), 256, seed=1).save_pretrained(directory)
        Tokenizer.of_bytes().save(directory)
    cluster = Cluster(net, machine)
    await cluster.start("--no-job")
    for name, kind in (("stage-1", {"router": "keeps ports"}), ("stage-2", {"router": "symmetric"})):
        await cluster.join(name, **kind)
    drafter = await cluster.join("drafter", "--model", str(small), role="drafter", router="double")
    await drafter.until("drafts on")
    verifier = await cluster.join("verifier", "--model", str(large), "--split", "2", role="verifier", firewall=True)
    await verifier.until("writes text")
    asking = net.machine("asking", firewall=True, ipv4=False, ipv6=True)
    place = ["--seed", await cluster.ticket_of("operator", ipv6=True)]
    home = {"XDG_STATE_HOME": str(tmp_path / "asking")}
    shape = ["--tokens", "48", "--temperature", "0.9", "--top-k", "0", "--random-seed", "3", "--json"]
    process = await machine.start("generate", "def ", *place, *shape, network=asking.namespace, **home)
    assert await process.end() == 0, process.text + verifier.text
    answer = json.loads("\n".join(process.out))
    sampling = Sampling(temperature=0.9, top_k=0, top_p=1.0, seed=3)
    alone = generated(opened(large), list(b"def "), 48, sampling)
    assert answer["text"] == bytes(alone).decode(errors="replace")
    assert [facts["name"] for facts in answer["stats"]["drafters"]] == ["drafter"], answer
