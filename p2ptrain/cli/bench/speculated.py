"""Both sides of speculative decoding, for ``bench speculate``: each in a process of its own, or on virtual time.

The verifier is the service that ``join --role verifier`` runs, the drafter what ``join --role drafter`` runs, without a
seed between them: the models take time only, or are real. Between them is an emulated link. The rival drafts when it
is asked to, over the same link, with the same models.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from p2ptrain.cli.bench.foreseen import CONFIG, TimedModel
from p2ptrain.cli.bench.place import Place
from p2ptrain.cli.bench.timed_chain import timed_chain
from p2ptrain.compute.conversation import ChatFormat
from p2ptrain.compute.text import ModelText
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.core.activations import IDS, encode_ids
from p2ptrain.core.errors import DeadlineExceeded, ProtocolError
from p2ptrain.core.serving import Sampling, SamplingWish
from p2ptrain.core.world import World
from roles.background import Background
from roles.chain.around import Around
from roles.compute_thread import ComputeThread
from roles.drafter.drafter import Drafter, Serves
from roles.speculation.policy import MOST_DRAFTS
from roles.verifier.asking import Wish
from roles.verifier.chain_target import ChainTarget
from roles.verifier.drafter_link import Tokens
from roles.verifier.drafters import Drafters
from roles.verifier.service import ServiceOptions, VerifierService
from roles.verifier.target import Target
from roles.verifier.whole_target import WholeTarget, load_whole_engine
from wire.connection import Connection
from wire.handshake import Server, dial, local_hello, local_welcome, serve
from wire.messages import Hello, Refuse, Request, Response, Welcome
from wire.speculation_messages import DrafterAt

MEET_S = 30.0
"""For a drafter to take part in a text."""
ANSWER_S = 30.0
MEET_TOKENS = 64
DRAFTER, VERIFIER = "drafter", "verifier"
_METHOD = "draft"

Answer = dict[str, Any]


def _prepare(threads: int) -> None:
    """On the thread that computes."""
    import p2ptrain.compute.served_part  # noqa: F401 - for its cost
    from p2ptrain.compute.device import pick_device

    pick_device("cpu", threads)


class DrafterSide:
    """A drafter, and the same model for whoever asks for drafts and waits for them."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._servers: list[Server] = []
        self._tasks = Background()
        self._compute: ComputeThread | None = None

    async def open(
        self, *, rtt_ms: float, jitter_ms: float, draft_s: float, alpha: float, model: str, threads: int
    ) -> Answer:
        """Listen: where, and the process to kill. ``model``: a directory; empty for a stand-in."""
        place = self._place
        world = place.world(rtt_ms / 2, jitter_ms, 1)
        compute = self._compute = ComputeThread(world.threads)
        serves = Serves(TimedModel(draft_s, alpha=alpha, take=place.take), "stand-in", tokenizer="stand-in")
        if model:
            await compute.run(_prepare, threads)
            engine, context = await load_whole_engine(Path(model), compute, device="cpu")
            digest = Tokenizer.of_directory(Path(model)).digest
            serves = Serves(engine, Path(model).name, context or 0, digest)
        drafter = Drafter(world, compute, serves)
        self._tasks.start(drafter.run(), DRAFTER)

        async def wait_and_draft(connection: Connection, hello: Hello) -> None:
            await self._draft_when_asked(connection, serves, compute)

        for answer in (drafter.serve, wait_and_draft):
            server = await serve(world.network, place.host, 0, decide=_welcome, serve=answer, on_problem=_nobody)
            self._servers.append(server)
        port, rival_port = (server.address[1] for server in self._servers)
        at = {"host": place.host, "port": port, "rival_port": rival_port, "process": place.process}
        return at | {"tokenizer": serves.tokenizer}

    async def _draft_when_asked(self, connection: Connection, serves: Serves, compute: ComputeThread) -> None:
        """The rival's other side: each request cuts the text and adds to it, and asks for so many drafts."""
        engine = serves.engine
        await compute.run(engine.open, "rival", positions=serves.context or 4096, sampling=Sampling(0.0))
        try:
            while True:
                request = (await connection.receive(timeout_s=ANSWER_S)).message
                if not isinstance(request, Request):
                    raise ProtocolError(f"a {type(request).__name__} is no request")
                keep, ids, drafts = (request.params[name] for name in ("keep", "ids", "drafts"))
                made: list[int] = []
                for _ in range(drafts):
                    ran = await compute.run(
                        engine.run,
                        "rival",
                        keep=keep,
                        payload=memoryview(encode_ids(ids)),
                        count=len(ids),
                        encoding=IDS,
                        out_encoding=IDS,
                        picks=1,
                        draw=0,
                    )
                    keep, ids = keep + len(ids), list(ran.tokens)
                    made += ids
                connection.send(Response(request.id, {"tokens": made}))
        finally:
            await compute.run(engine.close, "rival")

    async def close(self) -> Answer:
        for server in self._servers:
            await server.close()
        self._servers.clear()
        await self._tasks.stop()
        if self._compute is not None:
            self._compute.close()
        return {}


