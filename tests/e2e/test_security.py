"""An encrypted cluster as a person runs it: tickets, evictions, and what is told to whoever may not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Machine, Process

TICKET = re.compile(r"[\w.:-]+/[A-Za-z0-9_-]{76}\b")


class Home:
    """One person's account: the usual place for state is in ``place``."""

    def __init__(self, machine: Machine, place: Path) -> None:
        self._machine, self._environment = machine, {"XDG_STATE_HOME": str(place), "P2PTRAIN_SEED": ""}
        self.state = place / "p2ptrain"

    async def start(self, *arguments: str) -> Process:
        return await self._machine.start(*arguments, **self._environment)

    async def run(self, *arguments: str) -> tuple[int, Process]:
        process = await self.start(*arguments)
        return await process.end(), process

    async def ask(self, *arguments: str) -> Any:
        code, process = await self.run(*arguments, "--json")
        assert code == 0, process.text
        return json.loads("\n".join(process.out))


@pytest.mark.slow
async def test_a_cluster_with_tls_from_ticket_to_eviction(machine: Machine, tmp_path: Path) -> None:
    owner, guest = Home(machine, tmp_path / "owner"), Home(machine, tmp_path / "guest")
    seed = await owner.start("seed", "--tls", "--port", "0", *machine.settings(job__steps=100_000))
    line = await seed.until(r"^p2ptrain join (\S+)$")
    ticket, address = line[1], line[1].partition("/")[0]
    at = ("--seed", address)

    # On the seed's machine no ticket is needed, elsewhere one is, once.
    slowly = ("--link", "100ms")  # steps that take no processor time from the commands
    near = await owner.start("join", address, "--name", "near", *slowly)
    far = await guest.start("join", ticket, "--name", "far", "--slot", "1", *slowly)
    third = await guest.start("join", ticket, "--name", "third", "--slot", "2", *slowly)
    for worker in (near, far, third):
        await worker.until(r"step .* 3 members")
    code, refused = await Home(machine, tmp_path / "stranger").run("join", address)
    assert code == 2
    assert "no saved access" in refused.text
    assert "ticket new" in refused.text
    assert await third.interrupt() == 0
    third = await guest.start("join", address, "--name", "third", "--slot", "2")
    await third.until(r"step .* 3 members")

    # A worker's ticket controls nothing; an operator's does, from elsewhere too.
    code, refused = await guest.run("jobs", "list", "--seed", ticket)
    assert code == 2
    assert "this ticket is for a worker" in refused.text
    operator = (await owner.ask("ticket", "new", "--operator", *at))["text"]
    (guest.state.parent / "ticket.txt").write_text(operator)
    jobs = await guest.ask("jobs", "list", "--seed", f"@{guest.state.parent / 'ticket.txt'}")
    assert jobs["jobs"][0]["state"] == "running"
    assert len((await guest.ask("peers", "list", *at))["peers"]) == 3

    # One is evicted: it ends with the reason, stays out, and the job goes on.
    await owner.ask("peers", "evict", "far", "--yes", *at)
    assert await far.end() == 4
    assert "was evicted from this cluster" in far.text
    await near.until(r"step .* 2 members")
    code, again = await guest.run("join", address, "--name", "far", "--slot", "1")
    assert code == 4
    assert "was evicted from this cluster" in again.text

    # A ticket that was taken back takes with it who came by it.
    [first] = [item for item in (await owner.ask("ticket", "list", *at))["tickets"] if item["kind"] == "first"]
    await owner.ask("ticket", "revoke", first["id"], "--yes", *at)
    assert await third.end() == 4
    assert "was revoked" in third.text
    await near.until(r"step .* 1 member\b")
    assert [await near.interrupt(), await seed.interrupt()] == [0, 0]

    # Tickets are where they were asked for, and nowhere else.
    shown = {ticket, operator}
    for process in machine.processes:
        assert {found for line in process.lines for found in TICKET.findall(line)} <= shown
    kept = {"tickets.json", "local-worker.ticket", "local-operator.ticket", "ticket.txt"}
    for path in [path for path in tmp_path.rglob("*") if path.is_file() and path.name not in kept]:  # noqa: ASYNC240
        assert not any(text.partition("/")[2][12:40].encode() in path.read_bytes() for text in shown), path
    assert sum(ticket in line for process in machine.processes for line in process.lines) == 1, "it can be found"


async def test_a_plain_seed_wants_no_ticket(machine: Machine, tmp_path: Path) -> None:
    home = Home(machine, tmp_path / "home")
    seed = await home.start("seed", "--no-job", "--port", "0")
    address = (await seed.until(r"p2ptrain join (\S+)$"))[1]
    assert "/" not in address
    other = await home.start("seed", "--tls", "--no-job", "--port", "0", "--state", str(tmp_path / "other"))
    ticket = (await other.until(r"^p2ptrain join (\S+)$"))[1]
    code, said = await home.run("join", f"{address}/{ticket.partition('/')[2]}")
    assert code == 4
    assert "does not speak TLS" in said.text
    assert "without a ticket" in said.text
    code, said = await home.run("ticket", "new", "--seed", address)
    assert code == 4
    assert "plain TCP" in said.text
    code, said = await home.run("check", ticket)
    assert code == 0, said.text
    assert "has a certificate until" in said.text
