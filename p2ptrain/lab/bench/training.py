"""``bench step``: training steps of this project and of torch, a block of steps of each in turn.

``measure_steps`` runs in the command's process and orders blocks. A ``TrainingMember`` in each member's process runs
them with the parts of a worker: engine, strategy, ring, the vote of the tokens, the commit. Only the seed is missing,
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
from p2ptrain.lab.bench.runner import Answer, Bench
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

RING, USUAL = "ring", "usual"
"""The contenders of this project: as the profile says; and without exact mode, if the profile has it."""
DDP = "ddp"
RIVALS = {DDP: "DDP on Gloo", "ddp-p2p": "DDP on p2p", "fsdp2": "FSDP2 on Gloo", "fsdp2-p2p": "FSDP2 on p2p"}
"""The contenders of torch, and their titles. All but DDP are measured only to judge the backend p2p of torch."""
BLOCK_STEPS = 5
"""Steps of a block: enough to warm the caches, and so few that all contenders meet the same load of the machine."""
WARM_STEPS = 3  # not counted: the first steps allocate, and DDP orders its buckets
STEP_S = 30.0  # a slow step, for deadlines
PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What to measure: ``steps`` of each contender, with ``threads`` for each of the ``workers``. ``backend_p2p``: also
    the rivals that judge this backend of torch."""

    profile: Profile
    name: str
    workers: int
    threads: int
    steps: int
    ring: BenchRing
    backend_p2p: bool = False

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
        report.torch, missing = await open_gloo(members, STEP_S * 20, p2p=plan.backend_p2p)
        if ring.link:
            missing = f"the link {ring.link} is emulated inside this program's connections"
        if missing:
            report.notes.append(f"DDP is left out: {missing}")
        else:
            names = RIVALS if plan.backend_p2p else (DDP,)
            contenders |= {name: Contender(RIVALS[name]) for name in names}
            if ring.tls:
                report.notes.append("Gloo knows no encryption: DDP is measured as it is, in plain TCP")
        rivals = [name for name in RIVALS if name in contenders]
        spec = plan.profile.to_spec()
        facts, *_ = await members.all("build", seconds=STEP_S, spec=spec, threads=plan.threads, rivals=rivals)
        for contender in contenders.values():
            contender.facts = {"losses": [], "exposed_s": [], "communicating_s": []}
        case = Case(plan.name, facts["tokens_per_step"], contenders, {"reduce_bytes": facts["reduce_bytes"]})
        steps_done = dict.fromkeys(contenders, 0)

        async def sample(name: str) -> list[float]:
            """Run a block of steps. A step takes as long as its slowest member. Losses count during warm-up, too."""
            first, facts = steps_done[name], contenders[name].facts
            count = min(BLOCK_STEPS, WARM_STEPS + plan.steps - first) if first else WARM_STEPS
            steps_done[name] += count
            answers = await members.all("train", contender=name, first=first, count=count, seconds=count * STEP_S)
            facts["losses"] += answers[0]["losses"]
            for fact in ("exposed_s", "communicating_s") if first else ():
                steps = zip(*(answer.get(fact, ()) for answer in answers), strict=True)
                facts[fact] += [mean(step) for step in steps]
            return [max(step) for step in zip(*(answer["seconds"] for answer in answers), strict=True)]

        await bench.interleave(report, case, sample, rounds=math.ceil(plan.steps / BLOCK_STEPS))
    report.notes += summarize(case)


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
        f"communication: a step waits {human_duration(mean(ring['exposed_s']))} for the ring after its backward "
        f"pass; {human_bytes(facts['reduce_bytes'])} a step; hidden: the part that overlaps the backward pass"
    ]
    if (factor := facts["exact_to_usual_step"]) is not None:
        notes.append(f"exact sums: a step takes {factor:.2f} times as long as in the usual mode")
    if rivals := [case.contenders[name].facts for name in RIVALS if name in case.contenders]:
        pairs = [pair for rival in rivals for pair in zip(ring["losses"], rival["losses"], strict=False)]
        largest = max(abs(loss - rival_loss) / abs(rival_loss) for loss, rival_loss in pairs)
        facts["largest_relative_loss_difference"] = largest
        notes.append(f"losses of the same {len(ring['losses'])} steps differ by {largest:.1e} at most, relative")
    return notes


def _build_engine(profile: Profile, threads: int, micro_batch_s: float) -> Engine:
    if not micro_batch_s:
        return engine_builder(device="cpu", threads=threads)(profile, WHOLE)
    from p2ptrain.compute.model import model_config, parameter_count
    from p2ptrain.lab.stand_in import FastStandIn

    numel = parameter_count(model_config(training_spec(profile).model, 256))  # a new model is one of bytes
    return FastStandIn(profile, numel=numel, on_micro_batch=lambda step, index: time.sleep(micro_batch_s))


