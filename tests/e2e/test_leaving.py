"""Processes that are interrupted, killed or started without streams: none shows a traceback or is left running."""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
import sys
from collections.abc import AsyncIterator

import psutil
import pytest

from tests.e2e.conftest import DEADLINE_S, Machine, Process, gone

LONG = 100_000  # steps: never done within a test


def check_no_traceback(process: Process) -> None:
    assert "Traceback" not in process.text, process.text
    assert "a mistake in this program" not in process.text, process.text


async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


@pytest.fixture
async def taken() -> AsyncIterator[int]:
    """A port that another program has, which says nothing until the caller hangs up."""
    server = await asyncio.start_server(silence, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


# ---------------------------------------------------------------------------------------------- leaving, at any moment


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "number"),
    [("waiting for the seed", signal.SIGTERM), ("building the model", signal.SIGINT)],
)
async def test_a_worker_leaves_while_it_begins(
    machine: Machine, taken: int, moment: str, number: signal.Signals
) -> None:
    if moment == "waiting for the seed":
        machine.port = taken
    else:
        await machine.seed(*machine.settings(job__steps=LONG, job__workers=1))
    worker = await machine.join()
    await worker.until(moment)
    worker.process.send_signal(number)
    assert await worker.end() == 0
    check_no_traceback(worker)
    assert worker.text.endswith("· left")


@pytest.mark.slow
async def test_a_second_ctrl_c_does_not_wait_for_the_step(machine: Machine) -> None:
    slow = {"batch__micro_batches": 4096, "job__workers": 1, "job__steps": LONG}  # a step of minutes
    await machine.seed(*machine.settings(**slow))
    worker = await machine.join()
    await machine.job_until(lambda item: item["state"] == "running")
    worker.process.send_signal(signal.SIGINT)
    await worker.until("press Ctrl.C again")
    assert await worker.interrupt() == 130
    check_no_traceback(worker)


@pytest.mark.slow
async def test_up_leaves_nobody_behind(machine: Machine) -> None:
    alone = ["--workers", "1"]  # the shipped profile begins with two: it shall not wait for the second
    up = await machine.start("up", "--json", *alone, "--state", str(machine.root), *machine.settings(job__steps=LONG))
    await up.until("created job")
    children = psutil.Process(up.process.pid).children(recursive=True)
    assert await up.interrupt() == 130, up.text
    check_no_traceback(up)
    assert json.loads("\n".join(up.out))["state"] == "interrupted", "one document, and nothing else"
    assert await gone(children)


@pytest.mark.slow
async def test_children_leave_when_their_parent_is_killed(machine: Machine, real_starts: None) -> None:
    settings = machine.settings(job__steps=LONG)
    up = await machine.start("up", "--workers", "1", "--plain", "--state", str(machine.root), *settings)
    await up.until("step")
    children = psutil.Process(up.process.pid).children(recursive=True)
    assert len(children) == 2
    await up.kill()
    assert await gone(children)
    for log in (machine.root / "logs").iterdir():
        assert "Traceback" not in log.read_text()


# ------------------------------------------------------------------------------------------------------- odd terminals


async def test_closed_standard_streams(machine: Machine) -> None:
    seed = await machine.seed("--no-job")
    for closed in ("2>&-", "<&- >&- 2>&-"):
        program = f"{shlex.quote(sys.executable)} -m p2ptrain peers list --seed 127.0.0.1:{machine.port} {closed}"
        process = await asyncio.create_subprocess_exec("sh", "-c", program, stdout=asyncio.subprocess.PIPE)
        async with asyncio.timeout(DEADLINE_S):
            output, _ = await process.communicate()
        assert process.returncode == 0, (closed, output)
    assert await seed.interrupt() == 0
