"""``bench step`` and ``bench device``: training steps of this project and of torch, a block of steps of each in turn.

``measure_steps`` runs in the command's process and orders blocks. A ``TrainingMember`` in each member's process runs
them with the parts of a worker: engine, strategy, ring, the vote of the tokens, the commit. Only the seed is missing,
which is not on the path of a step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any, cast

from configs.schema import Profile
from p2ptrain.core.errors import JobFailed
from p2ptrain.core.texts import human_bytes, human_duration
from p2ptrain.lab.bench.network import BenchRing, form_ring, open_gloo
from p2ptrain.lab.bench.report import BenchReport, Case, Contender, per_cent, times
from p2ptrain.lab.bench.runner import Answer, Bench
from ring.session import RingSession
from ring.token import Flag, Shares, Token, balance_counts, difference, first_lineage, next_lineage
from roles.compute_thread import ComputeThread
from roles.engine import WHOLE, Engine
from roles.strategies import strategy_of
from roles.strategies.interface import ConnectPeers
from roles.strategies.strategy import Strategy
from roles.worker.build import engine_builder, training_spec

if TYPE_CHECKING:
    from p2ptrain.compute.gloo import GlooGroup
    from p2ptrain.compute.rivals import TorchTrainer

RING, USUAL, BLOCKS = "ring", "usual", "blocks"
"""The contenders of this project: as the profile says; without exact mode, if the profile has it; with compiled blocks,
for a worker alone."""
DDP, PLAIN, COMPILED = "ddp", "plain", "compiled"
GROUPED = {DDP: "DDP on Gloo", "ddp-p2p": "DDP on p2p", "fsdp2": "FSDP2 on Gloo", "fsdp2-p2p": "FSDP2 on p2p"}
RIVALS = GROUPED | {PLAIN: "plain loop", COMPILED: "compiled loop"}
"""The contenders of torch, and their titles. The last two train in one process. Of the others all but DDP are measured
only to judge the backend p2p of torch."""
PHASES = {
    "passes_s": "forward and backward passes",
    "digests_s": "digests and norms after them",
    "vote_s": "the vote",
    "apply_s": "applying",
}
"""The phases of a step of this project, in their order. """
TIMES = (*PHASES, "exposed_s", "communicating_s")
BLOCK_STEPS = 5
"""Steps of a block: enough to warm the caches, and so few that all contenders meet the same load of the machine."""
WARM_STEPS = 3  # not counted: the first steps allocate, and DDP orders its buckets
STEP_S = 30.0  # a slow step, for deadlines
PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What to measure: ``steps`` of each contender on ``device``, with ``threads`` for each of the ``workers``.
    ``rivals``: of ``GROUPED``; for a worker alone of the others."""

    profile: Profile
    name: str
    workers: int
    threads: int
    steps: int
    ring: BenchRing
    rivals: Sequence[str] = (DDP,)
    device: str = "cpu"

    @property
    def is_alone(self) -> bool:
        return self.workers == 1

    def report(self) -> BenchReport:
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        title = f"training step · {self.name} · {self.workers} workers × {threads} over {self.ring.described}"
        if self.is_alone:
            title = f"training step · {self.name} · one worker, {self.profile.device.precision}"
        settings = {"profile": self.name, "workers": self.workers, "threads": self.threads, "steps": self.steps}
        settings |= {"device": self.device, "ring": asdict(self.ring)}
        report = BenchReport("device" if self.is_alone else "step", title, "tokens", "{:,.0f}".format, settings)
        report.columns = {"ring_to_ddp": ("×DDP", times), "hidden": ("HIDDEN", per_cent)}
        if self.is_alone:
            report.columns = {"worker_to_plain": ("×PLAIN", times), "worker_to_compiled": ("×COMPILED", times)}
        return report


