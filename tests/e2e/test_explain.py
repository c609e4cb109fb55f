"""What is measured for a prediction, with real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


async def test_real_workers_train_what_is_predicted_and_leave_nothing(machine: Any, tmp_path: Path) -> None:
    sets = machine.settings(job__strategy="sharded", job__workers=2)

    def left() -> list[Path]:
        return list(tmp_path.glob("p2ptrain-explain-*"))

    process = await machine.start("up", *sets, "--dry-run", "--json", TMPDIR=str(tmp_path))
    assert await process.end() == 0, process.text
    shown = json.loads("\n".join(process.out))
    assert shown["step_s"] > 0.0
    assert shown["memory_bytes"] > 100 << 20, "a process with torch"
    assert not left()
