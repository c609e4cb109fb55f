"""``p2ptrain bench link``: what this machine's loopback does, plain and encrypted, without this project."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from p2ptrain.cli.bench.conduct import Progress, Ring, Stage
from p2ptrain.cli.bench.drawing import FILLS, Bar, Line, Point, bars, chart_svg
from p2ptrain.cli.bench.machine import Origin
from p2ptrain.cli.bench.members import Answer, Members
from p2ptrain.cli.bench.plan import Samples, rotated, rounds_for
from p2ptrain.cli.bench.report import (
    Report,
    Table,
    human_duration,
    human_rate,
    human_size,
    human_spread,
    screen_columns,
)

MEMBERS = 2
PINGS = 2000
PIECES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
SAMPLE_S = 0.04  # of a transfer: long against its ends, short against the weather
FIRST_PIECES = 64
BUDGET_S = 25.0
KINDS = {"plain": "plain TCP", "tls": "TLS 1.3"}
WAYS = {"one-way": False, "two-way": True}


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. ``rounds`` of each buffer size; 0 for as many as the time allows."""

    rounds: int


@dataclass(slots=True)
class Transfer:
    """One kind, direction and buffer size: samples by program. A rate is that of one direction."""

    kind: str
    way: str
    piece_bytes: int
    total_bytes: int = 0
    methods: dict[str, Samples] = field(default_factory=dict)

    @property
    def best(self) -> Samples:
        return min((item for item in self.methods.values() if item.seconds), key=lambda item: item.median_s)

    @property
    def bps(self) -> float:
        """Bytes a second."""
        return self.total_bytes / self.best.median_s


