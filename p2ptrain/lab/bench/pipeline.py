"""``bench pipeline``: pipeline schedules over slow links, step by step in turn, beside their ideal.

The stages only take time. They are processes in a real chain over emulated links.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace

import numpy as np

from p2ptrain.core.texts import human_bytes, human_duration
from p2ptrain.core.world import Network
from p2ptrain.lab.bench.report import BenchReport, Case, Contender, per_cent
from p2ptrain.lab.bench.runner import Answer, Bench, Members, interleave
from p2ptrain.lab.bench.sockets import peer_id
from p2ptrain.lab.ring_member import LocalMember, local_view
from ring.chain import Payload
from ring.planning.schedule import (
    StageCosts,
    StageSchedule,
    plan_extended,
    plan_gpipe,
    plan_one_f_one_b,
    simulate_step_s,
)
from roles.compute_thread import ComputeThread
from roles.strategies.pipeline import StageRunner
from wire.emulate import EmulatedNetwork, LinkPreset
from wire.transport import TcpNetwork

TITLES = {"extended": "extended 1F1B", "1f1b": "1F1B", "gpipe": "GPipe"}


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """What to measure: ``steps`` of each schedule at each of ``round_trips_ms``; all hops have the same one."""

    stages: int
    micro_batches: int
    round_trips_ms: list[float]
    forward_s: float
    backward_s: float
    steps: int
    payload_bytes: int

    @property
    def busy_s(self) -> float:
        return self.micro_batches * (self.forward_s + self.backward_s)

    def schedules(self, round_trips_s: list[float]) -> dict[str, StageSchedule]:
        """Contender → its schedule, for the measured round trips of the hops."""
        period_s = self.forward_s + self.backward_s
        return {
            "extended": plan_extended(self.micro_batches, round_trips_s, period_s),
            "1f1b": plan_one_f_one_b(self.stages, self.micro_batches),
            "gpipe": plan_gpipe(self.stages, self.micro_batches),
        }

    def report(self) -> BenchReport:
        work = f"{self.micro_batches} micro-batches of {1e3 * self.forward_s:g} + {1e3 * self.backward_s:g} ms"
        title = f"pipeline · {self.stages} stages · {work} · payloads of {human_bytes(self.payload_bytes)}"
        report = BenchReport("pipeline", title, "busy", "{:.3f}".format, asdict(self))
        report.columns = {
            "found_s": ("FOUND", human_duration),
            "ideal": ("IDEAL", lambda found: "/".join(f"{part:.3f}" for part in found)),
            "reached": ("EXTENDED OF IDEAL", per_cent),
        }
        report.notes = [
            "busy/s: the share of a step that each stage computes; ideal: if only computing and links took time, for "
            "each schedule; found: a payload there and one back, without computing, at the slowest hop",
        ]
        return report


async def measure_pipeline(bench: Bench, plan: PipelinePlan, report: BenchReport) -> None:
    async with bench.members(plan.stages) as members:
        for round_trip_ms in plan.round_trips_ms:
            bench.progress(f"{round_trip_ms:g} ms: forming the chain")
            await _at(bench, members, plan, report, round_trip_ms)
    least = min(case.facts["reached"] for case in report.cases)
    report.facts = {"least_part_of_ideal": least}
    report.notes.append(f"extended 1F1B reaches {per_cent(least)} of its ideal at least")


async def _at(bench: Bench, members: Members, plan: PipelinePlan, report: BenchReport, round_trip_ms: float) -> None:
    ports = [answer["port"] for answer in await members.all("stage", part="listen", rtt_ms=round_trip_ms)]
    how: Answer = {"forward_s": plan.forward_s, "backward_s": plan.backward_s, "payload_bytes": plan.payload_bytes}
    first, *_ = await members.all("stage", part="form", ports=ports, **how)
    found_s: list[float] = first["round_trips_s"]
    costs = StageCosts.of_equal_stages(plan.forward_s, plan.backward_s, [round_trip_ms / 1e3] * (plan.stages - 1))
    schedules = plan.schedules(found_s)
    ideal_s = {name: simulate_step_s(schedule, costs) for name, schedule in schedules.items()}

    async def sample(name: str) -> float:
        schedule = schedules[name]
        order: Answer = {
            "micro_batches": schedule.micro_batches,
            "warm_ups": list(schedule.warm_ups),
        }
        # The first stage begins first and ends last.
        return float((await members.all("stage", part="run", seconds=ideal_s[name], **order))[0]["seconds"])

    case = Case(f"{round_trip_ms:g} ms", plan.busy_s, {name: Contender(title) for name, title in TITLES.items()})
    case.facts = {
        "round_trip_ms": round_trip_ms,
        "measured_s": found_s,
        "found_s": max(found_s),
        "ideal": [plan.busy_s / ideal_s[name] for name in schedules],
    }
    for name, schedule in schedules.items():
        in_flight = [schedule.count_in_flight(stage) for stage in range(plan.stages)]
        case.contenders[name].facts = {"ideal_s": ideal_s[name], "in_flight": in_flight}
    await interleave(report, case, sample, rounds=plan.steps, budget_s=0.0, progress=bench.progress)
    case.facts["reached"] = ideal_s["extended"] / case.contenders["extended"].median_s
    await members.all("stage", part="leave")


class TimedPart:
    """Sleeps instead of computing: ``forward_s`` and ``backward_s`` for one micro-batch."""

    def __init__(self, stage: int, stages: int, forward_s: float, backward_s: float, payload_bytes: int) -> None:
        self._is_first, self._is_last = stage == 0, stage == stages - 1
        self._forward_s, self._backward_s = forward_s, backward_s
        self._payload: Payload = np.zeros(payload_bytes, np.uint8)

    def forward(self, index: int, inputs: Payload | None) -> Payload | None:
        time.sleep(self._forward_s)
        return None if self._is_last else self._payload.copy()

    def backward(self, index: int, gradient: Payload | None) -> Payload | None:
        time.sleep(self._backward_s)
        return None if self._is_first else self._payload.copy()


class StageMember:
    """One member's stage, from ``listen`` to ``leave``. After that it may listen again, over another link."""

    def __init__(self, stage: int, stages: int) -> None:
        self._stage, self._stages = stage, stages
        self._compute = ComputeThread()
        self._local: LocalMember | None = None
        self._runner: StageRunner | None = None
        self._part: TimedPart | None = None

    async def listen(self, rtt_ms: float) -> Answer:
        """Listen for the previous stage, over a link with this round trip; 0: no emulation."""
        network: Network = TcpNetwork()
        if rtt_ms:
            network = EmulatedNetwork(network, LinkPreset("emulated", rtt_ms / 2), seed=self._stage)
        self._local = LocalMember(peer_id(self._stage), network, seed=self._stage)
        return {"port": await self._local.listen()}

    async def form(self, ports: list[int], forward_s: float, backward_s: float, payload_bytes: int) -> Answer:
        """Form the chain. Returns the measured round trip of each hop, with payloads."""
        assert self._local is not None
        payload_bytes = max(payload_bytes, 1)
        self._part = TimedPart(self._stage, self._stages, forward_s, backward_s, payload_bytes)
        view = local_view({peer_id(stage): port for stage, port in enumerate(ports)})
        chain = await self._local.form_chain(
            replace(view, heartbeat_s=0.5, death_s=30.0),
            activation_bytes=payload_bytes,
            gradient_bytes=payload_bytes,
            timeout_s=60.0,
        )
        self._runner = StageRunner(chain, self._compute)
        return {"round_trips_s": list(chain.round_trips_s)}

    async def run(self, micro_batches: int, warm_ups: list[int]) -> Answer:
        """Run one step. Returns its seconds."""
        assert self._runner is not None, "no chain was formed"
        assert self._part is not None
        schedule = StageSchedule(micro_batches, tuple(warm_ups))
        spent = await self._runner.run(schedule, self._part.forward, self._part.backward, patience_s=120.0)
        return {"seconds": spent.step_s}

    async def leave(self) -> Answer:
        """Leave the chain, after the last step of all stages."""
        assert self._local is not None
        await self._local.stop()
        self._local = self._runner = None
        return {}
