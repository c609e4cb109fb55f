"""Why a child process ended, told by its parent."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from p2ptrain.cli.local_cluster import Child


def old(directory: Path) -> Path:
    """The log that an earlier child left."""
    log = directory / "log"
    log.write_text("error: of an earlier start\n  → its remedy\n")
    return log


async def child(log: Path, *arguments: str) -> Child:
    """A child that ended by itself."""
    made = await Child.start("one", list(arguments), log)
    await made.process.wait()
    return made


async def test_its_own_error_and_remedy(tmp_path: Path) -> None:
    failed = (await child(old(tmp_path), "sed")).failed("it did not start")
    assert failed.message == "it did not start: no such command: sed"
    assert failed.remedy == f"did you mean seed? `p2ptrain --help` lists what there is; its log is {tmp_path / 'log'}"


async def test_the_error_of_an_earlier_start_is_not_its_own(tmp_path: Path) -> None:
    failed = (await child(old(tmp_path), "seed", "--help")).failed("it ended")
    assert (failed.message, failed.remedy) == ("it ended", f"its log is {tmp_path / 'log'}")


async def test_the_signal_that_killed_it(tmp_path: Path) -> None:
    made = await Child.start("one", ["seed", "--no-job", "--port", "0", "--state", str(tmp_path)], tmp_path / "log")
    made.process.send_signal(signal.SIGKILL)
    await made.process.wait()
    failed = made.failed("it ended")
    assert failed.message == "it ended: it was killed by SIGKILL"
    assert failed.remedy == f"the machine may have run out of memory; its log is {tmp_path / 'log'}"


async def test_a_line_of_many_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    talks = tmp_path / "talks"
    talks.write_text(f"#!{sys.executable}\nprint('x' * 1_000_000)\n")
    talks.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(talks))
    made = await Child.start("one", [], tmp_path / "log", listen=True)
    assert made.process.stdout is not None
    assert len(await made.process.stdout.readline()) == 1_000_001
    await made.process.wait()
