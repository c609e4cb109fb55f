"""Measures on this machine what ``ring.prediction`` needs: a micro-batch, an update, and the loopback.

Each member is a process of its own, and all are measured at the same time, so that they share cores and memory as
workers do.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

from ring.local import LocalMember, local_view
from ring.order import LinkQuality
from ring.prediction import Calibration

if TYPE_CHECKING:
    from configs.schema import Profile
    from p2ptrain.cli.bench.runner import Bench, Members

MOST_AT_ONCE = 4
"""Members that are measured at once. More workers share the cores in proportion."""
MICRO_BATCHES = 2
STEPS, WARM_STEPS, ENOUGH_S = 12, 2, 2.0
"""Of each member: steps that are measured, at most, and before; after so many seconds three are enough."""
SMALL_BYTES, LARGE_BYTES = 256, 8 << 20

Answer = dict[str, Any]


# -------------------------------------------------------------------------------------------------------- the conductor


async def measure(bench: Bench, profile: Profile, workers: int, threads: int) -> tuple[Calibration, LinkQuality | None]:
    """Measure the profile's model with ``workers`` members, each with so many threads. Raises ``P2PTrainError``.

    Returns medians over the members, of which ``flops`` is a thread's and ``base_bytes`` all that a member's process
    held at most; and the link between two of them, None for one member.
    """
    from p2ptrain.cli.bench.network import RingPlan, form_ring

    count, tables = min(workers, MOST_AT_ONCE), profile.model_dump()
    tables["job"] |= {"strategy": "sync", "workers": 1, "exact": False}
    tables["batch"]["micro_batches"] = MICRO_BATCHES
    tables |= {name: {} for name in ("robust", "ring", "federated", "privacy", "pipeline")}
    tables["validation"] = {"every": 0}
    spec = type(profile).model_validate(tables).to_spec()
    async with bench.members(count, threads=threads) as members:
        bench.progress("measuring the loopback")
        await form_ring(bench, members, RingPlan())
        loopback = await _loopback(members) if count > 1 else None
        bench.progress("loading torch, the model and the data, and training some steps")
        told = await members.all("alone", spec=spec, threads=threads, seconds=ENOUGH_S)
    names = ("micro_batch_s", "update_s", "flops", "peak_bytes")
    micro_batch_s, update_s, flops, peak_bytes = (statistics.median(each[name] for each in told) for name in names)
    return Calibration(micro_batch_s, update_s, flops / threads, int(peak_bytes)), loopback


async def _loopback(members: Members) -> LinkQuality:
    """From the time of a small all-reduce, which takes n - 1 hops, and of a large one."""
    size, took_s = len(members), list[float]()
    for size_bytes in (SMALL_BYTES, LARGE_BYTES):
        await members.all("prepare", dtype="float32", numel=size_bytes // 4, codec="fp32", piece_bytes=1)
        samples = [await members.all("sample", contender="ring", repeat=4) for _ in range(7)]
        took_s.append(statistics.median(max(answer["seconds"] for answer in sample) for sample in samples))
    latency_s, large_s = took_s[0] / (size - 1), took_s[1]
    return LinkQuality(latency_s, 8 * 2 * (size - 1) / size * LARGE_BYTES / max(large_s - latency_s, 1e-6))


# ------------------------------------------------------------------------------------------------------------ a member


async def alone(local: LocalMember, spec: str, threads: int) -> Answer:
    """Train some steps in a ring of one. Returns medians in seconds: of a micro-batch, and of the rest of a step."""
    from p2ptrain.cli.bench.training import RING, Training
    from p2ptrain.compute.device import compute_flops

    session = await local.form(local_view({local.peer_id: 1}))
    training = await Training.build(spec, session, threads=threads)
    await training.train(RING, 0, WARM_STEPS)
    passes_s, rests_s, began = list[float](), list[float](), time.monotonic()
    for step in range(WARM_STEPS, WARM_STEPS + STEPS):
        answer = await training.train(RING, step, 1)
        passes_s.append(answer["computed_s"] / MICRO_BATCHES)
        rests_s.append(answer["seconds"][0] - answer["computed_s"])
        if time.monotonic() - began > ENOUGH_S and len(passes_s) >= 3:
            break
    return {
        "micro_batch_s": statistics.median(passes_s),
        "update_s": statistics.median(rests_s),
        "peak_bytes": _peak_bytes(),
        "flops": compute_flops("cpu", threads),
    }


def _peak_bytes() -> int:
    """The most memory that this process had so far; 0 where the system does not tell."""
    if os.name != "posix":
        return 0
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most
