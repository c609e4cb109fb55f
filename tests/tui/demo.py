"""A scripted cluster to look at: for screenshots and tests. Deterministic: no clock, no chance.

python -m tests.tui.demo docs/tui.svg        what the README shows, and
python -m tests.tui.demo --serving --view 6 --size 116x20 docs/tui-serving.svg
python -m tests.tui.demo --serving --size 100x30 --chat docs/tui-chat.svg
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import math
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from p2ptrain.core.errors import ConfigError, ConnectionLost, P2PTrainError, Refused
from tests.tui.demo_serving import drafters, noise, verifier, writer
from tui.model import LinkPhase, RecordStore, SeedConnection
from tui.source import Messages, OperatorActions, backoff_s
from wire.messages import GpuInfo, Update
from wire.records import (
    CheckpointInfo,
    ClusterInfo,
    EventInfo,
    JobInfo,
    MetricRow,
    PartInfo,
    PeerInfo,
    RecoveryInfo,
    ServingInfo,
)
from wire.schema import Record

NAMES = ("atlas", "borea", "castor", "delos", "elara", "fjord", "gaia", "helios")
DEVICES = (
    ("cuda:0 NVIDIA RTX 4070", 12 << 30, 0.92),
    ("cpu (16 threads)", 32 << 30, None),
    ("mps Apple M3", 24 << 30, 0.81),
    ("cuda:0 NVIDIA RTX 3060", 12 << 30, 0.88),
    ("cpu (8 threads)", 16 << 30, None),
)
EPOCH = 1_750_000_000.0
STEPS_TOTAL = 2000
STEP_S = 0.8
TOKENS_PER_STEP = 32_768
SAVE_EVERY = 200
VALIDATE_EVERY = 50
PROFILES = {
    "local": "local      the tiny model over slow links",
    "small": "small      a model for a GPU in each machine",
    "tiny": "tiny       the demo: a model that learns Python in a few minutes",
}
SEEN_S = 90
"""Of which a screenshot has the pace of those that write."""


class DemoClock:
    """A clock that stands still until it is told to go on."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return EPOCH + self.time