async def measure_steps(bench: Bench, plan: StepPlan, report: BenchReport) -> None:
    ring, exact, profile = plan.ring, plan.profile.job.exact, plan.profile
    if plan.is_alone or profile.device.compile == "auto":  # else the blocks may change while they are measured
        profile = changed(profile, "device", compile="off")
    codec, modes = f", {ring.codec}" * (ring.codec != "fp32"), {RING: profile}
    contenders = {RING: Contender("this worker" if plan.is_alone else f"this ring{', exact' * exact}{codec}")}
    if exact:  # the usual mode shows what exact mode costs
        contenders[USUAL] = Contender(f"this ring{codec}")
        modes[USUAL] = changed(profile, "job", exact=False)
    elif COMPILED in plan.rivals and profile.device.precision != "tf32":  # whose blocks are never compiled
        contenders[BLOCKS] = Contender("this worker, compiled")
        modes[BLOCKS] = changed(profile, "device", compile="on")
    async with bench.members(plan.workers, threads=plan.threads) as members:
        await form_ring(bench, members, ring)
        bench.console.progress("loading torch, the model and the data")
        missing = ""
        if not plan.is_alone:
            report.torch, missing = await open_gloo(members, STEP_S * 20, p2p=len(plan.rivals) > 1)
        if ring.link:
            missing = f"the link {ring.link} is emulated inside this program's connections"
        if missing:
            report.notes.append(f"DDP is left out: {missing}")
        elif ring.tls:
            report.notes.append("Gloo knows no encryption: DDP is measured as it is, in plain TCP")
        rivals = [] if missing else plan.rivals
        contenders |= {name: Contender(RIVALS[name]) for name in rivals}
        how: Answer = {"specs": {name: mode.to_spec() for name, mode in modes.items()}, "device": plan.device}
        facts, *_ = await members.all("build", seconds=STEP_S, threads=plan.threads, rivals=rivals, **how)
        for name, contender in contenders.items():
            contender.facts = {"losses": [], **{fact: [] for fact in TIMES if name in modes}}
        case = Case(plan.name, facts["tokens_per_step"], contenders, facts)
        steps_done = dict.fromkeys(contenders, 0)

        async def sample(name: str) -> list[float]:
            """Run a block of steps. A step takes as long as its slowest member. Losses count during warm-up, too."""
            first, facts = steps_done[name], contenders[name].facts
            count = min(BLOCK_STEPS, WARM_STEPS + plan.steps - first) if first else WARM_STEPS
            steps_done[name] += count
            answers = await members.all("train", contender=name, first=first, count=count, seconds=count * STEP_S)
            facts["losses"] += answers[0]["losses"]
            report.notes += answers[0]["notices"]
            for fact in TIMES if first and name in modes else ():
                steps = zip(*(answer[fact] for answer in answers), strict=True)
                facts[fact] += [fmean(step) for step in steps]
            return [max(step) for step in zip(*(answer["seconds"] for answer in answers), strict=True)]

        await bench.interleave(report, case, sample, rounds=math.ceil(plan.steps / BLOCK_STEPS))
    report.torch = facts.pop("torch", report.torch)
    report.notes += (summarize_device if plan.is_alone else summarize)(case) + compare_losses(case)


def changed(profile: Profile, table: str, **values: Any) -> Profile:
    """The profile with other values in one table, unchecked."""
    return profile.model_copy(update={table: getattr(profile, table).model_copy(update=values)})


def summarize(case: Case) -> list[str]:
    """Compute the facts of ``case`` from its steps. Returns notes that explain them."""
    ring, facts = case.contenders[RING].facts, case.facts
    exposed_s, communicating_s = math.fsum(ring["exposed_s"]), math.fsum(ring["communicating_s"])
    facts["ring_to_ddp"] = case.ratio(DDP, RING)
    facts["ddp_p2p_to_gloo"] = case.ratio(DDP, "ddp-p2p")
    facts["fsdp2_p2p_to_gloo"] = case.ratio("fsdp2", "fsdp2-p2p")
    facts["exact_to_usual_step"] = case.ratio(RING, USUAL)
    facts["hidden"] = max(0.0, 1 - exposed_s / communicating_s) if communicating_s else None
    notes = [
        f"communication: a step waits {human_duration(fmean(ring['exposed_s']))} for the ring after its backward "
        f"pass; {human_bytes(facts['reduce_bytes'])} a step; hidden: the part that overlaps the backward pass"
    ]
    if (factor := facts["exact_to_usual_step"]) is not None:
        notes.append(f"exact sums: a step takes {factor:.2f} times as long as in the usual mode")
    return notes


