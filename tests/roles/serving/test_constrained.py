"""Texts with penalties, log-probabilities or a grammar are those that the model writes alone, however they are made."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import llguidance
import pytest
import tokenizers
import torch
from tokenizers.models import WordLevel

from p2ptrain.compute.served_part import ServedPartBuilder, measure_model
from p2ptrain.compute.text import ModelText
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import ConfigError, JobFailed, UserError
from p2ptrain.core.serving import SamplingOptions, TokenLogprob
from p2ptrain.core.threads import LoopThreads
from p2ptrain.core.world import LoopClock, World
from p2ptrain.lab.memory import MemoryNetwork
from roles.compute_thread import ComputeThread
from roles.serving.chain import StageChain
from roles.serving.constraints import Constraint, TokenTable
from roles.serving.local_model import LocalModel, load_local_engine
from roles.serving.model import ServedModel
from roles.serving.texts import TextRequest, Writing
from roles.serving.worker_pool import model_of_directory
from roles.worker.stages import Holding
from tests.compute.families import make_of_bytes

from .scene import Scene, scene_of
from .soak import DraftedService, RandomDrafts, SoakRequest

pytestmark = pytest.mark.virtual_time

CONTEXT, WIDTH = 256, 64
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "kind": {"enum": ["one", "other"]},
    },
    "required": ["name", "ages", "kind"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
JSON = llguidance.LLMatcher.grammar_from_json_schema(SCHEMA)
PENALTIES = SamplingOptions(
    temperature=1.2,
    top_k=0,
    min_p=0.001,
    repetition_penalty=1.4,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    logit_bias=((101, 2.5), (7, -100.0)),
)
ASKED = TextRequest(prompt="what was written before " * 4, max_new_tokens=40, logprobs=3)
KINDS = [
    replace(ASKED, sampling=PENALTIES),
    replace(ASKED, grammar=JSON, max_new_tokens=120),
    replace(ASKED, grammar='start: "<" /[a-z]{2,30}/ ">"', sampling=replace(PENALTIES, top_k=50, top_p=0.9)),
]
Written = tuple[tuple[int, ...], tuple[TokenLogprob, ...], str]


def seeded(request: TextRequest, seed: int) -> TextRequest:
    return replace(request, sampling=replace(request.sampling, seed=seed))


REQUESTS = [seeded(kind, seed) for seed in range(3) for kind in KINDS][:8]


def world() -> World:
    return World(LoopClock(), MemoryNetwork(), RealDisk(), random.Random(1), LoopThreads())


async def read(writing: Writing) -> Written:
    pieces = [piece async for piece in writing]
    tokens = tuple(token for piece in pieces for token in piece.tokens)
    return tokens, tuple(each for piece in pieces for each in piece.logprobs), writing.ended


def service_of(model: ServedModel, directory: Path) -> DraftedService:
    return DraftedService(world(), model, ModelText(directory), name="m")


async def write_with_drafts(service: DraftedService, request: TextRequest, wanted: Written) -> Written:
    about = SoakRequest((), len(wanted[0]), request.sampling, 0, 6, 0.8)
    service.sources[request] = lambda decoding: RandomDrafts(decoding, about, wanted[0], random.Random(3))
    session = await service.write(request)
    made = await read(session)
    assert session.decoding.stats.accepted > 3
    return made


def check_equal(made: Written, wanted: Written) -> None:
    assert (made[0], made[2]) == (wanted[0], wanted[2])
    assert [each.token for each in made[1]] == list(made[0])
    for own, other in zip(made[1], wanted[1], strict=True):
        assert [own.token, *(token for token, _ in own.top)] == [other.token, *(token for token, _ in other.top)]
        numbers = [other.logprob, *(score for _, score in other.top)]
        assert [own.logprob, *(score for _, score in own.top)] == pytest.approx(numbers, abs=1e-4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    directory = tmp_path_factory.mktemp("model")
    return make_of_bytes("llama", directory, max_position_embeddings=CONTEXT), directory


@asynccontextmanager
async def local(directory: Path) -> AsyncIterator[LocalModel]:
    compute = ComputeThread(LoopThreads())
    engine, context = await load_local_engine(directory, compute, device="cpu")
    served = LocalModel(engine, compute, LoopClock(), context=context)
    yield served
    await served.close()


@pytest.fixture
async def wanted(model: tuple[Any, Path]) -> list[Written]:
    """The texts of a model that computes nothing else."""
    async with local(model[1]) as served:
        service = service_of(served, model[1])
        return [await read(await service.write(request)) for request in REQUESTS]


async def test_texts_in_a_batch_and_with_drafts(model: tuple[Any, Path], wanted: list[Written]) -> None:
    _, directory = model
    for request, (tokens, _, ended) in zip(REQUESTS, wanted, strict=True):
        if request.grammar == JSON and ended == "end":
            assert set(json.loads(bytes(tokens))) == {"name", "ages", "kind"}
    assert sum(ended == "end" for _, _, ended in wanted) > 3
    async with local(directory) as served:
        service = service_of(served, directory)
        together = await asyncio.gather(*(service.write(request) for request in REQUESTS))
        for made, alone in zip(await asyncio.gather(*map(read, together)), wanted, strict=True):
            check_equal(made, alone)
        for request, alone in zip(REQUESTS, wanted, strict=True):
            check_equal(await write_with_drafts(service, request, alone), alone)
        await service.close()


class RealParts:
    """As ``StandIns``: what a worker of the test holds parts with."""

    def __init__(self) -> None:
        self.engines: list[Any] = []
        self.holding = Holding(
            build_part=ServedPartBuilder,
            measure=measure_model,
            limit_bytes=1 << 30,
            stream_bps=lambda: 1e9,
            compute_flops=None,
        )


@asynccontextmanager
async def split(scene: Scene, directory: Path, stages: int) -> AsyncIterator[StageChain]:
    pool = await scene.replica()
    source = replace(await model_of_directory(scene.context, directory), path="")
    plan = await scene.plan(pool, source, stages=stages, activation_bytes=4 * WIDTH)
    chain = await StageChain.load(pool, source, plan, context=CONTEXT)
    yield chain
    await chain.close()
    await pool.close()


async def test_texts_of_a_split_model(model: tuple[Any, Path], wanted: list[Written], tmp_path: Path) -> None:
    async with scene_of(tmp_path, stand_ins=RealParts) as scene, split(scene, model[1], 3) as chain:
        service = service_of(chain, model[1])
        for request, alone in zip(REQUESTS[:3], wanted, strict=False):
            check_equal(await write_with_drafts(service, request, alone), alone)
        together = await asyncio.gather(*(service.write(request) for request in REQUESTS))
        last, reading = chain.plan.stages[-1].peer.id, asyncio.gather(*map(read, together[1:]))
        pieces = [await anext(together[0]) for _ in range(4)]
        scene.kill(last)
        pieces += [piece async for piece in together[0]]
        assert tuple(token for piece in pieces for token in piece.tokens) == wanted[0][0]
        for made, alone in zip(await reading, wanted[1:], strict=True):
            check_equal(made, alone)
        assert chain.times.mendings
        await service.close()


async def check_logprobs(served: ServedModel, whole: Any, directory: Path) -> None:
    service, prompt = service_of(served, directory), bytes(range(32, 127)) * 2
    request = TextRequest(ids=tuple(prompt), max_new_tokens=6, logprobs=4, prompt_logprobs=True)
    writing = await service.write(replace(request, sampling=PENALTIES))
    tokens, scored, _ = await read(writing)
    with torch.inference_mode():
        wanted = whole(torch.tensor([[*prompt, *tokens]])).logits[0].log_softmax(-1)
    assert (writing.prompt_ids, writing.prompt_logprobs[0]) == (tuple(prompt), None)
    for place, (token, own) in enumerate(
        zip((*prompt[1:], *tokens), (*writing.prompt_logprobs[1:], *scored), strict=True)
    ):
        assert own is not None
        assert own.token == token
        assert own.logprob == pytest.approx(float(wanted[place, token]), abs=1e-4)
        top = wanted[place].topk(4)
        assert [score for _, score in own.top] == pytest.approx(top.values.tolist(), abs=1e-4)
        assert [float(wanted[place, token]) for token, _ in own.top] == pytest.approx(top.values.tolist(), abs=1e-4)
    for ids in (tuple(prompt), (65,)):  # only the prompt
        unwritten = await service.write(replace(request, ids=ids, max_new_tokens=0, logprobs=0))
        assert await read(unwritten) == ((), (), "length")
        scores = [each.logprob for each in unwritten.prompt_logprobs if each is not None]
        known = [each.logprob for each in writing.prompt_logprobs if each is not None][: len(ids) - 1]
        assert scores == pytest.approx(known, abs=1e-4)
    await service.close()


async def test_log_probabilities_are_those_of_a_forward_pass(model: tuple[Any, Path], tmp_path: Path) -> None:
    async with local(model[1]) as served:
        await check_logprobs(served, *model)
    async with scene_of(tmp_path, stand_ins=RealParts) as scene, split(scene, model[1], 2) as chain:
        await check_logprobs(chain, *model)


async def test_where_a_text_ends(model: tuple[Any, Path]) -> None:
    async with local(model[1]) as served:
        service = service_of(served, model[1])
        asked = TextRequest(ids=tuple(b"once"), max_new_tokens=30, sampling=SamplingOptions(seed=8, top_k=0))
        tokens, _, _ = await read(await service.write(asked))
        stop = next(token for place, token in enumerate(tokens) if place > 4 and token not in tokens[:place])
        writing = await service.write(replace(asked, stop_ids=(stop,)))
        assert await read(writing) == (tokens[: tokens.index(stop) + 1], (), "stop")
        assert writing.stop_reason == stop
        text = ModelText(model[1])
        text.end_tokens = frozenset((stop,))  # the model's own
        with_end = DraftedService(world(), served, text, name="m")
        assert (await read(await with_end.write(asked)))[2] == "end"
        assert await read(await with_end.write(replace(asked, ignore_end=True))) == (tokens, (), "length")
        # In a grammar an end token is allowed only where the text may end.
        text.end_tokens = frozenset(b"ab")
        for seed in range(4):
            written, _, ended = await read(
                await with_end.write(seeded(replace(asked, grammar="start: /[a-z]{9,99}/"), seed))
            )
            assert ended in ("end", "length")
            assert not {*b"ab"} & {*written[:9]}
            assert len(written) == 30 if ended == "length" else written[-1] in b"ab"
        for wrong, why in (
            ({"grammar": "start: ("}, "cannot be used"),
            ({"grammar": JSON, "ignore_end": True}, "cannot be ignored"),
            ({"ids": (256,)}, "id 256"),
            ({"sampling": SamplingOptions(logit_bias=((256, 1.0),))}, "id 256"),
        ):
            with pytest.raises(UserError, match=why):
                await service.write(replace(asked, **wrong))
        assert await service.tokenize("é", add_special=False) == [*"é".encode()]
        assert await service.detokenize([*b"ok"]) == "ok"
        assert service.token_bytes(195) == "é".encode()[:1]


def test_tokenizer_without_known_bytes_is_read_once() -> None:
    reads, backend = list[bool](), tokenizers.Tokenizer(WordLevel({"a": 0, "é": 1}, unk_token="a"))

    def to_str() -> str:
        reads.append(True)
        return backend.to_str()

    known = SimpleNamespace(to_str=to_str, id_to_token=backend.id_to_token)
    table = TokenTable(cast(Tokenizer, SimpleNamespace(backend=known, vocab_size=2, directory=None)), 2)
    assert [table.bytes_of(token) for token in (0, 1)] == [b"a", "é".encode()]
    with pytest.raises(ConfigError, match="the tokenizer of a new model"):
        table.matcher(JSON)
    assert reads == [True]


def test_texts_of_many_schemas_are_valid() -> None:
    """Random tokens that the masks allow, with drafts that they do not."""
    table, rng, written = TokenTable(Tokenizer.of_bytes(), 300), random.Random(5), 0
    for _ in range(200):
        constraint, tokens = (
            Constraint(
                table,
                JSON,
                frozenset((290,)),
            ),
            list[int](),
        )
        while not constraint.is_over and len(tokens) < 400:
            drafts = [rng.randrange(256) for _ in range(rng.choice((0, 0, 3)))]
            rows = rng.randint(1, len(drafts) + 1)
            masks = constraint.masks(drafts, rows)
            assert len(masks) == 40 * rows
            if rows == len(drafts) + 1:
                mask = masks[:40]
                allowed = [token for token in range(300) if mask[token // 8] >> token % 8 & 1]
                closing = [token for token in allowed if token in b'"}]'] if rng.random() < 0.3 else []
                tokens.append(rng.choice(closing or allowed))
                assert constraint.accept(tokens[-1:]) == 1
        if constraint.is_over:
            made = json.loads(bytes(tokens))
            assert (set(made), made["kind"] in ("one", "other")) == ({"name", "ages", "kind"}, True)
            assert len(made["ages"]) <= 3
            written += 1
    assert written > 150
    with pytest.raises(JobFailed, match="does not match"):
        Constraint(table, JSON, frozenset()).accept([1])


def test_texts_with_one_grammar_are_apart() -> None:
    table = TokenTable(Tokenizer.of_bytes(), 256)
    first = Constraint(table, 'start: "ab"', frozenset())
    first.accept(list(b"a"))
    second, other = (Constraint(table, grammar, frozenset()) for grammar in ('start: "ab"', 'start: "c"'))
    second.accept(list(b"ab"))
    other.accept(list(b"c"))
    assert (first.is_over, second.is_over, other.is_over) == (False, True, True)
    first.accept(list(b"b"))
    assert first.is_over
    assert Constraint(table, 'start: "ab"', frozenset()).accept(list(b"ab")) == 2
