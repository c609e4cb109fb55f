"""``bench allreduce``: the ring beside Gloo and plain sockets. ``bench link``: plain sockets alone."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from p2ptrain.cluster.local_cluster import free_port
from p2ptrain.core.errors import JobFailed
from p2ptrain.core.texts import human_bytes
from p2ptrain.lab.bench.report import BenchReport, Case, Contender, human_rate, per_cent, times
from p2ptrain.lab.bench.runner import Answer, Bench, Members, repeats_for
from p2ptrain.lab.bench.sockets import PIECE_BYTES, make_credentials, peer_id
from wire.emulate import preset_named

BUDGET_S = 60.0
"""For the rounds of a whole run. Together with start, warm-up and checks it stays below 90 s."""
ITEM_BYTES, EPSILON = 4, 2**-23  # of the elements, float32


@dataclass(frozen=True, slots=True)
class BenchRing:
    """How to form the members' ring.

    Attributes:
        link: preset of an emulated link; empty: none.
        sub_chunk_bytes: 0: the session chooses.
        codec: encoding of elements; see ``ring.codecs``.
    """

    link: str = ""
    tls: bool = False
    streams: int = 1
    sub_chunk_bytes: int = 0
    codec: str = "fp32"

    @property
    def described(self) -> str:
        place = f"the emulated link {self.link}" if self.link else "the loopback"
        streams = f" · {self.streams} streams" if self.streams > 1 else ""
        return f"{place} · {'TLS 1.3' if self.tls else 'plain TCP'} · {self.codec}{streams}"


async def form_ring(bench: Bench, members: Members, ring: BenchRing) -> None:
    answers = await members.all("listen", link=ring.link, credentials=_credentials(bench, members, ring.tls))
    ports = [answer["port"] for answer in answers]
    how: Answer = {"sub_chunk_bytes": ring.sub_chunk_bytes, "streams": ring.streams, "codec": ring.codec}
    await members.all("form", ports=ports, **how)


async def connect_sockets(bench: Bench, members: Members, name: str, *, tls: bool) -> None:
    """Connect plain sockets around the ring, under this name."""
    answers = await members.all("listen_plainly", name=name, credentials=_credentials(bench, members, tls))
    await members.all("connect_plainly", name=name, ports=[answer["port"] for answer in answers])


def _credentials(bench: Bench, members: Members, tls: bool) -> str:
    """The directory with a directory of credentials for each member; empty: none is needed."""
    if tls:
        make_credentials(bench.root, map(peer_id, range(len(members))))
    return str(bench.root) * tls


async def open_gloo(members: Members, timeout_s: float, *, p2p: bool = False) -> tuple[str, str]:
    """Open a Gloo group; ``p2p``: and one of the backend p2p. Returns torch's version, and why there is no group (empty
    if there is one)."""
    how: Answer = {"store_port": free_port(), "timeout_s": timeout_s, "backends": ["gloo", "p2p"][: 1 + p2p]}
    first, *_ = await members.all("open_gloo", seconds=3, **how)
    return first["torch"], first["missing"]


# ---------------------------------------------------------------------------------------------------------- all-reduce


@dataclass(frozen=True, slots=True)
class AllReducePlan:
    """What to measure.

    Attributes:
        rounds: rounds of each size; 0: as many as the time allows.
        torch: measure the ring as the backend p2p of torch.distributed.
    """

    peers: int
    sizes: Sequence[int]
    ring: BenchRing
    rounds: int
    torch: bool = False

    @property
    def ours(self) -> str:
        return "p2p" if self.torch else "ring"

    @property
    def moved(self) -> float:
        """Bytes that each member sends in an all-reduce, as a fraction of the tensor."""
        return 2 * (self.peers - 1) / self.peers

    def operation_s(self, size_bytes: int) -> float:
        """Time of a slow operation, for deadlines."""
        rate_bps, delay_s = 50e6 * 8, 0.0  # every contender reaches this on a loopback
        if self.ring.link:
            preset = preset_named(self.ring.link)
            rate_bps, delay_s = preset.rate_bps or rate_bps, preset.rtt_s
        return self.moved * size_bytes * 8 / rate_bps + 2 * self.peers * delay_s

    def link_limit_s(self, size_bytes: int) -> float | None:
        """Least time over the emulated link for whole elements; None without a link.

        Bytes beyond the burst travel at the link's rate. Each member's data needs n - 1 hops to the last member.
        """
        if not self.ring.link or not (preset := preset_named(self.ring.link)).rate_bps:
            return None
        late_bytes = max(0.0, self.moved * size_bytes - self.ring.streams * preset.burst_bytes)
        return late_bytes * 8 / (self.ring.streams * preset.rate_bps) + (self.peers - 1) * preset.delay_s

    def report(self) -> BenchReport:
        title = f"all-reduce · float32 · {self.peers} peers over {self.ring.described}"
        made = BenchReport("allreduce", title, "bytes", human_rate, asdict(self))
        made.columns = {"ring_to_gloo": ("×GLOO", times), "ring_of_limit": ("OF LIMIT", per_cent)}
        if self.ring.codec != "fp32":
            made.columns["ring_to_fp32_ring"] = ("×FP32", times)
        return made


async def measure_allreduce(bench: Bench, plan: AllReducePlan, report: BenchReport) -> None:
    ring, titles = plan.ring, {plan.ours: "backend p2p" if plan.torch else "this ring"}
    async with bench.members(plan.peers) as members:
        await form_ring(bench, members, ring)
        if ring.codec != "fp32":
            titles = {"ring": f"this ring, {ring.codec}", "ring plain": "this ring, fp32"}
            report.notes.append(
                f"{ring.codec}: bytes/s are those of the tensor, not of the fewer bytes on the wire; a small tensor "
                "is sent uncoded, because its time depends on round trips"
            )
        if ring.link:
            report.notes.append(f"Gloo is left out: the link {ring.link} is emulated inside this program's connections")
            report.notes.append("the limit is computed from the link's rate and delay, for fp32")
        else:
            bench.console.progress("loading torch")
            report.torch, missing = await open_gloo(
                members, plan.operation_s(max(plan.sizes)) * 20 + 60, p2p=plan.torch
            )
            if missing and plan.torch:
                raise JobFailed(f"no backend of torch.distributed can be measured: {missing}")
            if missing:
                report.notes.append(f"Gloo is left out: {missing}")
            else:
                titles["gloo"] = "Gloo"
                if ring.tls:
                    report.notes.append("Gloo knows no encryption: it is measured as it is, in plain TCP")
            titles["sockets"] = "TLS sockets" if ring.tls else "sockets"
            await connect_sockets(bench, members, "sockets", tls=ring.tls)
            report.notes.append(
                "sockets: the same bytes between the same processes, from one tensor into another, sent and received "
                f"at the same time in pieces of {human_bytes(PIECE_BYTES)}; there is no answer, so this "
                "limit does not include a small tensor's round trips"
            )
        report.notes.append("a time is that of the slowest member, after a barrier; bytes are those of the tensor")
        began = time.monotonic()
        for number, size_bytes in enumerate(plan.sizes):
            budget_s = (BUDGET_S - (time.monotonic() - began)) / (len(plan.sizes) - number)
            case = Case(human_bytes(size_bytes), size_bytes, {name: Contender(title) for name, title in titles.items()})
            await _measure_size(bench, members, plan, report, case, budget_s)
        worst = max(case.facts["relative_errors"][plan.ours] for case in report.cases)
        report.notes.append(
            "checked: the ring's result is bit-equal on all members at every size, its relative error against float64 "
            f"at most {worst:.1e}"
        )


async def _measure_size(
    bench: Bench, members: Members, plan: AllReducePlan, report: BenchReport, case: Case, budget_s: float
) -> None:
    size_bytes = int(case.amount)
    deadline_s = plan.operation_s(size_bytes)
    bench.console.progress(f"{case.label}: warming up")
    await members.all("prepare", numel=size_bytes // ITEM_BYTES, codec=plan.ring.codec, seconds=deadline_s)
    repeat = 1

    async def sample(name: str) -> list[float]:
        answers = await members.all("sample", contender=name, repeat=repeat, seconds=repeat * deadline_s)
        return [max(float(answer["seconds"]) for answer in answers)]

    case.facts = {"size_bytes": size_bytes, "relative_errors": await _check_sums(members, plan, case, deadline_s)}
    repeat = repeats_for(min([(await sample(name))[0] for name in case.contenders]))
    await bench.interleave(report, case, sample, rounds=plan.rounds, budget_s=budget_s)
    limit_s = plan.link_limit_s(size_bytes)
    case.facts |= {
        "operations_a_sample": repeat,
        "ring_to_gloo": case.ratio("gloo", plan.ours),
        "ring_to_fp32_ring": case.ratio("ring plain", "ring"),
        "ring_of_limit": limit_s / case.contenders[plan.ours].median_s if limit_s else case.ratio("sockets", plan.ours),
        "link_limit_s": limit_s,
    }


async def _check_sums(members: Members, plan: AllReducePlan, case: Case, deadline_s: float) -> dict[str, float]:
    """The relative error of each sum. Raises ``JobFailed`` if members' bits differ, or the sum is wrong."""
    errors = {}
    for name in case.contenders.keys() - {"sockets"}:
        title = case.contenders[name].title
        answers = await members.all("check", contender=name, seconds=5 * deadline_s)
        if len({answer["digest"] for answer in answers}) > 1:
            raise JobFailed(f"{title}: the members' results differ at {case.label}")
        errors[name] = max(float(answer["error"]) for answer in answers)
        if errors[name] > plan.peers * EPSILON and not (name == "ring" and plan.ring.codec != "fp32"):
            raise JobFailed(f"{title}: the sum is wrong by {errors[name]:.1e} at {case.label}")
    return errors


