"""``p2ptrain seed`` while it makes its first job."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.schema import Profile
from p2ptrain.cli.seed import SeedOptions, _make_first_job, _warn_of_addresses
from p2ptrain.cluster.console import Console
from p2ptrain.core.errors import Unreachable
from wire.records import JobInfo

from .conftest import Command


def test_ctrl_c_while_the_first_job_is_made_is_no_failure(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def first_job(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        async with asyncio.timeout(10):
            await asyncio.Event().wait()

    monkeypatch.setattr("p2ptrain.cli.seed._make_first_job", first_job)
    outcome = command("seed", "--port", "0", "--state", str(tmp_path))
    assert outcome.code == 0, outcome.err
    assert "error" not in outcome.err


@pytest.mark.parametrize(
    ("host", "bound", "others", "told"),
    [
        ("0.0.0.0", "0.0.0.0", ["10.0.0.1"], ""),
        ("0.0.0.0", "0.0.0.0", ["10.0.0.1", "fd00::1"], "other addresses of this machine: fd00::1"),
        ("::", "::", [], "no address that other machines can use"),
        ("box", "127.0.1.1", ["10.0.0.1"], "box is 127.0.1.1 here, which only this machine reaches"),
        ("127.0.0.1", "127.0.0.1", [], ""),
    ],
)
def test_a_seed_says_where_others_reach_it(host: str, bound: str, others: list[str], told: str) -> None:
    lines: list[str] = []
    console: Any = SimpleNamespace(event=lambda level, text: lines.append(text))
    _warn_of_addresses(console, host, bound, others)
    assert len(lines) == bool(told)
    assert told in "".join(lines)


@pytest.mark.parametrize(
    ("state", "steps", "said"),
    [
        ("running", 9, "going on with job one (j1), step 4\n"),
        ("running", 10, "going on with job one (j1), step 4, with the settings that it began with\n"),
        ("done", 10, "job one (j1) is done at step 4: `p2ptrain jobs create` starts another one\n"),
    ],
)
async def test_a_seed_with_a_job_says_that_it_makes_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], state: str, steps: int, said: str
) -> None:
    job = JobInfo(id="j1", name="one", profile="", strategy="", state=state, created_at=0.0, steps_total=9, step=4)

    class Client:
        async def jobs(self) -> list[JobInfo]:
            return [job]

        async def job(self, _: str) -> tuple[JobInfo, str]:
            return job, Profile.model_validate({"job": {"steps": 9}}).to_spec()

    @asynccontextmanager
    async def operator(*_: object, **__: object) -> AsyncIterator[Client]:
        yield Client()

    monkeypatch.setattr("p2ptrain.cli.seed.operator", operator)
    wanted = Profile.model_validate({"job": {"steps": steps}})
    await _make_first_job(("127.0.0.1", 1), SeedOptions(profile="one"), wanted, Console())
    assert capsys.readouterr().err.endswith(said)


def test_a_first_job_that_cannot_be_made_ends_the_seed_with_the_reason(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def first_job(*_: object, **__: object) -> None:
        raise Unreachable("cannot reach it", remedy="try")

    monkeypatch.setattr("p2ptrain.cli.seed._make_first_job", first_job)
    outcome = command("seed", "--port", "0", "--state", str(tmp_path))
    assert outcome.code == 3
    assert outcome.err.endswith("error: cannot reach it\n  → try\n")
    assert "the seed listens on" in outcome.err, "before its first job"
    monkeypatch.undo()
    assert not (tmp_path / "seed" / "seed.sqlite3-wal").exists(), "the record was closed"
