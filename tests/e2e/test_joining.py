"""New machines on a network: a seed is found, a code lets them in. Namespaces on a bridge; needs root on Linux."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.terminal import Terminal
from tests.e2e.test_two_machines import ip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None,
        reason="network namespaces need Linux, root and iproute2",
    ),
]


@pytest.fixture
def network() -> Iterator[list[str]]:
    """The namespaces of three machines, 10.88.0.1 to 3, on one switch."""
    switch, *machines = [f"p2p-{os.getpid()}-{name}" for name in ("switch", "a", "b", "c")]
    try:
        for name in (switch, *machines):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", switch, "link", "add", "bridge", "up", "type", "bridge")
        for number, name in enumerate(machines, 1):
            plug = f"port{number}"
            ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", plug, "netns", switch)
            ip("-n", switch, "link", "set", plug, "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"10.88.0.{number}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        yield machines
    finally:
        for name in (switch, *machines):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


async def test_a_new_machine_finds_the_seed_and_joins_with_a_code(machine: Any, network: list[str]) -> None:
    here, there, elsewhere = network

    def at(name: str) -> dict[str, str]:
        return {"XDG_STATE_HOME": str(machine.root / name)}

    async def join(*arguments: str) -> tuple[int, str]:
        joining = await machine.start("join", *arguments, network=there, **at("there"))
        return await joining.end(), joining.text

    code, text = await join()
    assert (code, "no seed was found on this network" in text) == (2, True), text
    serve = ("seed", "--host", "0.0.0.0", "--no-job")
    seed = await machine.start(*serve, "--name", "studio", network=here, **at("here"))
    await seed.until("p2ptrain join 10.88.0.1:7337/")
    await seed.until("finds it without an address")
    code, text = await join("--wait", "0")
    assert (code, "found studio at 10.88.0.1:7337" in text, "ticket code" in text) == (2, True, True), text
    code, text = await join("--no-discovery", "--wait", "0")
    assert (code, "127.0.0.1:7337" in text) == (3, True), text

    async def digits() -> str:
        shown = await machine.start("ticket", "code", network=here, **at("here"))
        assert await shown.end() == 0, shown.text
        return str(shown.out[0])

    wrong = f"{(int((await digits()).replace(' ', '')) + 1) % 10**6:06}"
    code, text = await join("10.88.0.1", "--code", wrong)
    assert (code, "the code is wrong, and spent now" in text) == (4, True), text
    shown = await digits()
    hesitant = Terminal("join", "10.88.0.1", network=there, **at("there"))
    try:
        await asyncio.to_thread(hesitant.until, "The six digits")
        hesitant.type("\x03")
        assert hesitant.left()[0] == 130
    finally:
        hesitant.end()
    newcomer = Terminal("join", network=there, **at("there"))
    try:
        await asyncio.to_thread(newcomer.until, "The six digits")
        newcomer.type("12345\n")
        await asyncio.to_thread(newcomer.until, "The six digits")
        newcomer.type(f"{shown}\n")
        await asyncio.to_thread(newcomer.until, "joined studio")
        await seed.until(" joined from 10.88.0.2:")
        newcomer.type("\x03")
        assert newcomer.left()[0] == 0
    finally:
        newcomer.end()
    again = await machine.start("join", "studio", network=there, **at("there"))
    await again.until("joins 10.88.0.1:7337")
    assert await again.interrupt() == 0, "what the code gave is saved"
    code, text = await join("10.88.0.1", "--code", shown, "--slot", "2")
    assert (code, "no code is open" in text) == (4, True), text

    twin = await machine.start(*serve, "--name", "attic", network=elsewhere, **at("elsewhere"))
    await twin.until("finds it without an address")
    code, text = await join()
    assert (code, "2 seeds are on this network: attic at 10.88.0.3:7337" in text) == (2, True), text
    assert [await twin.interrupt(), await seed.interrupt()] == [0, 0]
    code, text = await join("attic")
    assert (code, "no machine is called attic, and no seed was found" in text) == (2, True), "they said goodbye"