class DemoCluster:
    """What a seed with ``peers`` workers would tell. From three on, the last one follows the ring from outside.

    ``serving``: a verifier and two drafters are there, too, and write text.
    """

    def __init__(self, peers: int = 6, *, step: int = 640, serving: bool = False) -> None:
        self.size = peers
        self.serves = serving
        self.step = step
        self.state = "running"
        self.generation = 4
        self.event_id = 0

    # ------------------------------------------------------------------------------------------------------- records

    def _members(self) -> int:
        return self.size - 1 if self.size >= 3 else self.size

    def _shares(self) -> list[int]:
        """16 micro-batches: those with a GPU take more."""
        speeds = [3 if DEVICES[index % len(DEVICES)][2] else 1 for index in range(self._members())]
        counts = [16 * speed // sum(speeds) for speed in speeds]
        for index in range(16 - sum(counts)):
            counts[index % len(counts)] += 1
        return counts

    def wall(self, step: int) -> float:
        return EPOCH + step * STEP_S

    def cluster(self) -> ClusterInfo:
        return ClusterInfo("c0ffee", "attic", "0.1.0", "192.168.1.20:7337", EPOCH - 300, self.size, 3)

    def peer(self, index: int) -> PeerInfo:
        device, memory, load = DEVICES[index % len(DEVICES)]
        ranked = index < self._members()
        name = NAMES[index] if index < len(NAMES) else f"{NAMES[index % len(NAMES)]}-{index // len(NAMES) + 1}"
        flow_bps = 8 * 2.4e6 * (1 + 0.1 * noise("flow", index, self.step)) if ranked else 0.0
        trains = {"running": "training", "paused": "held"}.get(self.state, "idle")
        busy = None if load is None else load + 0.05 * noise("gpu", index, self.step) if ranked else 0.03
        return PeerInfo(
            id=f"peer{index}",
            name=name,
            roles=["worker"],
            device=device,
            state=trains if ranked else "following",
            address=f"192.168.1.{21 + index}:7338",
            joined_at=EPOCH + 7 * index,
            heartbeat_age_s=0.5 + 0.4 * noise("age", index, self.step),
            rtt_ms=0.4 + 11 * abs(noise("rtt", index)) + 0.1 * noise("rtt", index, self.step),
            in_bps=flow_bps,
            out_bps=flow_bps * 1.02,
            tokens_per_s=TOKENS_PER_STEP / STEP_S / self._members() if trains == "training" and ranked else 0.0,
            memory_bytes=int(memory * (0.55 + 0.3 * noise("memory", index))) if ranked else memory // 9,
            memory_total_bytes=memory,
            gpu_load=busy,
            gpus=[] if busy is None else [GpuInfo(0, device, busy, memory // 2, memory, 61.0, 40.0 + 300 * busy)],
            job="j1" if ranked else "",
            rank=index if ranked else None,
            generation=self.generation if ranked else 0,
            step=self.step if ranked else 0,
            share=self._shares()[index] if ranked else 0,
        )

    def edges(self) -> list[tuple[float, float]]:
        """Latency and bandwidth from each member to the next; none where there is no ring."""
        members = self._members()
        if members < 2:
            return []
        return [
            (0.2 + 9 * abs(noise("far", index)), 1e9 * 10 ** -abs(2 * noise("wide", index))) for index in range(members)
        ]

    def row(self, step: int) -> MetricRow:
        truth = 1.9 + 3.6 * math.exp(-step / 260)
        compute = 560 + 30 * noise("compute", step)
        communicate = 190 + 25 * noise("communicate", step)
        wait = 50 + 20 * noise("wait", step)
        return MetricRow(
            job="j1",
            step=step,
            wall=self.wall(step),
            loss=truth + 0.10 * noise("loss", step),
            val_loss=truth + 0.09 if step % VALIDATE_EVERY == 0 else None,
            lr=3e-4 * min(1.0, step / 100) * (0.55 + 0.45 * math.cos(math.pi * step / STEPS_TOTAL)),
            grad_norm=0.8 + 0.2 * noise("norm", step),
            tokens_per_s=TOKENS_PER_STEP / (compute + communicate + wait) * 1000,
            step_ms=compute + communicate + wait,
            compute_ms=compute,
            communicate_ms=communicate,
            wait_ms=wait,
            members=self._members(),
            generation=self.generation,
        )

    def job(self) -> JobInfo:
        row = self.row(self.step)
        state = {
            f.name: getattr(row, f.name) for f in dataclasses.fields(row) if f.name not in ("job", "wall", "members")
        }
        state |= {"val_loss": self.row(self.step - self.step % VALIDATE_EVERY).val_loss}
        return JobInfo(
            id="j1",
            name="stdlib-30m",
            profile="small",
            strategy="sync",
            state=self.state,
            created_at=EPOCH,
            started_at=EPOCH + 9,
            steps_total=STEPS_TOTAL,
            members=[f"peer{index}" for index in range(self._members())],
            tokens_total=self.step * TOKENS_PER_STEP,
            reason="" if self.state == "running" else "a person asked",
            edge_ms=[latency_ms for latency_ms, _ in self.edges()],
            edge_bps=[rate_bps for _, rate_bps in self.edges()],
            streams=1,
            codec="fp32",
            **state,
        )

    def other_jobs(self) -> list[JobInfo]:
        return [
            JobInfo("j0", "hello-tiny", "tiny", "sync", "done", EPOCH - 280, 200, 200, 1, loss=2.412, val_loss=2.441),
            JobInfo(
                "j2",
                "notes-finetune",
                "finetune",
                "sync",
                "queued",
                EPOCH + 60,
                500,
                reason="waits for stdlib-30m to end",
            ),
        ]

    def checkpoints(self) -> list[CheckpointInfo]:
        return [self.checkpoint(step) for step in range(SAVE_EVERY, self.step + 1, SAVE_EVERY)]

    def checkpoint(self, step: int) -> CheckpointInfo:
        return CheckpointInfo(
            id=f"j1@{step}@peer0",
            job="j1",
            step=step,
            path=f"~/.local/share/p2ptrain/j1/step-{step:06d}",
            peer_id="peer0",
            peer_name="atlas",
            digest="9f86d081",
            size_bytes=361_000_000,
            created_at=self.wall(step),
            val_loss=self.row(step).val_loss,
        )

    def event(self, level: str, kind: str, text: str, at: float | None = None) -> EventInfo:
        self.event_id += 1
        return EventInfo(self.event_id, self.wall(self.step) if at is None else at, level, kind, text)

    def events(self) -> list[EventInfo]:
        last = self.peer(self.size - 1).name if self.size else "nobody"
        script = (
            (0, "info", "job", "job stdlib-30m was created from profile small"),
            (11, "info", "view", "generation 3 of stdlib-30m: a ring of 6 from step 0"),
            (SAVE_EVERY * STEP_S, "info", "checkpoint", "atlas saved stdlib-30m at step 200"),
            (402 * STEP_S, "warning", "peer", "borea was lost: its connection ended; step 402 was run again"),
            (403 * STEP_S, "info", "view", f"generation 4 of stdlib-30m: a ring of {self._members()} from step 402"),
            (600 * STEP_S, "info", "checkpoint", "atlas saved stdlib-30m at step 600"),
            (636 * STEP_S, "info", "peer", f"{last} joined and follows the ring"),
        )
        return [self.event(level, kind, text, EPOCH + at) for at, level, kind, text in script]

    def recoveries(self) -> list[RecoveryInfo]:
        """Two deaths, of which the newest member had to fetch the state, and a newcomer that had followed."""
        script = (
            (211, "lost", "the connection to delos (192.168.1.24:7338) broke", 0.31, 0.02, 0.05, None, 0.81),
            (325, "held", "elara joining", 0.0, 0.11, 0.04, None, 0.79),
            (402, "lost", "borea: the connection broke", 0.22, 0.03, 0.06, 0.41, 0.80),
        )
        return [
            RecoveryInfo("j1", number, self.wall(step), kind, text, "peer1", number + 1, step, self._members(), 1,
                         detect, agree, form, transfer, commit, detect + agree + form + (transfer or 0.0) + commit)
            for number, (step, kind, text, detect, agree, form, transfer, commit) in enumerate(script, 1)
        ]  # fmt: skip

    def parts(self) -> list[PartInfo]:
        """A model over three peers (twenty where there are many), and from four on one that just lost its middle."""
        if not self.size:
            return []
        stages = 20 if self.size >= 40 else min(self.size, 3)
        found = [self.part("llama-3.2-3b", 28, index, stages, 229e6) for index in range(stages)]
        if self.size > 3:
            found += [self.part("qwen2.5-1.5b", 28, index, 4, 110e6) for index in (0, 1, 3)]
        return found

    def part(self, name: str, layers: int, index: int, stages: int, layer_bytes: float) -> PartInfo:
        peer = self.peer((index + (0 if name.startswith("llama") else 3)) % self.size)
        whole = name.startswith("llama")
        start, stop = layers * index // stages, layers * (index + 1) // stages
        weights = int((stop - start) * layer_bytes)
        pace = 24.0 + 2 * noise("pace", self.step) if whole else 0.0
        compute_ms = (stop - start) * (0.9 + 0.5 * noise("layer", name, index))
        return PartInfo(
            id=f"{peer.id}/{name}-{index}",
            peer=peer.id,
            peer_name=peer.name,
            part=f"{name}-{index}",
            model=f"model-{name}",
            name=name,
            start=start,
            stop=stop,
            layers=layers,
            dtype="bfloat16",
            weights_bytes=weights,
            cache_bytes=weights // 5 if whole else 0,
            limit_bytes=int(weights * (1.4 + abs(noise("limit", name, index)))),
            sessions=2 if whole else 0,
            compute_ms=compute_ms,
            busy=min(1.0, 3 * pace * compute_ms / 1e3),
            tokens_per_s=pace,
            out_position_bytes=0.0 if index + 1 == stages else 6144.0,
            next="" if index + 1 == stages else f"peer{index + 1}",
        )

    # ------------------------------------------------------------------------------------------------------- updates

    def everything(self) -> list[Update]:
        """All there is, as a seed's lists and histories would bring it."""
        self.event_id = 0
        return [
            _update("cluster", [self.cluster()]),
            _update("peers", self.peers()),
            _update("jobs", [self.job(), *self.other_jobs()]),
            _update("metrics", [self.row(step) for step in range(1, self.step + 1)]),
            _update("events", self.events()),
            _update("checkpoints", self.checkpoints()),
            _update("recoveries", self.recoveries()),
            _update("parts", self.parts()),
            _update("serving", self.serving()),
        ]

    def told(self) -> list[Update]:
        """What a seed tells a subscriber first: the records, then the newest rows, then its log."""
        told = {update.topic: update.items for update in self.everything()}
        told["metrics"], log = told["metrics"][-50:], told.pop("events")
        return [*(Update(topic, items) for topic, items in told.items()), Update("events", log[-3:])]

    def peers(self) -> list[PeerInfo]:
        return [
            *(self.peer(index) for index in range(self.size)),
            *(writer(self.peer(0), info) for info in self.serving()),
        ]

    def serving(self) -> list[ServingInfo]:
        """A verifier and its drafters, where they are there."""
        return [verifier(self.step), *drafters(self.step)] if self.serves else []

    def tick(self) -> list[Update]:
        """One more step, as a seed's coalesced updates would bring it."""
        if self.state != "running" or self.step >= STEPS_TOTAL:
            return [_update("peers", self.peers())]
        self.step += 1
        updates = [
            _update("peers", self.peers()),
            _update("jobs", [self.job()]),
            _update("metrics", [self.row(self.step)]),
            _update("parts", self.parts()),
            _update("serving", self.serving()),
        ]
        if self.step % SAVE_EVERY == 0:
            updates += [
                _update("checkpoints", [self.checkpoint(self.step)]),
                _update("events", [self.event("info", "checkpoint", f"atlas saved stdlib-30m at step {self.step}")]),
            ]
        return updates


def _update(topic: str, records: list[Any]) -> Update:
    items: list[Record] = records
    return Update(topic, [item.to_map() for item in items])


class DemoSource:
    """A ``tui.source.SeedSource`` over the demo cluster, which stands still until ``tick``."""

    def __init__(self, cluster: DemoCluster | None) -> None:
        self.store = RecordStore()
        self.address = "192.168.1.20:7337"
        self.cluster = cluster
        self.clock = DemoClock()
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.actions = OperatorActions(lambda: PROFILES, self.create_job, self.stream)
        self.asked: list[tuple[tuple[str, str], Messages]] = []
        self.pieces: asyncio.Queue[str | P2PTrainError] = asyncio.Queue()
        self.watched = ""

    async def run(self) -> None:
        self.connect()
        await asyncio.Event().wait()

    def connect(self) -> None:
        """The connection is there (again); None for a cluster leaves it being dialled."""
        if self.cluster is None:
            self.store.set_link(SeedConnection(LinkPhase.CONNECTING, since=self.clock.now()))
            return
        for update in self.cluster.everything():
            self.store.apply(update.topic, update.items, self.clock.now())
        self.store.set_link(SeedConnection(LinkPhase.LIVE, since=self.clock.now(), rtt_ms=0.6))

    def lose(self, attempt: int = 3) -> None:
        """The seed goes away."""
        error = ConnectionLost(
            f"the seed at {self.address} closed the connection",
            remedy="start it again with p2ptrain seed; training goes on without it",
        )
        self.store.lost(error, self.clock.now(), self.clock.now() + backoff_s(attempt))

    def tick(self) -> None:
        """One more step of the cluster."""
        if self.cluster is not None:
            for update in self.cluster.tick():
                self.store.apply(update.topic, update.items, self.clock.now())

    def watch(self, job: str) -> None:
        self.watched = job

    async def request(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        self.requests.append((method, params))
        if self.cluster is None or self.store.link.phase is not LinkPhase.LIVE:
            raise ConnectionLost(f"there is no connection to the seed at {self.address}", remedy="it is dialled again")
        if method == "checkpoints.restore":
            return {"job": "j1"}
        job = self.store.jobs[params["job"]]
        if job.id != "j1" or job.state not in ("running", "paused"):
            raise Refused("bad-state", f"job {job.name} is {job.state}", remedy="choose a job that runs")
        self.cluster.state = {"jobs.pause": "paused", "jobs.resume": "running", "jobs.cancel": "cancelled"}.get(
            method, self.cluster.state
        )
        self.store.apply("jobs", [self.cluster.job().to_map()], self.clock.now())
        return {"job": job.id}

    async def create_job(self, profile: str, text: str) -> str:
        self.requests.append((profile, {"text": text}))
        if "speed" in text:
            raise ConfigError("--set speed=9: unknown key speed", remedy="the tables are job, model")
        return "j9"

    async def stream(self, model: str, verifier: str, turns: Messages) -> AsyncGenerator[str, None]:
        """The queue's pieces, up to an empty one."""
        self.asked.append(((model, verifier), turns))
        while piece := await self.pieces.get():
            if isinstance(piece, P2PTrainError):
                raise piece
            yield piece


ANSWER = (
    "Each of the n members cuts the array into n chunks and sends one to its right neighbour, n - 1 times. It adds "
    "what comes from the left. Then every chunk is whole at one member, and goes round once more:\n\n"
    "    sent = 2 * (n - 1) / n * size  # by each member\n\n"
    "So the time hardly grows with the number of members; the slowest link limits it."
)


async def _screenshot(*, peers: int, serving: bool, columns: int, rows: int, view: int, chat: bool) -> str:
    from textual.widgets import Input

    from tui.app import P2PTrainApp  # the app knows the demo by its protocol only

    source = DemoSource(DemoCluster(peers, serving=serving))
    app = P2PTrainApp(source)
    async with app.run_test(size=(columns, rows)) as pilot:
        for _ in range(SEEN_S if serving else 0):
            source.clock.time += 1
            source.tick()
        await pilot.press(str(view))
        if chat:
            source.pieces.put_nowait(ANSWER)
            source.pieces.put_nowait("")
            await pilot.press("c")
            app.screen.query_one(Input).value = "How does a ring sum?"
            await pilot.press("enter")
        await pilot.pause()
        return app.export_screenshot(title="p2ptrain tui")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.tui.demo", description="A picture of a scripted cluster.")
    parser.add_argument("screenshot", type=Path, help="the SVG to write")
    parser.add_argument("--peers", type=int, default=6)
    parser.add_argument("--serving", action="store_true", help="a verifier and drafters, too")
    parser.add_argument("--size", default="160x48", help="columns x rows")
    parser.add_argument("--view", type=int, default=1)
    parser.add_argument("--chat", action="store_true", help="a conversation; with --serving")
    arguments = parser.parse_args()
    columns, _, rows = arguments.size.partition("x")
    shape: dict[str, Any] = {"peers": arguments.peers, "serving": arguments.serving, "view": arguments.view}
    shape["chat"] = arguments.chat
    picture = asyncio.run(_screenshot(columns=int(columns), rows=int(rows), **shape))
    arguments.screenshot.write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
