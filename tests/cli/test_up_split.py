"""What ``p2ptrain up --split`` starts its workers with."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.cli import up_split


@pytest.mark.parametrize(("cores", "threads"), [(8, "2"), (2, "1"), (None, "1")])
def test_stages_share_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int | None, threads: str
) -> None:
    started: list[list[str]] = []

    async def start(name: str, arguments: list[str], log: Path) -> Any:
        started.append(arguments)

    monkeypatch.setattr(up_split.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(up_split.Child, "start", start)
    cluster = up_split.SplitCluster(3, 1, tmp_path, "", "", tmp_path, 7000, "")
    asyncio.run(up_split._start_worker(cluster, 4))
    [arguments] = started
    assert arguments[arguments.index("--threads") + 1] == threads
