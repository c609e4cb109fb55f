"""``up`` trains a model in parts, stops, goes on, and leaves one model."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SPLIT = ["--set", "job.strategy=pipeline", "--set", "pipeline.stages=2"]


async def test_up_trains_a_split_model_stops_and_goes_on(machine: Any) -> None:
    steps = 60
    arguments = ["up", "--plain", "--state", str(machine.root), *machine.settings(job__steps=steps), *SPLIT]
    first = await machine.start(*arguments)
    await first.until(r"step +[2-5]\d/60 ")
    assert await first.interrupt() == 130
    code, said = await machine.run(*arguments)
    assert code == 0, said
    assert "from its last checkpoint" in said
    assert re.search(rf"step +{steps} of {steps}\n", said)
    command = next(line for line in said.splitlines() if "try it:" in line).split("p2ptrain ")[1]
    code, said = await machine.run(*shlex.split(command), "--tokens", "4")
    assert code == 0, said