class VerifierSide:
    """A verifier's service, who reads its texts, and the rival."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._at: Answer = {}  # the drafter
        self._service: VerifierService | None = None
        self._drafters: Drafters | None = None
        self._target: Target | None = None
        self._chain = AsyncExitStack()
        self._world: World | None = None
        self.said: list[str] = []

    async def open(
        self,
        *,
        rtt_ms: float,
        jitter_ms: float,
        pass_s: float,
        row_s: float,
        model: str,
        threads: int,
        drafter: Answer,
        texts: str,
        stages: Sequence[Answer] = (),
        ring_s: float = 0.0,
        most_drafts: int = MOST_DRAFTS,
    ) -> Answer:
        """Be there, with a drafter that listens. ``texts``: a directory to write the stand-in's text side to.
        ``stages``: that compute in its place (``timed_chain``), on a ring of ``ring_s``."""
        place = self._place
        self._at = drafter
        world = self._world = place.world(rtt_ms / 2, jitter_ms, 2)
        files = world.threads.start("files")
        compute = ComputeThread(world.threads)
        if model:
            await compute.run(_prepare, threads)
            engine, context = await load_whole_engine(Path(model), compute, device="cpu")
            self._target = WholeTarget(engine, compute, world.clock, label=Path(model).name, context=context)
            text = ModelText(Path(model))
            digest = text.tokenizer.digest
        else:
            if stages:
                timed = timed_chain(place, stages, ring_s=ring_s, root=Path(texts))
                self._target = ChainTarget(await self._chain.enter_async_context(timed), label="stand-in")
            else:
                stand_in = TimedModel(pass_s, row_s=row_s, take=place.take)
                self._target = WholeTarget(stand_in, compute, world.clock, label="stand-in")
            text, digest = await files.submit(partial(_text_side, Path(texts))), "stand-in"
        said = self.said
        around = Around(world, VERIFIER, VERIFIER, place.host, notify=lambda level, kind, text: said.append(text))
        self._drafters = Drafters(around, Tokens(self._target.vocab_size, digest), look_up=False)
        vocab_size = self._target.vocab_size
        host, port, tokenizer = (drafter[name] for name in ("host", "port", "tokenizer"))
        self._drafters.here([DrafterAt(DRAFTER, DRAFTER, host, port, DRAFTER, vocab_size, tokenizer)])
        options = ServiceOptions(kept=0, most_drafts=most_drafts)  # each text begins anew
        form = await files.submit(partial(ChatFormat, text))
        files.close()
        self._service = VerifierService(
            world,
            self._target,
            text,
            form=form,
            model="measured",
            created=0,
            drafters=self._drafters,
            options=options,
        )
        await self._service.warm_up()
        return {}

    async def meet(self, *, prompt: str, tokens: int = MEET_TOKENS) -> Answer:
        """Write short texts until the drafter has had a part in one: both are awake then, as they are where a verifier
        has written before. ``tokens``: of a text that is measured, which may be as long as the models allow.

        Raises:
            DeadlineExceeded: it has no part.
        """
        assert self._world is not None
        now = self._world.clock.now
        due = now() + MEET_S
        while now() < due:
            made = await self._written(prompt, min(tokens, MEET_TOKENS), speculate=True, sampling={"temperature": 0.0})
            if made["stats"]["drafters"]:
                return {}
        raise DeadlineExceeded(f"the drafter took no part within {MEET_S:.0f} s: {'; '.join(self.said) or 'silence'}")

    async def write(
        self,
        *,
        prompts: Sequence[str],
        tokens: int,
        speculate: bool,
        sampling: dict[str, Any],
        kill_after: int = 0,
    ) -> Answer:
        """Texts, one after the other. ``kill_after``: the drafter is killed when so many tokens of a text are there."""
        how: dict[str, Any] = {"speculate": speculate, "sampling": sampling, "kill_after": kill_after}
        return {"texts": [await self._written(prompt, tokens, **how) for prompt in prompts]}

    async def _written(
        self,
        prompt: str,
        tokens: int,
        *,
        speculate: bool,
        sampling: dict[str, Any],
        kill_after: int = 0,
    ) -> Answer:
        """``ids``, when each came (``at_s``, from the first on), and ``stats``. Raises ``P2PTrainError``."""
        assert self._service is not None
        assert self._world is not None
        now = self._world.clock.now
        speculates = "auto" if speculate else "off"
        wish = Wish(prompt, max_new_tokens=tokens, sampling=SamplingWish(**sampling), speculate=speculates)
        ids: list[int] = []
        came_s: list[float] = []
        killed_at = 0
        writing = await self._service.write(wish)
        try:
            async for piece in writing:
                ids += piece.tokens
                came_s += [now()] * len(piece.tokens)
                if kill_after and not killed_at and len(ids) >= kill_after:
                    self._place.kill(self._at["process"])
                    killed_at = len(ids)
        finally:
            await writing.close()
        at_s = [at - came_s[0] for at in came_s]
        return {"ids": ids, "at_s": at_s, "stats": writing.stats(), "killed_at": killed_at}

    async def write_in_turns(self, *, prompts: Sequence[str], tokens: int, drafts: int) -> Answer:
        """The rival's texts: ask for ``drafts``, wait, verify, and ask again. ``ids`` and ``at_s`` of each."""
        assert self._world is not None
        assert self._target is not None
        hello = local_hello(peer_id=VERIFIER, name=VERIFIER, roles=[VERIFIER], purpose="draft")
        host, port = self._at["host"], self._at["rival_port"]
        connection, _ = await dial(self._world.network, host, port, hello, timeout_s=ANSWER_S)
        try:
            ids = [list(prompt.encode()) for prompt in prompts]
            return {"texts": [await self._in_turns(connection, each, tokens, drafts) for each in ids]}
        finally:
            connection.abort()

    async def _in_turns(self, connection: Connection, history: list[int], tokens: int, drafts: int) -> Answer:
        assert self._target is not None
        assert self._world is not None
        prompt, now = len(history), self._world.clock.now
        session = await self._target.open(positions=prompt + tokens + drafts + 1, sampling=Sampling(0.0))
        shared = 0  # positions that the drafter has, and that are right
        came_s: list[float] = []
        try:
            passed = await session.run(keep=0, ids=history, picks=1, draw=0, prefill=True)
            history += passed.tokens
            came_s.append(now())
            while len(history) < prompt + tokens:
                params = {"keep": shared, "ids": history[shared:], "drafts": drafts}
                connection.send(Request(len(history), _METHOD, params))
                answer = (await connection.receive(timeout_s=ANSWER_S)).message
                if not isinstance(answer, Response):
                    raise ProtocolError(f"a {type(answer).__name__} is no answer")
                drafted = answer.result["tokens"]
                keep = len(history) - 1
                ids, draw = [history[-1], *drafted], len(history) - prompt
                passed = await session.run(keep=keep, ids=ids, picks=len(ids), draw=draw, prefill=False)
                pairs = zip(drafted, passed.tokens, strict=False)
                right = next((at for at, (draft, token) in enumerate(pairs) if draft != token), len(drafted))
                # The drafter has run all of its drafts but the last one.
                shared = len(history) + min(right, len(drafted) - 1)
                history += passed.tokens[: right + 1]
                came_s += [now()] * (right + 1)
        finally:
            await session.close()
        ids = history[prompt : prompt + tokens]
        return {"ids": ids, "at_s": [at - came_s[0] for at in came_s[: len(ids)]]}

    async def close(self) -> Answer:
        if self._service is not None:
            await self._service.close()
        if self._drafters is not None:
            await self._drafters.close()
        if self._target is not None:
            await self._target.close()
        await self._chain.aclose()
        return {}