def summarize_device(case: Case) -> list[str]:
    """As ``summarize``, of a worker alone."""
    worker, facts = case.contenders[RING], case.facts
    facts |= {"worker_to_plain": case.ratio(PLAIN, RING), "worker_to_compiled": case.ratio(COMPILED, RING)}
    facts |= {"blocks_to_plain": case.ratio(PLAIN, BLOCKS), "blocks_to_compiled": case.ratio(COMPILED, BLOCKS)}
    phases_s = {title: fmean(worker.facts[name]) for name, title in PHASES.items()}
    phases_s["other"] = max(0.0, fmean(worker.seconds) - math.fsum(phases_s.values()))
    facts["phases_s"] = phases_s
    parts = ", ".join(f"{title} {human_duration(seconds)}" for title, seconds in phases_s.items())
    notes = [
        f"{facts['device']}; {facts['parameters']:,} parameters; {case.amount:,.0f} tokens a step",
        f"a step of this worker: {parts}",
    ]
    if facts["blocks_to_plain"] and facts["blocks_to_compiled"]:
        ratios = f"{times(facts['blocks_to_plain'])} the plain loop, {times(facts['blocks_to_compiled'])} the compiled"
        notes.append(f"this worker, compiled: {ratios} loop")
    if facts["flops_per_token"]:
        for each in case.contenders.values():
            each.facts["mfu"] = facts["flops_per_token"] * case.amount / each.median_s / facts["peak_flops"]
        shares = ", ".join(f"{each.title} {per_cent(each.facts['mfu'])}" for each in case.contenders.values())
        notes.append(
            f"model FLOP utilization: {shares}, of the {facts['peak_flops'] / 1e12:.3g} TFLOP/s that a large matrix "
            f"product of this precision reached in this run; a token takes {facts['flops_per_token'] / 1e6:,.4g} "
            "MFLOP: 6 for each parameter of a matrix product, and attention (PaLM, appendix B)"
        )
    return notes


def compare_losses(case: Case) -> list[str]:
    """Add the largest difference from the others' losses to the facts of ``case``. Returns a note that says it."""
    losses, *others = (contender.facts["losses"] for contender in case.contenders.values())
    pairs = [pair for other in others for pair in zip(losses, other, strict=False)]
    if not pairs:
        return []
    largest = max(abs(loss - other_loss) / abs(other_loss) for loss, other_loss in pairs)
    case.facts["largest_relative_loss_difference"] = largest
    return [f"losses of the same {len(losses)} steps differ by {largest:.1e} at most, relative"]


def _build_engine(profile: Profile, device: str, threads: int, micro_batch_s: float) -> Engine:
    if not micro_batch_s:
        return engine_builder(device=device, threads=threads)(profile, WHOLE)
    from p2ptrain.compute.model import model_config, parameter_count
    from p2ptrain.lab.stand_in import FastStandIn

    numel = parameter_count(model_config(training_spec(profile).model, 256))  # a new model is one of bytes
    return FastStandIn(profile, numel=numel, on_micro_batch=lambda step, index: time.sleep(micro_batch_s))


