"""``p2ptrain bench codecs``: what each codec loses, what it saves, and how fast it is, in this process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from p2ptrain.cli.bench.conduct import Progress
from p2ptrain.cli.bench.drawing import FILLS, Bar, Line, Point, bars, chart_svg
from p2ptrain.cli.bench.machine import Origin
from p2ptrain.cli.bench.report import Report, Table, human_size, screen_columns
from ring.codecs import CODECS, codec_named
from ring.codecs.error import DISTRIBUTIONS, ErrorRow, error_table

SPEED_S = 0.25  # of each codec and direction
LEAST_CALLS = 5


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        members: sizes of the rings that errors are computed for.
        numel: elements of a gradient there.
        rounds: over which the error with feedback is averaged.
        sub_chunk_bytes: of float32, that speeds are measured on.
    """

    members: Sequence[int]
    numel: int
    rounds: int
    sub_chunk_bytes: int


@dataclass(frozen=True, slots=True)
class Speed:
    """Bytes of float32 a second, medians, on one core."""

    codec: str
    encode: float
    decode: float
    decode_add: float


class Codecs:
    """One run; ``speeds`` and ``errors`` grow while it measures."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.speeds: dict[str, Speed] = {}
        self.errors: list[ErrorRow] = []

    def measure(self, progress: Progress) -> None:
        for name in CODECS:
            progress(f"speed of {name}")
            self.speeds[name] = _speed(name, self.plan.sub_chunk_bytes // 4)
        total = len(CODECS) * len(self.plan.members) * len(DISTRIBUTIONS)
        rows = error_table(
            codec_named, CODECS, members=self.plan.members, numel=self.plan.numel, rounds=self.plan.rounds
        )
        progress("errors: drawing gradients")
        for row in rows:
            self.errors.append(row)
            progress(f"errors: {row.codec}, {row.members} members, {row.distribution} ({len(self.errors)} of {total})")

    # ------------------------------------------------------------------------------------------------------ the report

    def report(self, origin: Origin, *, complete: bool) -> Report:
        report = Report("codecs", "codecs · errors and speeds, one core", origin, asdict(self.plan), complete=complete)
        report.results = {
            "speeds": [asdict(speed) for speed in self.speeds.values()],
            "errors": [asdict(row) for row in self.errors],
        }
        report.tables = [self._speed_table(), *(self._error_table(name) for name in DISTRIBUTIONS)]
        report.pictures = [self._picture()]
        report.notes = [
            f"GB/s of float32, in sub-chunks of {human_size(self.plan.sub_chunk_bytes)}; decode+ adds to what is there",
            f"errors: relative L2 against float64 of one all-reduce of {self.plan.numel:,} elements, without feedback; "
            f"in brackets of the mean of {self.plan.rounds} all-reduces with error feedback, for codecs that use it",
        ]
        report.samples = [asdict(row) | asdict(self.speeds[row.codec]) for row in self.errors]
        report.chart = lambda: self._chart(report)
        return report

    def _speed_table(self) -> Table:
        rows = []
        for name, speed in self.speeds.items():
            part = codec_named(name).encoded_bytes(self.plan.numel) / (4 * self.plan.numel)
            rates = [f"{rate / 1e9:.2f}" for rate in (speed.encode, speed.decode, speed.decode_add)]
            rows.append([name, f"{100 * part:.1f} %", *rates])
        columns = ["CODEC", "BYTES", "ENCODE GB/S", "DECODE GB/S", "DECODE+ GB/S"]
        return Table(columns, rows, columns[1:])

    def _error_table(self, distribution: str) -> Table:
        rows = []
        for name in CODECS:
            found = {row.members: row for row in self.errors if (row.codec, row.distribution) == (name, distribution)}
            if found:
                rows.append([name, *(_error(found.get(members)) for members in self.plan.members)])
        columns = ["ERROR, " + distribution.upper(), *(f"{members} MEMBERS" for members in self.plan.members)]
        return Table(columns, rows, columns[1:])

    def _picture(self) -> list[str]:
        items = [
            (
                name,
                [
                    Bar("encode", speed.encode, f"{speed.encode / 1e9:.2f} GB/s", FILLS[0]),
                    Bar("decode+", speed.decode_add, f"{speed.decode_add / 1e9:.2f} GB/s", FILLS[1]),
                ],
            )
            for name, speed in self.speeds.items()
        ]
        return bars(items, width=screen_columns(), common=True)

    def _chart(self, report: Report) -> str:
        names = list(self.speeds)
        lines = [
            Line(title, [_flat(getattr(self.speeds[name], key)) for name in names])
            for key, title in (("encode", "encode"), ("decode", "decode"), ("decode_add", "decode and add"))
        ]
        subtitle = f"speed on one core, in bytes of float32, sub-chunks of {human_size(self.plan.sub_chunk_bytes)}"
        return chart_svg("Codecs", subtitle, report.footer, names, lines, unit="GB/s", joined=False)


def _flat(rate: float) -> Point:
    return Point(rate / 1e9, rate / 1e9, rate / 1e9)


def _error(row: ErrorRow | None) -> str:
    if row is None:
        return "-"
    averaged = f" ({row.averaged:.1e})" if row.averaged != row.one_shot else ""
    return f"{row.one_shot:.1e}{averaged}"


def _speed(name: str, numel: int) -> Speed:
    """On gradients that look like some: normally distributed."""
    codec = codec_named(name)
    values = np.random.default_rng(0).standard_normal(numel, np.float32)
    encoded = np.empty(codec.encoded_bytes(numel), np.uint8)
    out = np.zeros(numel, np.float32)
    encode = _rate(lambda: codec.encode(values, encoded), values.nbytes)
    decode = _rate(lambda: codec.decode(encoded, out), values.nbytes)
    return Speed(name, encode, decode, _rate(lambda: codec.decode_add(encoded, out), values.nbytes))


def _rate(call: Callable[[], None], size_bytes: int) -> float:
    call()  # scratch memory is made on first use
    seconds: list[float] = []
    until = time.perf_counter() + SPEED_S
    while len(seconds) < LEAST_CALLS or time.perf_counter() < until:
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return size_bytes / statistics.median(seconds)
