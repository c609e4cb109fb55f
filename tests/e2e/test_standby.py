"""Two seeds as real processes: the first is killed and never comes back."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.core.errors import NetworkError, Refused
from tests.e2e.conftest import Machine, Process

pytestmark = pytest.mark.slow
TAKEOVER_S = "3"


def at(step: int) -> Any:
    return lambda item: item["step"] >= step


async def standby_of(machine: Machine, place: Path, seed: str, *arguments: str) -> tuple[Process, int]:
    """A standby that is in step, and its port."""
    where = ("--port", "0", "--state", str(place), "--takeover-after", TAKEOVER_S, "--json")
    process = await machine.start("seed", "--standby", seed, *where, *arguments)
    ready = await process.until(r'"event": "standby"')
    await process.until("in step with")
    return process, int(json.loads(ready.string)["port"])


async def test_the_leader_is_killed_for_good(machine: Machine, tmp_path: Path) -> None:
    leader = await machine.seed(*machine.settings(job__steps=100_000))
    old = machine.port
    workers = [await machine.join("--name", name, "--slot", slot) for name, slot in (("one", "1"), ("two", "2"))]
    await machine.job_until(lambda item: len(item["members"]) == 2 and item["step"] >= 10)
    standby, port = await standby_of(machine, tmp_path / "second", f"127.0.0.1:{old}")
    # A standby sends people to the seed that leads.
    code, said = await machine.run("peers", "--seed", f"127.0.0.1:{port}", "--json")
    assert code == 0, said
    peers = json.loads("\n".join(machine.processes[-1].out))["peers"]
    assert [peer["state"] for peer in peers if peer["roles"] == ["seed"]] == ["standby"]
    assert len(peers) == 3

    await leader.kill()
    await standby.until(r'"event": "ready"')
    machine.port = port
    item = await machine.job_until(lambda item: len(item["members"]) == 2 and item["state"] == "running")
    reached = (await machine.job_until(at(item["step"] + 20)))["step"]
    assert all("step" in worker.text and worker.process.returncode is None for worker in workers)
    # A newcomer gets in, with the address of the seed that is gone in the second place; a job can be made.
    third = await machine.start(
        "join", f"127.0.0.1:{port},127.0.0.1:{old}", "--state", str(tmp_path), "--name", "three"
    )
    await third.until(r"step .* 3 members")
    created = await machine.run("jobs", "create", "--profile", "tiny", "--name", "next", "--seed", f"127.0.0.1:{port}")
    assert created[0] == 0, created[1]
    code, said = await machine.run("jobs", "audit", item["name"], "--seed", f"127.0.0.1:{port}", "--json")
    assert code == 0, said
    # A worker that is started again with the old address finds its way.
    await workers[0].kill()
    again = await machine.start("join", f"127.0.0.1:{old}", "--state", str(tmp_path), "--name", "one", "--slot", "1")
    await again.until(r"step .* 3 members")
    assert (await machine.job_until(at(reached + 20), item["id"]))["state"] == "running"

    # The old leader comes back, and does not lead.
    process = await machine.start("seed", "--port", str(old), "--state", str(tmp_path), "--json")
    assert await process.end() == 2
    assert f"127.0.0.1:{port}" in process.text
    assert "--standby" in process.text
    # It follows, as it says.
    back, _ = await standby_of(machine, tmp_path, f"127.0.0.1:{port}")
    assert await back.interrupt() == 0


async def test_an_encrypted_standby_takes_over_under_the_same_authority(machine: Machine, tmp_path: Path) -> None:
    place = tmp_path / "owner"
    arguments = ("--tls", "--port", "0", "--state", str(place), *machine.settings(job__steps=100_000, job__workers=1))
    leader = await machine.start("seed", *arguments)
    ticket = (await leader.until(r"^p2ptrain join (\S+)$"))[1]
    address = ticket.partition("/")[0]
    home = {"XDG_STATE_HOME": str(tmp_path / "guest"), "P2PTRAIN_SEED": ""}
    worker = await machine.start("join", ticket, "--name", "far", **home)
    await worker.until(r"step .* 1 member")
    operator = f"@{place / 'seed' / 'authority' / 'local-operator.ticket'}"
    code, said = await machine.run("ticket", "new", "--role", "seed", "--uses", "1", "--seed", operator)
    assert code == 0, said
    seed_ticket = machine.processes[-1].out[0]
    # A worker's ticket makes no standby.
    code, said = await machine.run("seed", "--standby", ticket, "--port", "0", "--state", str(tmp_path / "no"))
    assert (code, "the ticket of a worker" in said) == (2, True), said
    standby, port = await standby_of(machine, tmp_path / "second", seed_ticket)
    assert re.search(r"[\w-]{76}", standby.text) is None, "it prints no ticket"
    await leader.kill()
    await standby.until(r'"event": "ready"')
    await worker.until(r"joined .*(?s:.)*")
    # A newcomer enrols with the old ticket's secret at the new address.
    new = f"127.0.0.1:{port}/{ticket.partition('/')[2]}"
    late = await machine.start("join", f"{address},{new}", "--name", "late", "--slot", "2", **home)
    await late.until(r"step .* [23] members")
    # The first worker again, with the ticket of the seed that is gone.
    await worker.kill()
    again = await machine.start("join", ticket, "--name", "far", "--slot", "1", **home)
    await again.until(r"step .* [23] members")


async def test_nobody_to_follow(machine: Machine, tmp_path: Path) -> None:
    code, said = await machine.run("seed", "--standby", "127.0.0.1:1", "--port", "0", "--state", str(tmp_path / "x"))
    assert code == NetworkError.exit_code, said
    assert "refused" in said
    assert Refused.exit_code != code
