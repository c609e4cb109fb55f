"""``p2ptrain seed`` while it makes its first job."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.core.errors import Unreachable

Command = Callable[..., Any]


def test_ctrl_c_while_the_first_job_is_made_is_no_failure(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def first_job(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        async with asyncio.timeout(10):
            await asyncio.Event().wait()

    monkeypatch.setattr("p2ptrain.cli.seed._first_job", first_job)
    outcome = command("seed", "--port", "0", "--state", str(tmp_path))
    assert outcome.code == 0, outcome.err
    assert "error" not in outcome.err


def test_a_first_job_that_cannot_be_made_ends_the_seed_with_the_reason(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def first_job(*_: object, **__: object) -> None:
        raise Unreachable("cannot reach it", remedy="try")

    monkeypatch.setattr("p2ptrain.cli.seed._first_job", first_job)
    outcome = command("seed", "--port", "0", "--state", str(tmp_path))
    assert outcome.code == 3
    assert outcome.err.endswith("error: cannot reach it\n  → try\n")
    assert "the seed listens on" in outcome.err, "before its first job"
    monkeypatch.undo()
    assert not (tmp_path / "seed" / "seed.sqlite3-wal").exists(), "the record was closed"
