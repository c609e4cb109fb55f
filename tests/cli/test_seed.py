"""``p2ptrain seed`` while it makes its first job."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2ptrain.cli.seed import _tell_of_addresses
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
def test_a_seed_says_where_others_reach_it(
    monkeypatch: pytest.MonkeyPatch, host: str, bound: str, others: list[str], told: str
) -> None:
    lines: list[str] = []
    console: Any = SimpleNamespace(event=lambda level, text: lines.append(text))
    monkeypatch.setattr("p2ptrain.cli.seed.addresses_for_others", lambda: others)
    _tell_of_addresses(console, host, bound)
    assert len(lines) == bool(told)
    assert told in "".join(lines)


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
