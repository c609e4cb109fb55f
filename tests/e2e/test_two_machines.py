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
    """The namespaces of the first machine (10.77.0.1, fd77::1, fe80::1) and of the second (10.77.0.2, ...)."""
    names = [f"p2p-{os.getpid()}-{side}" for side in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", "va", "netns", names[0], "type", "veth", "peer", "name", "vb", "netns", names[1])
        for number, (name, end) in enumerate(zip(names, ("va", "vb"), strict=True), 1):
            ip("-n", name, "link", "set", end, "addrgenmode", "none")
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", end)
            ip("-n", name, "addr", "add", f"fd77::{number}/64", "dev", end, "nodad")
            ip("-n", name, "addr", "add", f"fe80::{number}/64", "dev", end, "nodad")
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
    assert ticket.startswith("10.77.0.1:7337/"), "the namespace has no default route to tell its address by"
    beside = await machine.start("join", *state, network=here)
    elsewhere = await machine.start("join", ticket, *state, "--slot", "2", network=there)
    # The worker beside the seed is known by a loopback address, which the other one must not dial.
    last = await elsewhere.until(r"step +30/30.* (\d) members")
    assert int(last[1]) == 2
    assert "listening on all addresses" in beside.text
    check = await machine.start("check", ticket, "--once", network=there, XDG_STATE_HOME=str(machine.root / "there"))
    assert await check.end() == 0, check.text
    assert [await beside.interrupt(), await elsewhere.interrupt(), await seed.interrupt()] == [0, 0, 0]


FIREWALL = """
table inet filter {
  chain input {
    type filter hook input priority 0; policy drop;
    ct state established,related accept
    icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert } accept
  }
}
"""
BLACK_HOLE = """
table inet hole {
  chain input {
    type filter hook input priority 0;
    meta length > 1450 drop
  }
}
"""


def nft(network: str, rules: str) -> None:
    command = ["ip", "netns", "exec", network, "nft", "-f", "-"]
    subprocess.run(command, check=True, capture_output=True, text=True, input=rules)


@pytest.mark.skipif(shutil.which("nft") is None, reason="a firewall needs nftables")
async def test_a_check_names_the_firewall_and_the_line_that_opens_it(machine: Any, machines: tuple[str, str]) -> None:
    here, there = machines
    seed = await machine.start("seed", "--host", "::", "--no-job", "--state", str(machine.root), network=here)
    secret = (await seed.until(r"^p2ptrain join [^/]*(/\S+)$"))[1]

    async def checked(place: str) -> tuple[int, str]:
        state = str(machine.root / "there")
        check = await machine.start("check", place + secret, network=there, XDG_STATE_HOME=state)
        return await check.end(), check.text

    nft(there, FIREWALL)
    code, text = await checked("10.77.0.1:7337")
    assert (code, "this machine can take part" in text) == (0, True), text
    assert "cannot reach 10.77.0.2:7339: no answer within" in text
    line = text.partition("`nft ")[2].partition("`")[0]
    nft(there, line.replace("add rule", "insert rule"))
    for place, own in (
        ("http://10.77.0.1:7337", "10.77.0.2:7339"),
        ("[fd77::1]:7337", "[fd77::2]:7339"),
        ("[fe80::1%vb]:7337", "[fe80::2%vb]:7339"),
    ):
        code, text = await checked(place)
        assert (code, f"the seed can reach this machine at {own}" in text) == (0, True), text
    nft(there, BLACK_HOLE)
    code, text = await checked("10.77.0.1:7337")
    assert (code, "loses large packets" in text, "mtu" in text) == (4, True, True), text
    assert await seed.interrupt() == 0