class TrainingMember:
    """One member's trainers of all contenders, by name; ``build`` makes them. Rivals are trainers of torch."""

    def __init__(self, session: RingSession, gloo: GlooGroup | None) -> None:
        self._session, self._gloo, self._compute = session, gloo, ComputeThread()
        self._engines: dict[str, Engine] = {}  # of this project, one for each mode
        self._strategies: dict[str, Strategy] = {}
        self._lineages: dict[str, str] = {}  # of the steps that each has committed
        self._rivals: dict[str, TorchTrainer] = {}
        self._first = self._count = 0
        self._passed: Any = None  # mark of the clock after the newest micro-batch

    async def build(
        self, specs: Mapping[str, str], device: str, threads: int, rivals: Sequence[str], micro_batch_s: float = 0.0
    ) -> Answer:
        """Build the trainers of this project, with these profiles by name, and ``rivals``. Raises what ``Trainer`` and
        ``TorchTrainer`` raise. The answer of a member alone describes its model and device, too.

        ``micro_batch_s``: wait so long instead of computing.
        """
        from p2ptrain.compute.device import DeviceClock, pick_device

        session, engines, profile = self._session, self._engines, Profile.from_spec_untrusted(specs[RING])
        chosen, run = pick_device(device, threads), self._compute.run
        self._device, self._clock = chosen, DeviceClock(chosen.torch_device)
        for name, mode in ((name, Profile.from_spec_untrusted(spec)) for name, spec in specs.items()):
            engines[name] = engine = await run(_build_engine, mode, device, threads, micro_batch_s)
            strategy = strategy_of(mode)(engine, self._compute, self._on_micro_batch, mode.ring.bucket_bytes)
            await strategy.begin_view(session, cast(ConnectPeers, None))  # each member holds the whole model
            self._strategies[name], self._lineages[name] = strategy, first_lineage("bench")
        for name in rivals:
            from p2ptrain.compute.rivals import TorchTrainer

            kind, _, backend = name.partition("-")
            group = self._gloo if name in GROUPED else None
            self._rivals[name] = await run(TorchTrainer, training_spec(profile), chosen, kind, group, backend or "gloo")
        shares = Shares(balance_counts(profile.batch.micro_batches, [0] * session.size))
        self._first, self._count = shares.of(session.rank)
        facts: Answer = {
            "tokens_per_step": profile.batch.micro_batches * engines[RING].data.tokens_per_micro_batch,
            "reduce_bytes": engines[RING].reduce_buffer.nbytes,
        }
        if session.size == 1:
            from p2ptrain.compute.rivals import describe

            facts |= await run(describe, training_spec(profile), chosen)
        return facts

    async def train(self, contender: str, first: int, count: int) -> Answer:
        """Run the steps from ``first`` on. Returns the seconds and loss of each; of this project also the times in
        ``TIMES``. A GPU is awaited at the end of the block only, so there each step has the mean of the block."""
        rival, marks = self._rivals.get(contender), list[list[Any]]()
        answer: Answer = {"seconds": [], "losses": [], "computed_s": 0.0, **{name: [] for name in TIMES}}
        engine: Any = self._engines.get(contender)
        compiler = getattr(engine, "compiler", None)
        bytes_before, began = self._session.links.bytes_out, time.perf_counter()
        for step in range(first, first + count):
            step_began = time.perf_counter()
            if rival is not None:
                await self._compute.run(rival.step, step, self._first, self._count)
            else:
                if step == WARM_STEPS - 1 and compiler is not None and compiler.thread.is_alive():
                    await self._compute.run(compiler.thread.join)  # this step begins to use what it compiled
                marks.append(await self._run_step(contender, step, answer))
            answer["seconds"].append(time.perf_counter() - step_began)
        await self._compute.run(self._device.wait)
        if self._device.kind != "cpu":
            answer["seconds"] = [(time.perf_counter() - began) / count] * count
        if rival is not None:
            answer["losses"] = await self._compute.run(rival.losses)
        answer["notices"] = [text for _, text in engine.notices] if engine is not None else []
        if engine is not None:
            engine.notices.clear()
        for moments in marks:
            for name, (before, after) in zip(PHASES, pairwise(moments), strict=True):
                answer[name].append(self._clock.between_s(before, after))
        answer["sent_bytes"] = self._session.links.bytes_out - bytes_before
        return answer

    def _on_micro_batch(self) -> None:
        self._passed = self._clock.mark()

    async def _run_step(self, contender: str, step: int, answer: Answer) -> list[Any]:
        """Run one step as a worker does, and add its times and loss to ``answer``. Returns the marks of the clock that
        bound its ``PHASES``."""
        session, strategy, mark = self._session, self._strategies[contender], self._clock.mark
        began, start = time.perf_counter(), mark()
        await strategy.compute(step, self._first, self._count, patience_s=PATIENCE_S)
        answer["computed_s"] += time.perf_counter() - began
        contribution = await strategy.reduce()
        answer["exposed_s"].append(strategy.exposed_s)
        answer["communicating_s"].append(strategy.communicating_s)
        moments = [start, self._passed, mark()]
        lineage = bytes.fromhex(self._lineages[contender])
        own = Token(session.view.generation, step, Flag(0), contribution.part, contribution.digest, lineage)
        messages = await session.all_gather(own.encode(), patience_s=PATIENCE_S)
        tokens = [Token.decode_untrusted(message) for message in messages]
        if reason := next(filter(None, (difference(own, token) for token in tokens)), ""):
            raise JobFailed(f"the members do not hold the same bytes: {reason} differs")
        self._lineages[contender] = next_lineage(self._lineages[contender], contribution.digest)
        moments.append(mark())
        answer["losses"].append((await strategy.commit(step, contribution.part)).loss)
        return [*moments, mark()]
