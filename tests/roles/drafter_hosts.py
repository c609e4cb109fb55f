"""Drafters without a seed, and a verifier's session without a service around it, for tests. Virtual time will do."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from p2ptrain.core.activations import IDS, encode_ids
from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import ConnectionLost, P2PTrainError
from p2ptrain.core.serving import Pass, Ran, Sampling
from p2ptrain.core.threads import LoopThreads, RealThreads, Threads
from p2ptrain.core.world import LoopClock, Network, World
from roles.compute_thread import ComputeThread
from roles.drafter.draft_server import MAX_SESSIONS, DraftServer
from roles.drafter.drafting import verdict_untrusted
from roles.engine import StageEngine
from roles.line import Line
from roles.serving.local_model import LocalModel
from roles.serving.model import Decoding, DecodingStats, PassRequest, PassResult
from roles.serving.text_session import PreparedText, TextSession
from roles.serving.text_stats import DrafterFacts, RecentPace, TextStats
from roles.serving.worker_peer import ClientContext
from roles.verifier.cost_model import BASELINE_STEPS, CostModel
from roles.verifier.drafters import Drafters, TextDrafts
from roles.verifier.speculation import Speculation
from tests.invariants import check_invariants
from tests.roles.stage_stand_in import StandInStage, stand_in_config, stand_in_part
from tests.run_one import run_one
from wire.connection import Connection
from wire.handshake import PeerServer, local_welcome, serve
from wire.messages import Hello, Refuse, Request, Response, Welcome
from wire.text_messages import DrafterAddress, DraftOpen, DraftReady, StreamClose, Verdict

PORT = 4000
VOCAB = 97
LAYERS = 3
CONFIG = stand_in_config(layers=LAYERS, vocab_size=VOCAB)
TOKENIZER = "tokenizer-a"


class Wobbly:
    """A stand-in of the verifier's own model that is wrong now and then: by chance, but the same each time.

    Args:
        alpha: how often it is right.
        pick: what it says instead, from (position, right token); None: something by chance.
    """

    def __init__(
        self, alpha: float, *, seed: int = 1, pick: Callable[[int, int], int] | None = None, **options: Any
    ) -> None:
        self._whole = whole(**options)
        self._alpha, self._seed, self._pick = alpha, seed, pick

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def run(self, passes: Mapping[str, Pass]) -> dict[str, Ran | P2PTrainError]:
        """As of ``StageEngine``."""
        answers = self._whole.run(passes)
        return {
            session: self._changed(ran, passes[session]) if isinstance(ran, Ran) else ran
            for session, ran in answers.items()
        }

    def _changed(self, ran: Ran, work: Pass) -> Ran:
        first = work.keep + work.count - len(ran.tokens)
        return Ran(ran.payload, tuple(self._said(first + at, token) for at, token in enumerate(ran.tokens)))

    def _said(self, position: int, right: int) -> int:
        dice = crc32(b"%d %d %d" % (self._seed, position, right))
        if dice % 1000 < 1000 * self._alpha:
            return right
        return dice // 1000 % VOCAB if self._pick is None else self._pick(position, right)


def whole(*, config: str = CONFIG, layers: int = LAYERS, seed: int = 1, **options: Any) -> StandInStage:
    """A whole model without torch. Options as of ``StandInStage``."""
    return stand_in_part(config, 0, layers, seed=seed, **options)


@dataclass(frozen=True)
class DraftingModel:
    """What a drafter drafts with. ``limit_bytes``: of the caches of all sessions together; 0: none."""

    engine: Any
    name: str
    context: int = 0
    tokenizer: str = ""
    limit_bytes: int = 0


@dataclass
class DrafterHost:
    """One drafter. It goes by its host's name and listens on ``PORT``, or on any port of ``host``, with real threads.

    Attributes:
        step_s: that each of its engine's runs takes, where threads are not real.
    """

    name: str
    network: Network
    serves: DraftingModel
    step_s: float = 0.005
    options: dict[str, Any] = field(default_factory=dict)
    problems: list[P2PTrainError] = field(default_factory=list)
    host: str = ""

    @property
    def at(self) -> DrafterAddress:
        """As the seed tells of it."""
        host, port = self.server.address if self.host else (self.name, PORT)
        return DrafterAddress(self.name, self.name, host, port, self.serves.name, self.serves.tokenizer)

    @property
    def computes(self) -> bool:
        """Whether its engine runs now, on virtual time."""
        return bool(self._compute._thread._calls)  # type: ignore[attr-defined]

    async def start(self) -> None:
        """Listen. It may be started again after ``stop``."""
        threads: Threads = RealThreads()
        if not self.host:
            threads = LoopThreads()
            threads.call_s["compute"] = self.step_s
        world = World(LoopClock(), self.network, RealDisk(), random.Random(1), threads)
        self._compute = ComputeThread(threads)
        own, options = self.serves, dict(self.options)
        news = {"on_news": options.pop("on_news")} if "on_news" in options else {}
        limits = {"max_sessions": MAX_SESSIONS, "cache_bytes": own.limit_bytes} | options
        model = LocalModel(own.engine, self._compute, world.clock, context=own.context or None, **limits)
        self.drafter = DraftServer(world, model, own.name, own.tokenizer, **news)
        self.server: PeerServer = await serve(
            self.network,
            self.host or "0.0.0.0",
            0 if self.host else PORT,
            decide=self._decide,
            serve=self.drafter.serve,
            on_problem=lambda problem, _: self.problems.append(problem),
        )

    async def _decide(self, hello: Hello, connection: Connection) -> Welcome | Refuse:
        return self.drafter.decide(hello) or local_welcome(peer_id=self.name, name=self.name, wall=0.0)

    async def stop(self) -> None:
        """End, as a process does: connections close."""
        await self.server.close()
        assert not self.drafter.sessions
        await self.drafter.close()
        self._compute.close()


@dataclass
class Liar:
    """What answers where a drafter should be: it takes sessions in, and says what it is told to say.

    Args:
        says: from the session's stream, the number of verified tokens, that of the verdict and the connection.
        late_s: after so long it says what time it is.

    Attributes:
        verdicts: that came. openings: likewise. closed: streams that the verifier closed.
    """

    name: str
    network: Network
    says: Callable[[int, int, int, Connection], None]
    verdicts: int = 0
    openings: int = 0
    closed: list[int] = field(default_factory=list)
    problems: list[P2PTrainError] = field(default_factory=list)
    host: str = ""
    vocab_size: int = VOCAB
    late_s: float = 0.0

    @property
    def at(self) -> DrafterAddress:
        """As the seed tells of it."""
        host, port = self.server.address if self.host else (self.name, PORT)
        return DrafterAddress(self.name, self.name, host, port, "a lying model", TOKENIZER)

    async def start(self) -> None:
        """Listen."""
        self.server: PeerServer = await serve(
            self.network,
            self.host or "0.0.0.0",
            0 if self.host else PORT,
            decide=self._decide,
            serve=self._serve,
            on_problem=lambda problem, _: self.problems.append(problem),
        )

    async def _decide(self, hello: Hello, connection: Connection) -> Welcome | Refuse:
        return local_welcome(peer_id=self.name, name=self.name, wall=0.0)

    async def _serve(self, connection: Connection, hello: Hello) -> None:
        line = Line(connection, 600.0, beat_s=0.5)
        verified: dict[int, int] = {}  # by stream
        async with line.keep_alive():
            while True:
                frame = await line.receive()
                match frame.message:
                    case DraftOpen() as opening:
                        await line.receive_bulk(4 * opening.count, stream=frame.stream)
                        self.openings += 1
                        verified[frame.stream] = opening.count
                        connection.send(DraftReady(), stream=frame.stream)
                        self.says(frame.stream, opening.count, 0, connection)
                    case StreamClose():
                        self.closed.append(frame.stream)
                    case Verdict() as verdict:
                        self.verdicts += 1
                        stream, number = frame.stream, frame.generation
                        told = verdict_untrusted(verdict, number, vocab_size=self.vocab_size)
                        verified[stream] += told.right + len(told.tokens)
                        self.says(stream, verified[stream], number, connection)
                    case Request(id=number):
                        asyncio.get_running_loop().call_later(self.late_s, self._clock, connection, number)

    def _clock(self, connection: Connection, number: int) -> None:
        with suppress(ConnectionLost):
            connection.send(Response(number, {}))

    async def stop(self) -> None:
        """End."""
        await self.server.close()


def model_serves(engine: Any, *, tokenizer: str = TOKENIZER, **more: Any) -> DraftingModel:
    """What a drafter with this engine serves."""
    return DraftingModel(engine, "a small model", tokenizer=tokenizer, **more)


@asynccontextmanager
async def drafter_hosts(hosts: Sequence[DrafterHost | Liar]) -> AsyncIterator[None]:
    """Drafters that run inside."""
    for host in hosts:
        await host.start()
    try:
        yield
    finally:
        for host in hosts:
            await host.stop()


def around_of(network: Network, notify: Callable[[str, str, str], None] = lambda *notice: None) -> ClientContext:
    """Where a verifier stands."""
    world = World(LoopClock(), network, RealDisk(), random.Random(2), LoopThreads())
    return ClientContext(world, "verifier", "verifier", "seed", notify=notify, role="verifier")


@dataclass
class Written:
    """What a session gave, when its passes ended (in the loop's time), and how it came about."""

    tokens: list[int]
    ends: list[float]
    stats: DecodingStats
    facts: list[DrafterFacts]


def there(source: Drafters) -> list[str]:
    """Peer ids of the drafters that a verifier is connected to."""
    return [link.at.peer_id for link in source.connected_links()]


@dataclass
class SlowSession:
    """A ``ModelSession`` over stages that share the time of a pass equally.

    Args:
        pass_s, row_s: time of a pass, and more for each of its positions after the first.
        slowed: factor of the time of a stage, called in its middle.
        hop_s: time from the client to the first stage, between stages, and from the last one to the client.
        turns: of each stage, which sessions share; a lock serves its waiters in order.
    """

    engine: StageEngine
    sample_from: int
    pass_s: float
    row_s: float
    slowed: Callable[[], float]
    stages: int = 1
    hop_s: float = 0.0
    most_passes: int = 1
    cached: int = 0
    turns: Sequence[asyncio.Lock] = ()

    def __post_init__(self) -> None:
        self.turns = self.turns or [asyncio.Lock() for _ in range(self.stages)]

    async def append(self, request: PassRequest) -> PassResult:
        """As of ``ModelSession``."""
        now = asyncio.get_running_loop().time
        ids, index = memoryview(encode_ids(request.ids)), request.sample_index(self.sample_from)
        work = Pass(request.keep, ids, len(request.ids), IDS, IDS, request.samples, index)
        ran = run_one(self.engine, "s", work)  # in the order of the calls
        sent_at, spent_s = now(), list[float]()
        for turn in self.turns:
            await asyncio.sleep(self.hop_s)
            async with turn:
                half_s = (self.pass_s + self.row_s * (len(request.ids) - 1)) / self.stages / 2
                await asyncio.sleep(half_s)
                spent_s.append(2 * half_s * self.slowed())
                await asyncio.sleep(spent_s[-1] - half_s)
        await asyncio.sleep(self.hop_s)
        spent_us = tuple(round(1e6 * each_s) for each_s in spent_s)
        return PassResult(ran.tokens, sum(spent_s) if self.stages == 1 else now() - sent_at, spent_us)

    async def close(self) -> None:
        """As of ``ModelSession``."""


class SilentWriter:
    """A text's tokens as they are, without text."""

    ended, stop_reason = "", None

    def take(self, token: int) -> str:
        """No text."""
        return ""

    def finish(self) -> str:
        """No text."""
        return ""


def measured(step_s: float) -> CostModel:
    """What a verifier knows that has only written without drafts."""
    model = CostModel()
    for _ in range(BASELINE_STEPS):
        model.add_pass(0, 1, step_s, step_s)
    return model


async def write(
    source: Drafters | None,
    prompt: Sequence[int],
    tokens: int,
    sampling: Sampling,
    *,
    target: StageEngine | None = None,
    pass_s: float = 0.05,
    row_s: float = 0.0,
    cost_model: CostModel | None = None,
    slowed: Callable[[], float] = lambda: 1.0,
    **chain: Any,
) -> Written:
    """A text of a verifier, with a model that takes ``pass_s`` for a pass and ``row_s`` more for each draft.

    Args:
        cost_model: of the texts before; None: only a pass without drafts is known.
        slowed, chain: as of ``SlowSession``.
    """
    now = asyncio.get_running_loop().time
    engine = target or whole()
    if target is not None:
        engine.reserve(len(prompt) + tokens)
    engine.open("s", positions=len(prompt) + tokens, sampling=sampling)
    session = SlowSession(engine, len(prompt), pass_s, row_s, slowed, **chain)
    decoding = Decoding(prompt, max_new_tokens=tokens, most_passes=session.most_passes)
    core = Speculation(decoding, cost_model or measured(pass_s))
    drafts = TextDrafts(source, core, positions=len(prompt) + tokens, sampling=sampling, now=now)
    writer: Any = SilentWriter()
    stats = TextStats(decoding.stats, began_at=now(), prompt_tokens=len(prompt), cached_tokens=0, pace=RecentPace())
    text = TextSession(
        session,
        decoding,
        PreparedText(list(prompt), tokens, 0, writer, sampling, None),
        stats,
        submit=LoopThreads().start("text").submit,
        now=now,
        on_end=lambda text: engine.close("s"),
    )
    text.begin(drafts)
    ends: list[float] = []
    async for _ in text:
        ends.append(now())
        check_invariants(decoding)
        check_invariants(core)
    await text.close()
    return Written(list(decoding.tokens), ends, decoding.stats, drafts.facts())