async def assisted(
    *, verifier: str, drafter: str, threads: int, prompts: Sequence[str], tokens: int, sampling: dict[str, Any]
) -> Answer:
    """Transformers with the same pair in this process: seconds and ids of each text, alone (``ended``: up to its end
    token) and assisted, and how often the drafter agrees."""

    def measure() -> Answer:
        from p2ptrain.compute.assisted import AssistedPair

        pair = AssistedPair(Path(verifier), Path(drafter), device="cpu", threads=threads)
        drawn = pair.text.sampling(SamplingWish(**sampling))
        ids = [pair.text.prompt_ids(prompt) for prompt in prompts]
        pair.plain(ids[0], 4, drawn)
        if pair.can_assist:
            pair.assisted(ids[0], 4, drawn)  # the first passes load kernels
        plain, helped = [], []
        for each in ids:  # in turn: what else the machine does meets both
            made = pair.plain(each, tokens, drawn)
            plain.append(asdict(made) | {"ended": pair.text.until_end(made.tokens)})
            if pair.can_assist:
                helped.append(asdict(pair.assisted(each, tokens, drawn)))
        found = pair.agreement(ids, tokens, drawn)
        return {"plain": plain, "assisted": helped, "alpha": found.alpha}

    return await asyncio.to_thread(measure)


def _text_side(directory: Path) -> ModelText:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(CONFIG)
    Tokenizer.of_bytes().backend.save(str(directory / "tokenizer.json"))
    return ModelText(directory)


async def _welcome(hello: Hello, connection: Connection) -> Welcome | Refuse:
    return local_welcome(peer_id=DRAFTER, name=DRAFTER, wall=0.0)


def _nobody(problem: Exception, address: object) -> None:
    """The verifier says what it met with."""
