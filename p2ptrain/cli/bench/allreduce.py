"""``p2ptrain bench allreduce``: the ring, Gloo and plain sockets, round by round beside one another."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from p2ptrain.cli.bench.conduct import Progress, Ring, Stage
from p2ptrain.cli.bench.drawing import FILLS, Bar, Line, Point, bars, chart_svg
from p2ptrain.cli.bench.machine import Origin
from p2ptrain.cli.bench.members import Members
from p2ptrain.cli.bench.plan import BUDGET_S, ITEM_BYTES, Samples, ratio, repeats_for, rotated, rounds_for
from p2ptrain.cli.bench.report import (
    Report,
    Table,
    human_duration,
    human_rate,
    human_size,
    human_spread,
    per_cent,
    screen_columns,
    times,
)
from p2ptrain.core.errors import JobFailed
from wire.emulate import preset_named

RING, PLAIN, GLOO, LIMIT = "ring", "ring plain", "gloo", "sockets"
SLOW_BPS = 50e6 * 8
"""What any contender reaches on a loopback, for deadlines."""

EPSILON = {"float64": 2**-52, "float32": 2**-23, "float16": 2**-10, "bfloat16": 2**-7}
TRIES = 3  # of each program that may be the best one with plain sockets


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        rounds: of each size; 0 for as many as the time allows.
        piece_bytes: of the plain sockets' sends and receives.
    """

    peers: int
    sizes: Sequence[int]
    dtype: str
    ring: Ring
    rounds: int
    piece_bytes: int

    @property
    def moved(self) -> float:
        """Bytes that each member sends in an all-reduce, as a part of the tensor's."""
        return 2 * (self.peers - 1) / self.peers

    def operation_s(self, size_bytes: int) -> float:
        """How long a slow operation takes, for deadlines."""
        rate_bps, delay_s = SLOW_BPS, 0.0
        if self.ring.link:
            preset = preset_named(self.ring.link)
            rate_bps, delay_s = preset.rate_bps or SLOW_BPS, preset.rtt_s
        return self.moved * size_bytes * 8 / rate_bps + 2 * self.peers * delay_s

    def link_limit_s(self, size_bytes: int) -> float | None:
        """What the emulated link allows at best for whole elements: what its burst does not cover goes at its rate, and
        what one member brings needs n - 1 hops to the last one."""
        if not self.ring.link or not (preset := preset_named(self.ring.link)).rate_bps:
            return None
        streams = self.ring.streams
        late_bytes = max(0.0, self.moved * size_bytes - streams * preset.burst_bytes)
        return late_bytes * 8 / (streams * preset.rate_bps) + (self.peers - 1) * preset.delay_s


@dataclass(slots=True)
class Sized:
    """What was measured at one size. ``errors`` are relative, against the sum in float64."""

    size_bytes: int
    contenders: dict[str, Samples]
    repeat: int = 1
    errors: dict[str, float] = field(default_factory=dict)
    limit_s: float | None = None

    @property
    def to_gloo(self) -> float | None:
        """How many times as fast as Gloo."""
        return ratio(self.contenders.get(GLOO), self.contenders[RING])

    @property
    def to_plain(self) -> float | None:
        """How many times as fast as this ring without a codec."""
        return ratio(self.contenders.get(PLAIN), self.contenders[RING])

    @property
    def of_limit(self) -> float | None:
        """Part of what plain sockets, or the emulated link, reach."""
        if self.limit_s is not None:
            return self.limit_s / self.contenders[RING].median_s
        return ratio(self.contenders.get(LIMIT), self.contenders[RING])


