"""Two members on a wire of 100 Mbit/s that the kernel shapes (a token bucket at each end). Needs root on Linux."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")),
        reason="network namespaces and traffic shaping need Linux, root and iproute2",
    ),
]

ENDS = (("sa", "10.78.0.1"), ("sb", "10.78.0.2"))
NUMEL = 4 << 20  # 16 MiB of float32
ROUNDS = 3


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def machines() -> Iterator[list[list[str]]]:
    """For each of two machines, how to run a command there."""
    names = [f"p2pslow-{os.getpid()}-{end}" for end, _ in ENDS]
    try:
        for name in names:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", "sa", "netns", names[0], "type", "veth", "peer", "name", "sb", "netns", names[1])
        for name, (end, address) in zip(names, ENDS, strict=True):
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", end)
            run("ip", "-n", name, "link", "set", end, "up")
            shape = ("root", "tbf", "rate", "100mbit", "burst", "64kb", "latency", "50ms")
            run("tc", "-n", name, "qdisc", "add", "dev", end, *shape)
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


async def test_int8_is_several_times_as_fast_as_gloo(machines: list[list[str]]) -> None:
    """What counts here is the wire, not the machine: int8 sends 25.8 % of the bytes, and little else takes time."""
    script = str(Path(__file__).with_name("slow_wire_member.py"))
    processes = []
    for rank, inside in enumerate(machines):
        hosts = [ENDS[rank][1], ENDS[1 - rank][1]]
        arguments = [str(rank), *hosts, ENDS[rank][0], "int8", str(NUMEL), str(ROUNDS)]
        processes.append(
            await asyncio.create_subprocess_exec(
                *inside, sys.executable, script, *arguments,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            )
        )  # fmt: skip
    try:
        async with asyncio.timeout(120):
            outputs = await asyncio.gather(*(process.communicate() for process in processes))
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    results = [json.loads(out) for out, _ in outputs]
    times = {
        name: statistics.median(max(pair) for pair in zip(*(result[name] for result in results), strict=True))
        for name in ("ours", "gloo")
    }
    ratio = times["gloo"] / times["ours"]
    print(
        f"16 MiB at 100 Mbit/s: int8 {times['ours']:.3f} s, Gloo fp32 {times['gloo']:.3f} s, {ratio:.2f} times as fast"
    )
    assert results[0]["error"] < 0.01
    assert ratio >= 3.5