class TrainingMember:
    """One member's trainers of all contenders, by name; ``build`` makes them. Rivals are trainers of torch."""

    def __init__(self, session: RingSession, gloo: GlooGroup | None) -> None:
        self._session, self._gloo, self._compute = session, gloo, ComputeThread()
        self._strategies: dict[str, Strategy] = {}  # of this project, one for each mode
        self._lineages: dict[str, str] = {}  # of the steps that each has committed
        self._rivals: dict[str, DdpTrainer] = {}
        self._first = self._count = 0

    async def build(self, spec: str, threads: int, rivals: Sequence[str], micro_batch_s: float = 0.0) -> Answer:
        """Build the trainers of a profile, and ``rivals``. Raises what ``Trainer`` and ``DdpTrainer`` raise.

        ``micro_batch_s``: wait so long instead of computing.
        """
        profile, session = Profile.from_spec_untrusted(spec), self._session
        modes = {RING: profile}
        if profile.job.exact:  # the usual mode shows what exact mode costs
            modes[USUAL] = profile.model_copy(update={"job": profile.job.model_copy(update={"exact": False})})
        make_strategy, engines = strategy_of(profile), dict[str, Engine]()
        for name, mode in modes.items():
            engines[name] = engine = await self._compute.run(_build_engine, mode, threads, micro_batch_s)
            strategy = make_strategy(engine, self._compute, lambda: None, profile.ring.bucket_bytes)
            await strategy.begin_view(session, cast(ConnectPeers, None))  # each member holds the whole model
            self._strategies[name], self._lineages[name] = strategy, first_lineage("bench")
        for name in rivals:
            from p2ptrain.compute.rivals import DdpTrainer

            assert self._gloo is not None, "no group was opened"
            kind, _, backend = name.partition("-")
            make = partial(DdpTrainer, backend=backend or "gloo", sharded=kind != DDP)
            self._rivals[name] = await self._compute.run(make, self._gloo, training_spec(profile))
        micro_batches, engine = profile.batch.micro_batches, engines[RING]
        self._first, self._count = shares(micro_batches, session.size)[session.rank]
        return {
            "tokens_per_step": micro_batches * engine.data.tokens_per_micro_batch,
            "reduce_bytes": engine.reduce_buffer.nbytes,
        }

    async def train(self, contender: str, first: int, count: int) -> Answer:
        """Run the steps from ``first`` on. Returns the seconds and loss of each; of the ring also its communication."""
        if contender in self._rivals:
            return await self._train_rival(self._rivals[contender], first, count)
        answer: Answer = {"seconds": [], "losses": [], "exposed_s": [], "communicating_s": [], "computed_s": 0.0}
        bytes_before = self._session.links.bytes_out
        for step in range(first, first + count):
            await self._run_step(contender, step, answer)
        answer["sent_bytes"] = self._session.links.bytes_out - bytes_before
        return answer

    async def _train_rival(self, rival: DdpTrainer, first: int, count: int) -> Answer:
        seconds: list[float] = []
        for step in range(first, first + count):
            began = time.perf_counter()
            await self._compute.run(rival.step, step, self._first, self._count)
            seconds.append(time.perf_counter() - began)
        return {"seconds": seconds, "losses": await self._compute.run(rival.losses)}

    async def _run_step(self, contender: str, step: int, answer: Answer) -> None:
        """Run one step as a worker does, and add its times and loss to ``answer``."""
        session, strategy = self._session, self._strategies[contender]
        began = time.perf_counter()
        await strategy.compute(step, self._first, self._count, patience_s=PATIENCE_S)
        answer["computed_s"] += time.perf_counter() - began
        contribution = await strategy.reduce()
        answer["exposed_s"].append(strategy.exposed_s)
        answer["communicating_s"].append(strategy.communicating_s)
        lineage = bytes.fromhex(self._lineages[contender])
        own = Token(session.view.generation, step, Flag(0), contribution.part, contribution.digest, lineage)
        messages = await session.all_gather(own.encode(), patience_s=PATIENCE_S)
        tokens = [Token.decode_untrusted(message) for message in messages]
        if reason := next(filter(None, (difference(own, token) for token in tokens)), ""):
            raise JobFailed(f"the members do not hold the same bytes: {reason} differs")
        self._lineages[contender] = next_lineage(self._lineages[contender], contribution.digest)
        answer["losses"].append((await strategy.commit(step, contribution.part)).loss)
        answer["seconds"].append(time.perf_counter() - began)
