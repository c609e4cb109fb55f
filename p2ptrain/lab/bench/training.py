"""``bench step``: training steps of this project and of DistributedDataParallel, block by block in turn.

A step uses the parts of a worker: engine, strategy, ring, the vote of the tokens, the commit. Only the seed is missing,
which is not on the path of a step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

from configs.schema import Profile
from p2ptrain.core.errors import JobFailed
from p2ptrain.core.texts import human_bytes, human_duration
from p2ptrain.lab.bench.network import BenchRing, form_ring, open_gloo
from p2ptrain.lab.bench.report import BenchReport, Case, Contender, mean, per_cent, times
from p2ptrain.lab.bench.runner import Answer, Bench, Members
from ring.session import RingSession
from ring.token import Flag, Token, difference, first_lineage, next_lineage
from ring.view import shares
from roles.compute_thread import ComputeThread
from roles.engine import WHOLE, Engine
from roles.strategies import strategy_of
from roles.strategies.interface import ConnectPeers
from roles.strategies.strategy import Strategy
from roles.worker.build import engine_builder, training_spec

if TYPE_CHECKING:
    from p2ptrain.compute.gloo import GlooGroup
    from p2ptrain.compute.rivals import DdpTrainer

RING, USUAL, DDP = "ring", "usual", "ddp"
"""The contenders: this project; this project without exact mode, if the profile has it; and torch."""
TORCH = {DDP: "DDP on Gloo", "ddp-p2p": "DDP on p2p", "fsdp2": "FSDP2 on Gloo", "fsdp2-p2p": "FSDP2 on p2p"}
"""The contenders of torch. The last three are measured only if the backend p2p is."""
BLOCK_STEPS = 5
"""Consecutive steps of one contender. It has warm caches, and all contenders meet the same load."""
WARM_STEPS = 3  # not counted: the first steps allocate, and DDP orders its buckets
STEP_S = 30.0  # a slow step, for deadlines
PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What to measure: ``steps`` of each contender, with ``threads`` for each of the ``workers``."""

    profile: Profile
    name: str
    workers: int
    threads: int
    steps: int
    ring: BenchRing
    torch: bool = False

    def report(self) -> BenchReport:
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        title = f"training step · {self.name} · {self.workers} workers × {threads} over {self.ring.described}"
        settings = {"profile": self.name, "workers": self.workers, "threads": self.threads, "steps": self.steps}
        report = BenchReport("step", title, "tokens", "{:,.0f}".format, settings | {"ring": asdict(self.ring)})
        report.columns = {"ring_to_ddp": ("×DDP", times), "hidden": ("HIDDEN", per_cent)}
        return report


async def measure_steps(bench: Bench, plan: StepPlan, report: BenchReport) -> None:
    ring, exact = plan.ring, plan.profile.job.exact
    codec = f", {ring.codec}" * (ring.codec != "fp32")
    contenders = {RING: Contender(f"this ring{', exact' * exact}{codec}")}
    if exact:
        contenders[USUAL] = Contender(f"this ring{codec}")
    async with bench.members(plan.workers, threads=plan.threads) as members:
        await form_ring(bench, members, ring)
        bench.progress("loading torch, the model and the data")
        report.torch, missing = await open_gloo(members, STEP_S * 20, p2p=plan.torch)
        if ring.link:
            missing = f"the link {ring.link} is emulated inside this program's connections"
        if missing:
            report.notes.append(f"DDP is left out: {missing}")
        else:
            contenders |= {name: Contender(title) for name, title in TORCH.items() if plan.torch or name == DDP}
            if ring.tls:
                report.notes.append("Gloo knows no encryption: DDP is measured as it is, in plain TCP")
        rivals = [name for name in TORCH if name in contenders]
        how: Answer = {"spec": plan.profile.to_spec(), "threads": plan.threads, "rivals": rivals}
        facts, *_ = await members.all("build", seconds=STEP_S, **how)
        for each in contenders.values():
            each.facts = {"losses": [], "exposed_s": [], "communicating_s": []}
        case = Case("", facts["tokens_per_step"], contenders, {"reduce_bytes": facts["reduce_bytes"]})
        await _block(members, contenders, 0, WARM_STEPS, counted=False)
        report.cases.append(case)
        for done in range(0, plan.steps, BLOCK_STEPS):
            count = min(BLOCK_STEPS, plan.steps - done)
            await _block(members, contenders, WARM_STEPS + done, count, counted=True)
            rates = (f"{each.title} {report.rate(case.amount / each.median_s)}" for each in contenders.values())
            bench.progress(f"step {done + count} of {plan.steps}, tokens/s: {', '.join(rates)}")
            conclude(report, case)


