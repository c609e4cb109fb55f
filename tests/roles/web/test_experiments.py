"""Experiments over the HTTP API: on the seed's workers, one at a time, and after a restart."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.lab.experiments.endpoints import Experiments
from p2ptrain.lab.experiments.grid import plan_of
from p2ptrain.lab.experiments.results import Results
from tests.roles.web.conftest import api_of

GRID: dict[str, Any] = {
    "name": "small",
    "set": {"job.steps": 3, "batch.micro_batches": 4, "validation": {"every": 3, "batches": 1}, "checkpoint.every": 0},
    "axes": {"batch.micro_batch_sequences": [1, 2]},
}  # fmt: skip


async def done(experiments: Experiments) -> None:
    async with asyncio.timeout(30):
        while experiments._work:
            await experiments._work.settle(timeout_s=30)


async def test_an_experiment_runs_is_analyzed_and_goes_on_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with api_of(tmp_path) as api:
        for axes in ({"link.preset": ["lan", "wan"]}, {"straggler": [2]}, {"attack": ["noise"]}):
            status, said, _ = await api.ask("POST", "experiments", {"grid": GRID | {"axes": axes}})
            assert status == 422
            assert "p2ptrain experiment run" in said["error"]["remedy"]
        status, said, _ = await api.ask("POST", "experiments", {"grid": "name = 'x'\n[axes]\nbase = ["})
        assert (status, said["error"]["code"]) == (422, "invalid_value")
        status, said, _ = await api.ask("POST", "experiments/none/analyze", {})
        assert (status, said["error"]["code"]) == (404, "unknown-experiment")
        for _ in range(2):
            await api.cluster.join().joined.wait()
        experiments = api.experiments
        begun = await api.done("POST", "experiments", {"grid": GRID}, status=201)
        assert (begun["id"], begun["state"], begun["planned"]) == ("small", "running", 2)
        status, said, _ = await api.ask("POST", "experiments", {"grid": GRID | {"name": "other"}})
        assert (status, said["error"]["code"]) == (409, "busy")
        await done(experiments)
        assert (await api.done("GET", "experiments/small"))["state"] == "done"
        summary = (await api.done("POST", "experiments/small/analyze", {}))["summary"]
        assert [cell["states"] for cell in summary["cells"]] == [{"done": 1}, {"done": 1}]

        root = tmp_path / "experiments"
        shutil.copytree(root / "small", root / "whole")
        named = (root / "whole" / "grid.json").read_text().replace('"small"', '"whole"')
        (root / "whole" / "grid.json").write_text(named)
        (root / "small" / "results.csv").unlink()  # as if it had been interrupted
        later, states = Experiments(root, api.cluster.operator), list[dict[str, str]]()
        carry_out = later._carry_out

        async def noted(results: Results) -> None:
            states.append({name: info.state for name, info in later.infos.items()})
            await carry_out(results)

        later._carry_out = noted  # type: ignore[method-assign]
        async with later.serving():
            await done(later)
        assert states == [{"small": "interrupted", "whole": "done"}], "all are listed before one goes on"
        assert later.infos["small"].state == "done"
        results = Results(root / "small", plan_of(GRID, "", None))
        assert not results.missing()
        results.close()
