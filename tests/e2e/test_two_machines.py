"""Two machines and the wire between them: network namespaces, made and removed here. Needs root on Linux."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None,
        reason="network namespaces need Linux, root and iproute2",
    ),
]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def machines() -> Iterator[tuple[str, str]]:
    """The namespaces of the first machine (10.77.0.1) and of the second (10.77.0.2)."""
    names = [f"p2p-{os.getpid()}-{side}" for side in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", "va", "netns", names[0], "type", "veth", "peer", "name", "vb", "netns", names[1])
        for name, end, address in zip(names, ("va", "vb"), ("10.77.0.1", "10.77.0.2"), strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
        yield names[0], names[1]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


async def test_a_worker_beside_the_seed_and_one_elsewhere_train_together(
    machine: Any, machines: tuple[str, str]
) -> None:
    here, there = machines
    state = ["--state", str(machine.root)]
    seed = await machine.start(
        "seed", "--host", "0.0.0.0", "--port", "7337", *state, *machine.settings(job__steps=30), network=here
    )
    ticket = (await seed.until(r"^p2ptrain join (\S+)$"))[1]
    assert not ticket.startswith("127."), "it is for other machines"
    ticket = f"10.77.0.1:7337/{ticket.partition('/')[2]}"  # the namespace has no default route to tell its address by
    beside = await machine.start("join", *state, network=here)
    await beside.until("joined")
    elsewhere = await machine.start("join", ticket, *state, network=there)
    # The worker beside the seed is known by a loopback address, which the other one must not dial.
    last = await elsewhere.until(r"step +30/30.* (\d) members")
    assert int(last[1]) == 2
    assert "listening on all addresses" in beside.text
    code = await machine.start("check", ticket, "--once", network=there, XDG_STATE_HOME=str(machine.root / "there"))
    assert await code.end() == 0, code.text
    assert [await beside.interrupt(), await elsewhere.interrupt(), await seed.interrupt()] == [0, 0, 0]