async def _block(members: Members, contenders: dict[str, Contender], first: int, count: int, *, counted: bool) -> None:
    for name, each in contenders.items():
        answers = await members.all("train", contender=name, first=first, count=count, seconds=count * STEP_S)
        add_block(each, answers, counted=counted)


def add_block(contender: Contender, answers: list[Answer], *, counted: bool) -> None:
    """Add the samples of a block. A step takes as long as its slowest member. Losses count during warm-up, too."""
    contender.facts["losses"] += answers[0]["losses"]
    if counted:
        contender.seconds += [max(step) for step in zip(*(answer["seconds"] for answer in answers), strict=True)]
        for name in ("exposed_s", "communicating_s"):
            steps = zip(*(answer.get(name, ()) for answer in answers), strict=True)
            contender.facts[name] += [mean(step) for step in steps]


def conclude(report: BenchReport, case: Case) -> None:
    """Compute the facts and notes from the steps so far."""
    ours, facts = case.contenders[RING], case.facts
    waited_s, under_way_s = (math.fsum(ours.facts[name]) for name in ("exposed_s", "communicating_s"))
    facts["ring_to_ddp"] = case.ratio(DDP, RING)
    facts["ddp_p2p_to_gloo"] = case.ratio(DDP, "ddp-p2p")
    facts["fsdp2_p2p_to_gloo"] = case.ratio("fsdp2", "fsdp2-p2p")
    facts["exact_to_usual_step"] = case.ratio(RING, USUAL)
    facts["hidden"] = max(0.0, 1 - waited_s / under_way_s) if under_way_s else None
    notes = [
        f"communication: a step waits {human_duration(mean(ours.facts['exposed_s']))} for the ring after its backward "
        f"pass; {human_bytes(facts['reduce_bytes'])} a step; hidden: the part that overlaps the backward pass"
    ]
    if (cost := facts["exact_to_usual_step"]) is not None:
        notes.append(f"exact sums: a step takes {cost:.2f} times as long as in the usual mode")
    if theirs := [case.contenders[name] for name in TORCH if name in case.contenders]:
        pairs = [pair for each in theirs for pair in zip(ours.facts["losses"], each.facts["losses"], strict=False)]
        facts["largest_relative_loss_difference"] = most = max(abs(one - other) / abs(other) for one, other in pairs)
        notes.append(f"losses of the same {len(ours.facts['losses'])} steps differ by {most:.1e} at most, relative")
    report.notes = [note for note in report.notes if "left out" in note or "Gloo knows" in note] + notes


def _engine(profile: Profile, threads: int, micro_batch_s: float) -> Engine:
    if not micro_batch_s:
        return engine_builder(device="cpu", threads=threads)(profile, WHOLE)
    from p2ptrain.compute.model import model_config, parameter_count
    from p2ptrain.lab.bench.local import TimedEngine

    numel = parameter_count(model_config(training_spec(profile).model, 256))  # a new model is one of bytes
    return TimedEngine(profile, numel, micro_batch_s)


@dataclass(slots=True)
class RingTrainer:
    """This project's trainer in one mode."""

    engine: Engine
    strategy: Strategy
    lineage: str


