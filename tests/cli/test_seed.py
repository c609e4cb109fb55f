"""``p2ptrain seed`` while it begins: what happens between listening and being ready."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.core.errors import Unreachable
from wire.client import SeedClient
from wire.transport import TcpNetwork

Command = Callable[..., Any]


def test_ctrl_c_while_the_first_job_is_made_is_no_failure(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def first_job(address: tuple[str, int], *_: object, **__: object) -> None:
        client = await SeedClient.connect(TcpNetwork(), *address, name="test")
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await anext(client.updates())  # raises when the seed has gone
        finally:
            await client.close()

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
    assert (outcome.code, outcome.err) == (3, "error: cannot reach it\n  → try\n")
    monkeypatch.undo()
    assert not (tmp_path / "seed" / "seed.sqlite3-wal").exists(), "the record was closed"