class AllReduce:
    """One run. ``sized`` grows while it measures, so that an interrupted one has something to show."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.sized: list[Sized] = []
        self.notes: list[str] = []
        self.torch = ""
        self._titles = {RING: "this ring" + (f", {plan.ring.codec}" if plan.ring.lossy else "")}
        self._methods: list[str] = []

    async def measure(self, members: Members, progress: Progress) -> None:
        """Raises ``P2PTrainError``, ``Interrupted``."""
        stage = Stage(members)
        try:
            await stage.form(self.plan.ring)
            await self._rivals(stage, progress)
            began = time.monotonic()
            for number, size_bytes in enumerate(self.plan.sizes):
                budget_s = (BUDGET_S - (time.monotonic() - began)) / (len(self.plan.sizes) - number)
                await self._size(members, size_bytes, budget_s, progress)
        finally:
            stage.close()

    async def _rivals(self, stage: Stage, progress: Progress) -> None:
        ring = self.plan.ring
        if self.plan.ring.lossy:
            self._titles[PLAIN] = "this ring, fp32"
            self.notes.append(
                f"{ring.codec}: GB/s are those of the tensor, not of the fewer bytes on the wire; a small tensor "
                "travels as it is, because there the round trips count"
            )
        if ring.link:
            self.notes.append(f"Gloo is left out: the link {ring.link} is emulated inside this program's connections")
            self.notes.append("the limit is what the link's rate and delay allow for fp32, computed")
            return
        progress("loading torch")
        self.torch, missing = await stage.gloo(self.plan.operation_s(max(self.plan.sizes)) * 20 + 60)
        if missing:
            self.notes.append(f"Gloo is left out: {missing}")
        else:
            self._titles[GLOO] = "Gloo"
            if ring.tls:
                self.notes.append("Gloo knows no encryption: it is measured as it is, in plain TCP")
        self._titles[LIMIT] = "TLS sockets" if ring.tls else "sockets"
        self._methods = await stage.sockets("limit", tls=ring.tls)
        self.notes.append(
            "sockets: the same bytes between the same processes, from one tensor into another, sent and received at "
            f"the same time in pieces of {human_size(self.plan.piece_bytes)} by the best of: "
            f"{', '.join(self._methods)}; set up as the ring's own; nothing is answered, so a small tensor's round "
            "trips are no part of this limit"
        )

    async def _size(self, members: Members, size_bytes: int, budget_s: float, progress: Progress) -> None:
        plan, deadline_s = self.plan, self.plan.operation_s(size_bytes)
        began = time.monotonic()
        size = human_size(size_bytes)
        progress(f"{size}: warming up")
        await members.all(
            "prepare",
            dtype=plan.dtype,
            numel=size_bytes // ITEM_BYTES[plan.dtype],
            codec=plan.ring.codec,
            piece_bytes=plan.piece_bytes,
            seconds=deadline_s,
        )
        found = Sized(size_bytes, {name: Samples(title) for name, title in self._titles.items()})
        found.limit_s = plan.link_limit_s(size_bytes)
        await self._check(members, found, deadline_s)
        if LIMIT in found.contenders:
            found.contenders[LIMIT].method = await self._best_method(members, deadline_s)
        fastest_s = min([(await self._sample(members, found, name, deadline_s)) for name in found.contenders])
        found.repeat = repeats_for(fastest_s)
        warm = time.monotonic()
        for name in found.contenders:
            await self._sample(members, found, name, deadline_s)
        round_s = time.monotonic() - warm
        rounds = plan.rounds or rounds_for(round_s, budget_s - (warm - began))
        names = list(found.contenders)
        for number in range(rounds):
            for name in rotated(names, number):
                found.contenders[name].seconds.append(await self._sample(members, found, name, deadline_s))
            if not number:
                self.sized.append(found)  # from here on there is something to show
            rate = human_rate(size_bytes / found.contenders[RING].median_s)
            progress(f"{size}: round {number + 1} of {rounds}, this ring {rate} GB/s")

    async def _sample(self, members: Members, found: Sized, name: str, deadline_s: float) -> float:
        """Seconds of one operation: of the member for whom it took longest."""
        contender = f"{name}:{found.contenders[name].method}" if name == LIMIT else name
        answers = await members.all(
            "sample", contender=contender, repeat=found.repeat, seconds=found.repeat * deadline_s
        )
        return max(float(answer["seconds"]) for answer in answers)

    async def _best_method(self, members: Members, deadline_s: float) -> str:
        medians: dict[str, float] = {}
        for method in self._methods:
            one = Sized(0, {LIMIT: Samples("", method)})
            medians[method] = statistics.median(
                [await self._sample(members, one, LIMIT, deadline_s) for _ in range(TRIES)]
            )
        return min(medians, key=medians.__getitem__)

    async def _check(self, members: Members, found: Sized, deadline_s: float) -> None:
        """The same bits everywhere, and the right ones. Raises ``JobFailed``."""
        for name in found.contenders:
            if name == LIMIT:
                continue
            title = found.contenders[name].title
            answers = await members.all("check", contender=name, seconds=5 * deadline_s)
            if len({answer["digest"] for answer in answers}) > 1:
                raise JobFailed(f"{title}: the members' results differ at {human_size(found.size_bytes)}")
            error = max(float(answer["error"]) for answer in answers)
            found.errors[name] = error
            allowed = self.plan.peers * EPSILON.get(self.plan.dtype, 0.0)
            if error > allowed and not (name == RING and self.plan.ring.lossy):
                raise JobFailed(f"{title}: the sum is wrong by {error:.1e} at {human_size(found.size_bytes)}")

    # ------------------------------------------------------------------------------------------------------- the report

    def report(self, origin: Origin, *, complete: bool) -> Report:
        plan = self.plan
        title = f"all-reduce · {plan.dtype} · {plan.peers} peers over {plan.ring.described}"
        report = Report("allreduce", title, replace(origin, torch=self.torch), _settings(plan), complete=complete)
        report.results = [self._result(found) for found in self.sized]
        report.tables, report.pictures = [self._table()], [self._picture()]
        report.notes = [*self._checked(), *self.notes]
        report.samples = [
            {"size_bytes": found.size_bytes, "contender": name, "method": samples.method, "sample": number}
            | {"operations": found.repeat, "seconds": seconds, "bytes_per_s": found.size_bytes / seconds}
            for found in self.sized
            for name, samples in found.contenders.items()
            for number, seconds in enumerate(samples.seconds)
        ]
        report.chart = lambda: self._chart(report)
        return report

    def _result(self, found: Sized) -> dict[str, Any]:
        return {
            "size_bytes": found.size_bytes,
            "operations_a_sample": found.repeat,
            "ring_to_gloo": found.to_gloo,
            "ring_to_fp32_ring": found.to_plain,
            "ring_of_limit": found.of_limit,
            "link_limit_s": found.limit_s,
            "relative_errors": found.errors,
            "contenders": {
                name: samples.to_json(found.size_bytes, "bytes_per_s") for name, samples in found.contenders.items()
            },
        }

    def _table(self) -> Table:
        columns = ["SIZE", "RING", "P10-P90", "GB/S"]
        if PLAIN in self._titles:
            columns += ["×FP32"]
        if GLOO in self._titles:
            columns += ["GLOO", "×GLOO"]
        columns += ["LIMIT", "OF LIMIT", "ROUNDS"]
        rows = []
        for found in self.sized:
            ours, limit = found.contenders[RING], found.contenders.get(LIMIT)
            limit_s = found.limit_s if limit is None or not limit.seconds else limit.median_s
            row = [
                human_size(found.size_bytes),
                human_duration(ours.median_s),
                human_spread(ours.quantile_s(0.1), ours.quantile_s(0.9)),
                human_rate(found.size_bytes / ours.median_s),
            ]
            if PLAIN in self._titles:
                row += [times(found.to_plain)]
            if GLOO in self._titles:
                gloo = found.contenders[GLOO]
                row += [human_duration(gloo.median_s) if gloo.seconds else "-", times(found.to_gloo)]
            row += ["-" if limit_s is None else human_duration(limit_s), per_cent(found.of_limit)]
            rows.append([*row, str(len(ours.seconds))])
        return Table(columns, rows, columns)

    def _picture(self) -> list[str]:
        groups = []
        for found in self.sized:
            items = []
            for number, samples in enumerate(found.contenders.values()):
                if samples.seconds:
                    rate = found.size_bytes / samples.median_s
                    items.append(Bar(samples.title, rate, f"{human_rate(rate)} GB/s", FILLS[number % len(FILLS)]))
            groups.append((human_size(found.size_bytes), items))
        return bars(groups, width=screen_columns())

    def _checked(self) -> list[str]:
        if not self.sized:
            return []
        worst = max(found.errors[RING] for found in self.sized)
        ends = "bit-equal on all members at every size"
        note = f"checked: the ring's result is {ends}, its relative error against float64 at most {worst:.1e}"
        return [note, "a time is that of the slowest member, after a barrier; GB/s are bytes of the tensor a second"]

    def _chart(self, report: Report) -> str:
        lines = []
        for name, title in self._titles.items():
            points: list[Point | None] = []
            for found in self.sized:
                samples, size = found.contenders[name], found.size_bytes / 1e9
                points.append(
                    Point(size / samples.median_s, size / samples.quantile_s(0.9), size / samples.quantile_s(0.1))
                    if samples.seconds
                    else None
                )
            lines.append(Line(title, points))
        labels = [human_size(found.size_bytes) for found in self.sized]
        subtitle = report.title.partition(" · ")[2] + " · median, p10 to p90"
        return chart_svg("All-reduce", subtitle, report.footer, labels, lines, unit="GB/s")


def _settings(plan: Plan) -> dict[str, Any]:
    return asdict(plan) | {"sizes": list(plan.sizes)}