class TrainingContender:
    """The trainers of one member; ``build`` makes them. ``ours``: by contender."""

    def __init__(
        self,
        session: RingSession,
        compute: ComputeThread,
        ours: dict[str, RingTrainer],
        rivals: dict[str, DdpTrainer],
        micro_batches: int,
    ) -> None:
        self._session, self._compute, self._ours = session, compute, ours
        self._rivals = rivals
        self._first, self._count = shares(micro_batches, session.size)[session.rank]
        engine = ours[RING].engine
        self.facts: Answer = {
            "tokens_per_step": micro_batches * engine.data.tokens_per_micro_batch,
            "reduce_bytes": engine.reduce_buffer.nbytes,
            "micro_batches": self._count,
        }

    @classmethod
    async def build(
        cls,
        spec: str,
        session: RingSession,
        *,
        threads: int,
        gloo: GlooGroup | None = None,
        rivals: Sequence[str] = (),
        micro_batch_s: float = 0.0,
    ) -> TrainingContender:
        """``micro_batch_s``: wait so long instead of computing. Raises what ``Trainer`` and ``DdpTrainer`` raise."""
        profile = Profile.from_spec_untrusted(spec)
        compute = ComputeThread()
        modes = {RING: profile}
        if profile.job.exact:  # the usual mode shows what exact mode costs
            modes[USUAL] = profile.model_copy(update={"job": profile.job.model_copy(update={"exact": False})})
        factory, ours = strategy_of(profile), {}
        for name, mode in modes.items():
            engine = await compute.run(_engine, mode, threads, micro_batch_s)
            strategy = factory(engine, compute, lambda: None, profile.ring.bucket_bytes)
            await strategy.begin_view(session, cast(ConnectPeers, None))  # each member holds the whole model
            ours[name] = RingTrainer(engine, strategy, first_lineage("bench"))
        theirs: dict[str, DdpTrainer] = {}
        for name in rivals:
            from p2ptrain.compute.rivals import DdpTrainer

            assert gloo is not None, "no group was opened"
            kind, _, backend = name.partition("-")
            make = partial(DdpTrainer, backend=backend or "gloo", sharded=kind != DDP)
            theirs[name] = await compute.run(make, gloo, training_spec(profile))
        return cls(session, compute, ours, theirs, profile.batch.micro_batches)

    async def train(self, contender: str, first: int, count: int) -> Answer:
        """Run ``count`` steps. Returns the seconds and the loss of each; for the ring also its communication times."""
        if contender in self._rivals:
            return await self._train_rival(self._rivals[contender], first, count)
        answer: Answer = {"seconds": [], "losses": [], "exposed_s": [], "communicating_s": [], "computed_s": 0.0}
        sent_bytes = self._session.links.bytes_out
        for step in range(first, first + count):
            began = time.perf_counter()
            answer["losses"].append(await self._step(self._ours[contender], step, answer))
            answer["seconds"].append(time.perf_counter() - began)
        answer["sent_bytes"] = self._session.links.bytes_out - sent_bytes
        return answer

    async def _train_rival(self, rival: DdpTrainer, first: int, count: int) -> Answer:
        seconds: list[float] = []
        for step in range(first, first + count):
            began = time.perf_counter()
            await self._compute.run(rival.step, step, self._first, self._count)
            seconds.append(time.perf_counter() - began)
        return {"seconds": seconds, "losses": await self._compute.run(rival.losses)}

    async def _step(self, ours: RingTrainer, step: int, answer: Answer) -> float:
        session, strategy = self._session, ours.strategy
        began = time.perf_counter()
        await strategy.compute(step, self._first, self._count, patience_s=PATIENCE_S)
        answer["computed_s"] += time.perf_counter() - began
        contribution = await strategy.reduce()
        answer["exposed_s"].append(strategy.exposed_s)
        answer["communicating_s"].append(strategy.communicating_s)
        lineage = bytes.fromhex(ours.lineage)
        mine = Token(session.view.generation, step, Flag(0), contribution.part, contribution.digest, lineage)
        gathered = await session.all_gather(mine.encode(), patience_s=PATIENCE_S)
        tokens = [Token.decode_untrusted(token) for token in gathered]
        if reason := next(filter(None, (difference(mine, token) for token in tokens)), ""):
            raise JobFailed(f"the members do not hold the same bytes: {reason} differs")
        ours.lineage = next_lineage(ours.lineage, contribution.digest)
        return (await strategy.commit(step, contribution.part)).loss
