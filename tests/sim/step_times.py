"""The time of a step in simulated clusters without faults: ``python -m tests.sim.step_times 2 8 64``.

The links have the latency and the rate of ``LINK``, the model ``NUMEL`` parameters. 256 workers take half an hour.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from typing import Any
from unittest import mock

from configs.schema import Profile
from p2ptrain.core.footprint import ModelSizes
from p2ptrain.lab.memory import MemoryNetwork
from p2ptrain.lab.sim import machine
from p2ptrain.lab.sim.cluster import SEED, Simulation
from p2ptrain.lab.sim.machine import SimLoop
from ring.planning.measurements import CandidateWorker, DescribedCluster, LinkQuality
from ring.planning.prediction import Calibration, TrainingMethod, predict
from ring.planning.ring_plan import RingOptions
from ring.planning.workloads import ModelShape, TrainingWorkload
from tests.ring.planning.test_prediction import step_s
from wire.emulate import EmulatedNetwork, LinkPreset, preset_named

LINK = LinkQuality(latency_s=1e-3, bandwidth_bps=1e8)
NUMEL = 1 << 16
CALL_S = 0.002


class Links(MemoryNetwork):
    """Every host reaches the seed at once, and the others over ``far``."""

    def __init__(self, far: LinkPreset) -> None:
        super().__init__()
        self._far = far

    def at(self, host: str) -> Any:
        near = LinkPreset("near", 0.0)
        return EmulatedNetwork(super().at(host), lambda other, port: near if SEED in (host, other) else self._far, 1)


PLAIN = LinkPreset("far", LINK.latency_s, rate_bps=LINK.bandwidth_bps or 0.0)


def rows_of(
    workers: int, *, steps: int, updates: int = 1, far: LinkPreset = PLAIN, numel: int = NUMEL, **tables: Any
) -> list[dict[str, Any]]:
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
    simulation.network = Links(far)

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

    small = mock.patch.object(machine, "NUMEL", numel)
    with small, asyncio.Runner(loop_factory=lambda: loop) as runner:
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


def over_preset_s(workers: int, preset: str, *, numel: int, codec: str) -> tuple[float, float]:
    """The same by ``ring.planning.prediction``, over an emulated link, with four streams and sub-chunks of 256 KiB."""
    far, chunks, streams = preset_named(preset), 256 << 10, 4
    ring = {"order": "joined", "streams": streams, "codec": codec, "sub_chunk_bytes": chunks}
    rows = rows_of(workers, steps=6, far=far, numel=numel, ring=ring)[1:]
    took_s, compute_s = (statistics.median(row[name] for row in rows) / 1e3 for name in ("step_ms", "compute_ms"))
    shape = ModelShape.of(ModelSizes((4 * numel,), (0,)), 64, 128, 256)
    there = tuple(CandidateWorker(str(rank), str(rank), flops=1.0) for rank in range(workers))
    links = {(one.id, other.id): LinkQuality.of_preset(far) for one in there for other in there if one is not other}
    training = TrainingWorkload(shape, 1, 1, tokens=256, sequence_tokens=128, micro_batches=workers)
    method = TrainingMethod("sync", training, codec, RingOptions("joined", streams, chunks), buckets=4 * numel >> 20)
    cluster = DescribedCluster(there, links, emulated=True, burst_bytes=far.burst_bytes)
    return predict(method, cluster, Calibration(compute_s, 0.0, 1.0)).step_s, took_s


if __name__ == "__main__":
    for count in map(int, sys.argv[1:]):
        predicted, took = predicted_and_simulated_s(count)
        print(f"{count} workers: predicted {predicted * 1e3:.0f} ms, simulated {took * 1e3:.0f} ms", flush=True)
