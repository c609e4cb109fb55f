"""The time of a step in simulated clusters without faults: ``python -m tests.sim.step_times 2 8 64``.

The links have the latency and the rate of ``LINK``, the model ``NUMEL`` parameters. 256 workers take half an hour.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
from typing import Any
from unittest import mock

from configs.schema import Profile
from ring.order import LinkQuality, step_s
from roles.sim import machine
from roles.sim.cluster import SEED, Simulation
from roles.sim.machine import SimLoop
from roles.sim.watching import watched
from wire.emulate import EmulatedNetwork, LinkPreset
from wire.memory import MemoryNetwork

LINK = LinkQuality(latency_s=1e-3, bandwidth_bps=1e8)
NUMEL = 1 << 16
CALL_S = 0.002


class Links(MemoryNetwork):
    """Every host reaches the seed at once, and the others over ``LINK``."""

    def at(self, host: str) -> Any:
        near, far = LinkPreset("near", 0.0), LinkPreset("far", LINK.latency_s * 1e3, rate_bps=LINK.bandwidth_bps or 0.0)
        return EmulatedNetwork(super().at(host), lambda other, port: near if SEED in (host, other) else far, 1)


def rows_of(workers: int, *, steps: int, updates: int = 1, **tables: Any) -> list[dict[str, Any]]:
    """The record of each step. ``updates``: micro-batches of a worker in a step."""
    defaults: dict[str, Any] = {
        "job": {"steps": steps, "workers": workers, **tables.pop("job", {})},
        "batch": {"micro_batches": workers * updates},
        "validation": {"every": 0},
        "checkpoint": {"every": 0},
        "ring": {"order": "joined", "streams": 1},
    }
    loop = SimLoop()
    simulation = Simulation(loop, Profile.model_validate(defaults | tables), [], 1, peers=workers, verbose=False)
    simulation.network = Links()

    async def main() -> list[dict[str, Any]]:
        simulation.seed.start()
        await simulation.create_job()
        for each in simulation.workers:
            each.call_s = CALL_S
            each.start()
        while simulation.observer.job_state not in ("done", "failed"):  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(5)
        rows = (await simulation.ask("metrics.history", job=simulation.job, after_step=0, limit=200))["rows"]
        simulation.close()
        await asyncio.sleep(1)
        return list(rows)

    small = mock.patch.object(machine, "NUMEL", NUMEL)
    with small, watched(simulation, random.Random(1)), asyncio.Runner(loop_factory=lambda: loop) as runner:
        rows = runner.run(main())
    assert not simulation.complaints, simulation.complaints
    return rows


def predicted_and_simulated_s(workers: int, *, steps: int = 3, updates: int = 1, **tables: Any) -> tuple[float, float]:
    """Seconds of an update. What is predicted is the exchange; the computing is as simulated."""
    rows = rows_of(workers, steps=steps, updates=updates, **tables)
    assert len(rows) == steps
    means = (statistics.mean(row[name] for row in rows) / 1e3 for name in ("compute_ms", "step_ms"))
    compute_s, took_s = (seconds / updates for seconds in means)
    return step_s(workers, LINK, 4 * NUMEL, compute_s, updates=updates), took_s


if __name__ == "__main__":
    for count in map(int, sys.argv[1:]):
        predicted, took = predicted_and_simulated_s(count)
        print(f"{count} workers: predicted {predicted * 1e3:.0f} ms, simulated {took * 1e3:.0f} ms", flush=True)
