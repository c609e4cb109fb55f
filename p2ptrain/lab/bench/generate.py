"""``bench generate``: what a drafter gains and what splitting a model costs, on real peers over emulated links.

A seed, a verifier, and workers or a drafter run as ``join`` starts them, one round trip away from each other. Models
are real, or only take time; then the text is known beforehand. Texts are requested over HTTP, with and without drafts
in turn. The time of a text that is not the verifier's own does not count. The rival of real models is transformers in
one process: ``generate`` and its assisted generation.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from itertools import count, product
from pathlib import Path
from typing import Any

from p2ptrain.cluster.local_cluster import LOOPBACK, LocalCluster, free_port
from p2ptrain.core.adapters import is_model
from p2ptrain.core.errors import JobFailed, NetworkError, UserError
from p2ptrain.lab.bench.report import BenchReport, Case, Contender, times
from p2ptrain.lab.bench.runner import Answer, Bench, Members
from roles.timed_model import text_after, write_timed_model

SIZES = {"hidden_size": 512, "layers": 12, "heads": 8, "kv_heads": 8, "intermediate_size": 1360}
PROMPTS = ("import os", "class Node:", "def read_file(path):", "for key, value in", "raise ValueError(")


@dataclass(frozen=True, slots=True)
class GeneratePlan:
    """What to measure.

    Attributes:
        verifier: a model's directory; empty: a model that takes ``pass_s`` or, if it is split, a random model.
        drafter: a smaller model's directory; empty: one that takes ``draft_s`` and is right as often as an alpha says,
            or none if the verifier is real.
        stages: workers that hold the verifier's model; 0: it is not split.
    """

    verifier: str
    drafter: str
    stages: int
    round_trips_ms: list[float]
    alphas: list[float]
    pass_s: float
    draft_s: float
    tokens: int
    texts: int
    threads: int

    @property
    def is_timed(self) -> bool:
        return not self.verifier and not self.stages

    @property
    def drafts(self) -> bool:
        return self.is_timed or bool(self.drafter)

    def report(self) -> BenchReport:
        name = Path(self.verifier).name or ("a random model" if self.stages else "a model that only takes time")
        split = f" · split over {self.stages} workers" if self.stages else ""
        drafter = Path(self.drafter).name or f"one that takes {1e3 * self.draft_s:g} ms"
        title = f"generate · {name}{split}" + (f" · drafter: {drafter}" if self.drafts else "")
        report = BenchReport("generate", title, "tokens", "{:.1f}".format, asdict(self))
        report.columns = {"faster": ("FASTER", times)}
        report.notes.append(
            "time per token, from the request to the last; faster: than the verifier alone; every text was compared"
        )
        return report


@dataclass(slots=True)
class GeneratedText:
    """A text, and when each piece of it arrived."""

    text: str = ""
    tokens: int = 0
    asked_s: float = 0.0
    came_s: list[float] = field(default_factory=list)

    @property
    def token_s(self) -> float:
        """Time per token. It includes the pass over the prompt, as that of transformers does."""
        return (self.came_s[-1] - self.asked_s) / max(1, self.tokens)


def ask(port: int, body: Answer) -> GeneratedText:
    """Request the text that follows a prompt over HTTP. Blocks. Raises ``JobFailed``, ``NetworkError``."""
    text = GeneratedText(asked_s=time.perf_counter())
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=120.0)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise JobFailed(f"the verifier refused: {answer.read().decode(errors='replace')[:500]}")
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                raise JobFailed(f"a text failed: {event['error'].get('message')}")
            if usage := event.get("usage"):
                text.tokens = int(usage["completion_tokens"])
            if piece := "".join(each["text"] for each in event.get("choices", ())):
                text.text += piece
                text.came_s.append(time.perf_counter())
    except (OSError, http.client.HTTPException) as error:
        raise NetworkError(f"a text broke off: {error}") from error
    finally:
        connection.close()
    if not text.came_s:
        raise JobFailed("the verifier wrote a text without a token")
    return text


class Peers:
    """The cluster of one case; ``start_peers`` makes it. ``texts``: most that are requested at a time."""

    def __init__(self, cluster: LocalCluster, port: int, texts: int) -> None:
        self.cluster, self._port = cluster, port
        self._threads = ThreadPoolExecutor(texts)
        self.model = ""

    async def write(self, body: Answer) -> GeneratedText:
        """Request a text, see ``ask``. Raises ``P2PTrainError``."""
        loop = asyncio.get_running_loop()

        async def work() -> GeneratedText:
            return await loop.run_in_executor(self._threads, ask, self._port, body | {"model": self.model})

        return await self.cluster.while_alive(work(), needed=[self.cluster.seed, self.cluster.peers["verifier"]])

    async def end(self) -> None:
        """End all processes, and with them all requests."""
        await self.cluster.end()
        self._threads.shutdown(wait=False, cancel_futures=True)


@asynccontextmanager
async def start_peers(
    bench: Bench, models: dict[str, Path], *, stages: int, threads: int, round_trip_ms: float, texts: int = 1
) -> AsyncIterator[Peers]:
    """Start a verifier and its workers or drafter, and wait until they are connected. Raises ``P2PTrainError``.

    Args:
        models: directories, by role.
        stages: workers that hold the verifier's model; 0: it holds it itself.
        threads: for computing, of each process that does.
        texts: most that the verifier writes at a time.
    """
    cluster, port = LocalCluster(bench.root / f"cluster-{len(os.listdir(bench.root))}"), free_port()
    link = ["--link", f"{round_trip_ms:g}ms"] * bool(round_trip_ms)
    peers = Peers(cluster, port, texts)
    try:
        await cluster.start_seed()
        await cluster.start_workers(stages, threads=threads, link=f"{round_trip_ms:g}ms" * bool(link))
        own_threads = ["--threads", str(threads)]
        if "drafter" in models:
            options = ("--role", "drafter", "--model", str(models["drafter"]), *own_threads, *link)
            await cluster.start_peer("drafter", 1, *options)
        if stages:
            await cluster.wait_until_joined(list(cluster.peers))
        options = ("--role", "verifier", "--model", str(models["verifier"]), "--http", f"{LOOPBACK}:{port}", *link)
        options += ("--sessions", str(texts)) if texts > 1 else ()
        await cluster.start_peer("verifier", 1, *options, *(["--split", str(stages)] if stages else own_threads))
        peers.model = (await cluster.wait_until_serving({"verifier", *models.keys() & {"drafter"}}))["verifier"].model
        yield peers
    finally:
        await peers.end()


async def measure_generate(bench: Bench, plan: GeneratePlan, report: BenchReport) -> None:
    models = {name: Path(at) for name, at in (("verifier", plan.verifier), ("drafter", plan.drafter)) if at}
    if plan.stages and not plan.verifier:
        models["verifier"] = bench.root / "random"
        async with bench.members(1) as members:
            await members.all("make_model", directory=str(models["verifier"]), sizes=SIZES, seconds=5)
    rival: dict[str, list[Answer]] = {}
    if not plan.is_timed:
        bench.console.progress("transformers, in one process")
        async with bench.members(1, threads=plan.threads) as members:
            how: Answer = {"threads": plan.threads, "texts": 1, "positions": 1}
            how |= {"model": str(models["verifier"]), "drafter": str(models.get("drafter", ""))}
            (opened,) = await members.all("open_writer", seconds=5.0, **how)
            report.torch = opened["torch"]
            rival = await _write_by_transformers(members, plan, can_assist=opened["can_assist"])
    for round_trip_ms, alpha in product(plan.round_trips_ms, plan.alphas if plan.is_timed else [0.0]):
        label = f"{round_trip_ms:g} ms" + (f", alpha {alpha:g}" if plan.is_timed else "")
        bench.console.progress(f"{label}: peers start")
        if plan.is_timed:
            models = await asyncio.to_thread(_write_timed_models, bench.root / "models", plan, alpha)
        where: dict[str, Any] = {"stages": plan.stages, "threads": plan.threads, "round_trip_ms": round_trip_ms}
        async with start_peers(bench, models, **where) as peers:
            case = Case(label, 1, {"alone": Contender("alone")}, {"round_trip_ms": round_trip_ms, "differ": 0})
            if plan.drafts:
                case.facts["alpha"] = alpha
                case.contenders["ahead"] = Contender("drafted ahead")
            for name, texts in rival.items():
                case.contenders[name] = Contender(name, [text["token_s"] for text in texts])
            await _measure_texts(bench, plan, peers, report, case, rival.get("transformers", []))
            _conclude(plan, report, case)


async def _write_by_transformers(members: Members, plan: GeneratePlan, *, can_assist: bool) -> dict[str, list[Answer]]:
    """The texts of ``generate``, and of its assisted generation, with the time of a token."""
    rival: dict[str, list[Answer]] = {"transformers": [], **({"assisted": []} if can_assist else {})}
    for number in range(-1, plan.texts):  # the first passes load kernels
        body = _body(plan, number, "off")
        how: Answer = {"temperature": body["temperature"], "seed": abs(number), "prompts": [body["prompt"]]}
        for name, found in rival.items():
            order: Answer = how | {"tokens": plan.tokens, "assisted": name == "assisted"}
            (answer,) = await members.all("write_texts", seconds=5.0, **order)
            if number >= 0:
                found.append({"text": answer["texts"][0], "token_s": answer["seconds"] / plan.tokens})
    return rival


def _write_timed_models(root: Path, plan: GeneratePlan, alpha: float) -> dict[str, Path]:
    from p2ptrain.compute.tokenizer import Tokenizer

    models = {
        "verifier": write_timed_model(root / "verifier", plan.pass_s),
        "drafter": write_timed_model(root / f"drafter-{alpha:g}", plan.draft_s, alpha=alpha),
    }
    for directory in models.values():
        Tokenizer.of_bytes().save(directory)
    return models


def _body(plan: GeneratePlan, number: int, speculate: str) -> Answer:
    """The request of text ``number``: even ones are greedy; with real models odd ones are sampled."""
    prompt = f"TEXT {number}: " if plan.is_timed else PROMPTS[number % len(PROMPTS)]
    drawn = {"temperature": 0.8, "seed": number} if number % 2 and not plan.is_timed else {"temperature": 0}
    return {"prompt": prompt, "max_tokens": plan.tokens, "speculate": speculate, **drawn}


async def _measure_texts(
    bench: Bench, plan: GeneratePlan, peers: Peers, report: BenchReport, case: Case, known: list[Answer]
) -> None:
    """Measure each text alone and drafted, in turn. Raises ``JobFailed`` if a text of a timed model is wrong.

    A real model rounds a pass of several rows differently than a step. A text that differs from the ``known`` one is
    counted, but not timed.
    """
    numbers = {name: count(-1) for name in case.contenders}  # text -1 is of the round to warm up

    async def sample(name: str) -> list[float]:
        number = next(numbers[name])
        text = await peers.write(_body(plan, number, "auto" if name == "ahead" else "off"))
        if number < 0:
            return []
        own = text_after(f"TEXT {number}: ".encode(), plan.tokens).decode() if plan.is_timed else known[number]["text"]
        if text.text == own:
            return [text.token_s]
        if plan.is_timed:
            raise JobFailed(f"text {number}, {name}: not the verifier's own text, so its times are invalid")
        case.facts["differ"] += 1
        return []

    await bench.interleave(report, case, sample, rounds=plan.texts)


def _conclude(plan: GeneratePlan, report: BenchReport, case: Case) -> None:
    facts = case.facts
    if facts["differ"]:
        report.notes.append(
            f"{case.label}: {facts['differ']} texts differ from those of transformers, possibly by rounding; "
            "their times do not count"
        )
    if plan.drafts:
        facts["faster"] = case.ratio("alone", "ahead")


def write_random_model(directory: Path, sizes: Answer, words: int = 0) -> None:
    """Write a random model with Llama's architecture.

    Args:
        sizes: some fields of ``ModelSpec``.
        words: size of a vocabulary of words, in which each token is a visible piece of text; 0: tokens are bytes.
    """
    from p2ptrain.compute.model import ModelSpec, build_model
    from p2ptrain.compute.tokenizer import Tokenizer

    spec = ModelSpec(**sizes, context=4096, tie_embeddings=False)
    tokenizer = Tokenizer.of_words(words) if words else Tokenizer.of_bytes()
    build_model(spec, tokenizer.vocab_size, seed=1).save_pretrained(directory)
    tokenizer.save(directory)


def check_models(verifier: Path | None, drafter: Path | None, stages: int) -> None:
    if drafter is not None and verifier is None and not stages:
        raise UserError("--draft-model works only with --model", remedy="add --model DIR, or leave it out")
    for directory in (verifier, drafter):
        if directory is not None and not is_model(directory):
            raise UserError(f"{directory} holds no model", remedy="name a directory with a config.json")