class Link:
    """One run; ``pings`` and ``transfers`` grow while it measures."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.pings: dict[str, Samples] = {}
        self.transfers: list[Transfer] = []

    async def measure(self, members: Members, progress: Progress) -> None:
        """Raises ``P2PTrainError``, ``Interrupted``."""
        stage = Stage(members)
        try:
            await stage.form(Ring())  # for its barriers
            methods = {kind: await stage.sockets(kind, tls=kind == "tls") for kind in KINDS}
            for kind, title in KINDS.items():
                progress(f"{title}: round trips")
                answers = await members.all("ping", name=kind, count=PINGS)
                self.pings[kind] = Samples(title, seconds=answers[0]["seconds"])
            began = time.monotonic()
            for number, piece_bytes in enumerate(PIECES):
                budget_s = (BUDGET_S - (time.monotonic() - began)) / (len(PIECES) - number)
                await self._piece(members, piece_bytes, methods, budget_s, progress)
        finally:
            stage.close()

    async def _piece(
        self, members: Members, piece_bytes: int, methods: dict[str, list[str]], budget_s: float, progress: Progress
    ) -> None:
        runs = [
            (Transfer(kind, way, piece_bytes), method) for kind in KINDS for way in WAYS for method in methods[kind]
        ]
        merged: dict[tuple[str, str], Transfer] = {}
        began = time.monotonic()
        for transfer, method in runs:
            kept = merged.setdefault((transfer.kind, transfer.way), transfer)
            kept.methods[method] = Samples(transfer.way, method)
            if not kept.total_bytes:
                kept.total_bytes = FIRST_PIECES * piece_bytes
                seconds = await self._sample(members, kept, method)
                kept.total_bytes = max(1, int(SAMPLE_S / seconds * FIRST_PIECES)) * piece_bytes
            await self._sample(members, kept, method)
        round_s = time.monotonic() - began
        rounds = self.plan.rounds or rounds_for(round_s, budget_s - round_s)
        order = {f"{kind}/{way}/{name}": (one, name) for (kind, way), one in merged.items() for name in one.methods}
        for number in range(rounds):
            for key in rotated(list(order), number):
                transfer, method = order[key]
                transfer.methods[method].seconds.append(await self._sample(members, transfer, method))
            if not number:
                self.transfers += merged.values()
            progress(f"buffers of {human_size(piece_bytes)}: round {number + 1} of {rounds}")

    async def _sample(self, members: Members, transfer: Transfer, method: str) -> float:
        answers: list[Answer] = await members.all(
            "transfer",
            name=transfer.kind,
            method=method,
            total_bytes=transfer.total_bytes,
            piece_bytes=transfer.piece_bytes,
            both=WAYS[transfer.way],
        )
        return max(float(answer["seconds"]) for answer in answers)

    # ------------------------------------------------------------------------------------------------------ the report

    def report(self, origin: Origin, *, complete: bool) -> Report:
        title = "link · this machine's loopback · plain sockets between two processes"
        report = Report("link", title, origin, asdict(self.plan), complete=complete)
        report.results = {
            "round_trips": {
                kind: item.to_json(1, "per_s") | {"p99_s": item.quantile_s(0.99)} for kind, item in self.pings.items()
            },
            "transfers": [self._result(item) for item in self.transfers],
        }
        report.tables = [self._latencies(), self._rates()]
        report.pictures = [self._picture()]
        report.notes = [
            "GB/s of one direction; two-way: both at the same time, one connection each",
            "of several simple programs the fastest counts: "
            + ", ".join(sorted({item.best.method for item in self.transfers})),
        ]
        report.samples = [
            {"kind": item.kind, "way": item.way, "buffer_bytes": item.piece_bytes, "method": method, "sample": number}
            | {"bytes": item.total_bytes, "seconds": seconds, "bytes_per_s": item.total_bytes / seconds}
            for item in self.transfers
            for method, samples in item.methods.items()
            for number, seconds in enumerate(samples.seconds)
        ] + [
            {"kind": kind, "way": "ping-pong", "buffer_bytes": 1, "method": "", "sample": number}
            | {"bytes": 1, "seconds": seconds, "bytes_per_s": 1 / seconds}
            for kind, item in self.pings.items()
            for number, seconds in enumerate(item.seconds)
        ]
        report.chart = lambda: self._chart(report)
        return report

    def _result(self, item: Transfer) -> dict[str, Any]:
        facts = {"kind": item.kind, "way": item.way, "buffer_bytes": item.piece_bytes, "bytes": item.total_bytes}
        methods = {name: samples.to_json(item.total_bytes, "bytes_per_s") for name, samples in item.methods.items()}
        return facts | {"best_method": item.best.method, "best_bytes_per_s": item.bps, "methods": methods}

    def _latencies(self) -> Table:
        rows = [
            [
                item.title,
                human_duration(item.median_s),
                human_duration(item.quantile_s(0.99)),
                human_spread(item.quantile_s(0.1), item.quantile_s(0.9)),
            ]
            for item in self.pings.values()
        ]
        columns = ["ROUND TRIP OF ONE BYTE", "MEDIAN", "P99", "P10-P90"]
        return Table(columns, rows, columns[1:])

    def _rates(self) -> Table:
        columns = ["BUFFER", *(f"{kind} {way}".upper() for kind in KINDS for way in WAYS)]
        found = {(item.kind, item.way, item.piece_bytes): human_rate(item.bps) for item in self.transfers}
        pieces = sorted({item.piece_bytes for item in self.transfers})
        rows = [
            [human_size(piece), *(found.get((kind, way, piece), "-") for kind in KINDS for way in WAYS)]
            for piece in pieces
        ]
        return Table(columns, rows, columns)

    def _picture(self) -> list[str]:
        groups: dict[int, list[Bar]] = {}
        for item in self.transfers:
            number = list(KINDS).index(item.kind) * len(WAYS) + list(WAYS).index(item.way)
            bar = Bar(f"{KINDS[item.kind]}, {item.way}", item.bps, f"{human_rate(item.bps)} GB/s", FILLS[number])
            groups.setdefault(item.piece_bytes, []).append(bar)
        return bars([(human_size(piece), items) for piece, items in sorted(groups.items())], width=screen_columns())

    def _chart(self, report: Report) -> str:
        pieces = sorted({item.piece_bytes for item in self.transfers})
        places = {(item.kind, item.way, item.piece_bytes): _point(item) for item in self.transfers}
        lines = [
            Line(f"{title}, {way}", [places.get((kind, way, piece)) for piece in pieces])
            for kind, title in KINDS.items()
            for way in WAYS
        ]
        subtitle = "plain sockets between two processes, by size of buffer · median, p10 to p90"
        labels = [human_size(piece) for piece in pieces]
        return chart_svg("This machine's loopback", subtitle, report.footer, labels, lines, unit="GB/s")


def _point(item: Transfer) -> Point:
    best, amount = item.best, item.total_bytes / 1e9
    return Point(amount / best.median_s, amount / best.quantile_s(0.9), amount / best.quantile_s(0.1))