# ----------------------------------------------------------------------------------------------------------------- link

KINDS = {"plain": "plain TCP", "tls": "TLS 1.3"}


def link_report() -> BenchReport:
    title = "link · this machine's loopback · plain sockets between two processes"
    return BenchReport("link", title, "bytes", human_rate)


async def measure_link(bench: Bench, rounds: int, report: BenchReport) -> None:
    """Measure round trips of one byte, then transfers by size of buffer. Raises ``P2PTrainError``."""
    report.notes.append("bytes of one direction; two-way: both at the same time, one connection each")
    async with bench.members(2) as members:
        await form_ring(bench, members, BenchRing())  # for its barriers
        pings = {}
        for kind, title in KINDS.items():
            bench.console.progress(f"{title}: round trips")
            await connect_sockets(bench, members, kind, tls=kind == "tls")
            answers = await members.all("ping", name=kind, count=2000)
            pings[kind] = Contender(f"{title}, round trip", answers[0]["seconds"])
        report.cases.append(Case("1 B", 1, pings))
        for piece_bytes in (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20):
            contenders = {
                f"{kind} {way}": Contender(f"{title}, {way}") for kind, title in KINDS.items()
                for way in ("one-way", "two-way")
            }  # fmt: skip
            how: Answer = {"piece_bytes": piece_bytes, "total_bytes": 64 * piece_bytes}

            async def sample(name: str, how: Answer = how) -> list[float]:
                kind, way = name.split()
                answers = await members.all("transfer", name=kind, both=way == "two-way", **how)
                return [max(float(answer["seconds"]) for answer in answers)]

            # In samples of 40 ms start and end are negligible. All contenders move the same bytes.
            how["total_bytes"] = max(1, math.floor(0.04 / (await sample("plain one-way"))[0] * 64)) * piece_bytes
            case = Case(human_bytes(piece_bytes), how["total_bytes"], contenders, {"buffer_bytes": piece_bytes})
            await bench.interleave(report, case, sample, rounds=rounds, budget_s=4.0)
