"""A seed's machine is lost; another one goes on from its backup, with the same workers and tickets."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest

from tests.e2e.conftest import Machine

pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


async def test_a_seed_is_restored_elsewhere_and_its_workers_find_it(machine: Machine, tmp_path: Path) -> None:
    place, copies, port = tmp_path / "owner", tmp_path / "copies", free_port()
    arguments = ("--tls", "--port", "0", "--state", str(place), "--backup", str(copies))
    seed = await machine.start("seed", *arguments, *machine.settings(job__steps=100_000, job__workers=1))
    ticket = (await seed.until(r"^p2ptrain join (\S+)$"))[1]
    home = {"XDG_STATE_HOME": str(tmp_path / "guest"), "P2PTRAIN_SEED": ""}
    worker = await machine.start("join", ticket, "--also", f"127.0.0.1:{port}", "--name", "far", **home)
    await worker.until(r"step .* 1 member")
    assert copies.stat().st_mode & 0o777 == 0o700
    await seed.kill()
    again = ("--port", str(port), "--state", str(tmp_path / "second"), "--restore", str(copies), "--json")
    restored = await machine.start("seed", *again)
    ready = json.loads((await restored.until(r'\{"event": "ready".*\}'))[0])
    assert (ready["port"], ready["tls"]) == (port, True)
    assert re.search(r"term 1\n.*evictions, revocations and tickets", restored.text)
    # A newcomer enrols with the old ticket's secret at the new address.
    new = f"127.0.0.1:{port}/{ticket.partition('/')[2]}"
    late = await machine.start("join", new, "--name", "late", "--slot", "2", **home)
    await late.until(r"step .* 2 members")
    code, said = await machine.run("seed", *again)
    assert (code, "already has a seed's database" in said) == (2, True), said
