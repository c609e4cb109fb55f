"""``bench local``: the strategy 'local' beside 'sync' in fp32, over an emulated far link.

Both train the same number of sequences at a time. By default the workers wait instead of computing, so that a machine
with few cores does not hide the link. A sync step has one micro-batch of each worker, a local step many.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from configs.schema import Profile
from p2ptrain.core.texts import human_bytes, human_duration
from p2ptrain.lab.bench.network import BenchRing, form_ring
from p2ptrain.lab.bench.report import BenchReport, Case, Contender, per_cent, times
from p2ptrain.lab.bench.runner import Answer, Bench
from p2ptrain.lab.bench.training import changed

STEP_S = 60.0  # a slow step, for deadlines
SYNC_STEPS = 8


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """What to measure.

    Attributes:
        profile: of strategy 'local'; each worker takes ``inner_steps`` inner steps in a step.
        compute_s: time of a micro-batch; 0: the real engine.
        steps: measured steps; one more comes first, and does not count.
        codec: of the local contender.
    """

    profile: Profile
    name: str
    workers: int
    inner_steps: int
    compute_s: float
    steps: int
    link: str
    codec: str

    def report(self) -> BenchReport:
        work = human_duration(self.compute_s) if self.compute_s else "real engine"
        title = f"local · {self.name} · {self.workers} workers × {self.inner_steps} inner steps ({work}) · {self.link}"
        settings = asdict(self) | {"profile": self.name}
        report = BenchReport("local", title, "tokens", "{:,.0f}".format, settings)
        report.columns = {"computing": ("COMPUTING", per_cent), "sent_bytes": ("SENT A STEP", human_bytes)}
        return report


async def measure_local(bench: Bench, plan: LocalPlan, report: BenchReport) -> None:
    local = changed(plan.profile, "batch", micro_batches=plan.workers * plan.inner_steps)
    one_each = changed(plan.profile, "batch", micro_batches=plan.workers)
    await _measure(bench, plan, report, local, plan.codec, plan.steps)
    await _measure(bench, plan, report, changed(local, "local", overlap=True), plan.codec, plan.steps)
    await _measure(bench, plan, report, changed(one_each, "job", strategy="sync"), "fp32", SYNC_STEPS)
    plain, ours, sync = report.cases
    saved = sync.facts["bytes_per_token"] / ours.facts["bytes_per_token"]
    report.notes = [
        "computing: the share of a step in which a worker computes; the rest it waits for the network",
        f"local sends {saved:,.0f} times fewer bytes than sync in fp32, and computes "
        f"{per_cent(plain.facts['computing'])} of the time, overlapping {per_cent(ours.facts['computing'])}; tokens/s: "
        f"{times(ours.amount / ours.contenders['ring'].median_s / (sync.amount / sync.contenders['ring'].median_s))}",
    ]


async def _measure(
    bench: Bench, plan: LocalPlan, report: BenchReport, profile: Profile, codec: str, steps: int
) -> None:
    strategy = profile.job.strategy
    inner_steps = profile.batch.micro_batches // plan.workers
    title = f"{strategy}, {'overlapping, ' * profile.local.overlap}{codec}"
    async with bench.members(plan.workers) as members:
        bench.console.progress(f"{title}: forming the ring")
        await form_ring(bench, members, BenchRing(plan.link, codec=codec))
        how: Answer = {"specs": {"ring": profile.to_spec()}, "device": "cpu", "threads": 1, "rivals": []}
        facts, *_ = await members.all("build", seconds=STEP_S, micro_batch_s=plan.compute_s, **how)
        contender = Contender(title)
        case = Case(f"H = {inner_steps}", facts["tokens_per_step"], {"ring": contender}, {})
        steps_done: list[list[Answer]] = []

        async def sample(name: str) -> list[float]:
            seconds = max(STEP_S, 2 * inner_steps * plan.compute_s)
            answers = await members.all("train", contender=name, first=len(steps_done), count=1, seconds=seconds)
            steps_done.append(answers)
            return [max(answer["seconds"][0] for answer in answers)]

        await bench.interleave(report, case, sample, rounds=steps)
    counted = steps_done[1:]
    computed_s = sum(min(answer["computed_s"] for answer in answers) for answers in counted)
    sent_bytes = sum(max(answer["sent_bytes"] for answer in answers) for answers in counted)
    case.facts["computing"] = computed_s / sum(contender.seconds)
    case.facts["sent_bytes"] = round(sent_bytes / steps)
    case.facts["bytes_per_token"] = sent_bytes / steps / case.amount
