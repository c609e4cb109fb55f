"""A hostile, careless or unlucky user, with real processes: the exit code, the cause, the remedy, and what lives on.

Nothing here may ever show a traceback, and nothing may be left running.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest

from configs.loader import load

DEADLINE_S = 60.0
LONG = 100_000  # steps: never done within a test


async def refused(machine: Any, *arguments: str, code: int, cause: str, remedy: str, **environment: str) -> None:
    """Run a command that must fail in exactly this way, with nothing on standard output."""
    process = await machine.start(*arguments, **environment)
    outcome = await process.end(), process.text
    assert outcome[0] == code, outcome
    assert "Traceback" not in process.text
    assert process.out == []
    assert process.lines[-2:] == [f"error: {cause}", f"  → {remedy}"], outcome


async def clean(process: Any) -> str:
    """What an ended process said, without a traceback."""
    assert "Traceback" not in process.text, process.text
    assert "a mistake in this program" not in process.text, process.text
    return str(process.text)


async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


@pytest.fixture
async def taken() -> AsyncIterator[int]:
    """A port that another program has, which says nothing until the caller hangs up."""
    server = await asyncio.start_server(silence, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


# ---------------------------------------------------------------------------------- ports, directories, wrong machines


async def test_two_of_a_kind_in_one_directory(machine: Any) -> None:
    seed = await machine.seed(*machine.settings(job__steps=LONG, job__workers=1))
    cause = f"another seed is running on {machine.root}/seed"
    remedy = "stop it, or give this one another directory with --state"
    where = ["--port", "0", "--state", str(machine.root)]
    await refused(machine, "seed", *where, code=2, cause=cause, remedy=remedy)
    cause, remedy = f"the seed did not start: {cause}", f"{remedy}; its log is {machine.root}/logs/seed.log"
    await refused(machine, "up", *where, code=2, cause=cause, remedy=remedy)
    worker = await machine.join("--slot", "1")
    await worker.until("step")
    slot = ["join", f"127.0.0.1:{machine.port}", "--state", str(machine.root), "--slot", "1"]
    cause, remedy = f"worker-1 in {machine.root} is in use by another process", "stop it, or use another --state"
    await refused(machine, *slot, code=2, cause=cause, remedy=remedy)
    for process in (worker, seed):
        assert await process.interrupt() == 0
        await clean(process)


# --------------------------------------------------------------------------------------------- jobs that cannot be done

HUGE = {"device__kind": "cpu", "model__hidden_size": 8192, "model__layers": 64, "model__intermediate_size": 32768}


@pytest.mark.slow
async def test_a_job_that_cannot_be_done_fails_with_its_reason_and_the_worker_does_the_next_one(machine: Any) -> None:
    seed, worker = await machine.seed("--no-job"), await machine.join()
    data = machine.root / "data"
    data.mkdir()
    (data / "short.txt").write_text("short\n")
    few = "they fill 0 windows of 32; give at least 65 tokens of text, or a smaller data.sequence_tokens"
    bad: list[tuple[dict[str, Any], str]] = [
        ({"data__path": data / "short.txt"}, f"data.path = '{data}/short.txt' has too few tokens: {few}"),
        (HUGE, "needs 1.3 TiB of memory, and cpu (1 thread) has "),
        ({"device__kind": "mps" if sys.platform != "darwin" else "cuda"}, "this machine has no "),
    ]
    for changes, reason in bad:
        failed = await ended(machine, await created(machine, job__workers=1, **changes))
        assert failed["state"] == "failed"
        assert reason in failed["reason"]
        assert "; " in failed["reason"], "and a remedy"
        await worker.until(re.escape(f"✗ {failed['reason'].rstrip('…')}"))
    assert (await ended(machine, await created(machine, job__workers=1, job__steps=2)))["state"] == "done"
    for process in (worker, seed):
        assert await process.interrupt() == 0
        await clean(process)


async def created(machine: Any, **changes: Any) -> str:
    """The id of a new job."""
    profile = load("tiny", {}, [text for text in machine.settings(**changes) if text != "--set"]).profile
    return str((await machine.ask("jobs.create", name="x", profile="tiny", spec=profile.to_spec()))["job"])


async def ended(machine: Any, job: str) -> dict[str, Any]:
    """The record of a job as soon as it is over."""
    result: dict[str, Any] = await machine.job_until(
        lambda item: item["id"] == job and item["state"] in ("done", "failed", "cancelled"), job=job
    )
    return result


# ---------------------------------------------------------------------------------------------- leaving, at any moment


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "number"),
    [("waiting for the seed", signal.SIGTERM), ("building the model", signal.SIGINT), ("step", signal.SIGTERM)],
)
async def test_a_worker_leaves_at_any_moment(machine: Any, taken: int, moment: str, number: signal.Signals) -> None:
    if moment != "step":
        machine.warm = None  # while libraries load, too
    if moment == "waiting for the seed":
        machine.port = taken
    else:
        await machine.seed(*machine.settings(job__steps=LONG, job__workers=1))
    worker = await machine.join()
    await worker.until(moment)
    worker.process.send_signal(number)
    assert await worker.end() == 0
    assert (await clean(worker)).endswith("· left")


@pytest.mark.slow
async def test_a_second_ctrl_c_does_not_wait_for_the_step(machine: Any) -> None:
    slow = {"batch__micro_batches": 4096, "job__workers": 1, "job__steps": LONG}  # a step of minutes
    await machine.seed(*machine.settings(**slow))
    worker = await machine.join()
    await machine.job_until(lambda item: item["state"] == "running")
    worker.process.send_signal(signal.SIGINT)
    await worker.until("press Ctrl.C again")
    assert await worker.interrupt() == 130
    await clean(worker)


@pytest.mark.slow
async def test_up_leaves_nobody_behind(machine: Any) -> None:
    alone = ["--workers", "1"]  # the shipped profile begins with two: it shall not wait for the second
    up = await machine.start("up", "--json", *alone, "--state", str(machine.root), *machine.settings(job__steps=LONG))
    await up.until("created job")
    children = psutil.Process(up.process.pid).children(recursive=True)
    assert await up.interrupt() == 130, up.text
    await clean(up)
    assert json.loads("\n".join(up.out))["state"] == "interrupted", "one document, and nothing else"
    assert await gone(children)


@pytest.mark.slow
async def test_children_leave_when_their_parent_is_killed(machine: Any) -> None:
    settings = machine.settings(job__steps=LONG)
    up = await machine.start("up", "--workers", "1", "--plain", "--state", str(machine.root), *settings)
    await up.until("step")
    children = psutil.Process(up.process.pid).children(recursive=True)
    assert len(children) == 2
    await up.kill()
    assert await gone(children)
    for log in (machine.root / "logs").iterdir():
        assert "Traceback" not in log.read_text()


async def gone(processes: list[psutil.Process]) -> bool:
    """Whether all end by themselves."""
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, timeout=DEADLINE_S)
    for process in alive:
        process.kill()
    return not alive


# ------------------------------------------------------------------------------------------------------- odd terminals


async def test_closed_standard_streams(machine: Any) -> None:
    seed = await machine.seed("--no-job")
    for closed in ("2>&-", "<&- >&- 2>&-"):
        program = f"{shlex.quote(sys.executable)} -m p2ptrain peers list --seed 127.0.0.1:{machine.port} {closed}"
        process = await asyncio.create_subprocess_exec("sh", "-c", program, stdout=asyncio.subprocess.PIPE)
        async with asyncio.timeout(DEADLINE_S):
            output, _ = await process.communicate()
        assert process.returncode == 0, (closed, output)
    assert await seed.interrupt() == 0
