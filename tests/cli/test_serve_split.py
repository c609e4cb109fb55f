"""A verifier whose model is split over workers, as ``join`` starts it, in one process: its text is transformers' own,
whoever drafts, whichever worker dies; and when nobody is left to take a stage it waits for one. A model computes in
the type that is asked for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from p2ptrain.cli import serving as serving_module
from p2ptrain.cli.join_options import JoinOptions
from p2ptrain.cluster.console import Console
from p2ptrain.compute.model import build_model
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.core.errors import NetworkError, P2PTrainError
from p2ptrain.core.serving import Sampling, SamplingOptions
from p2ptrain.core.world import Network, Probe, World, real_world
from p2ptrain.lab.memory import MemoryNetwork, run_virtual
from roles.member import ServingMember
from roles.serving.texts import TextRequest
from roles.serving.worker_peer import ClientContext
from roles.verifier.client import VerifierClient
from roles.worker.build import build_holding
from tests.compute.families import generated, opened
from tests.compute.test_adapter import adapted
from tests.compute.tiny_trainer import tiny
from tests.roles.in_process import Cluster, Peer
from tests.roles.stage_doubles import LoopThreads
from tests.wire.doubles import on_virtual_time
from wire.records import ServingInfo

PATIENCE_S = 600.0
"""Virtual, as all times here."""
COMPUTE_S = 0.005
PROMPT = "0, 1, 1, 2, 3, 5, 8"
GREEDY, SAMPLED = SamplingOptions(temperature=0.0), SamplingOptions(temperature=0.9, top_k=40, top_p=0.95, seed=7)
HALF_BYTES = 600 << 10
"""Of a worker: too little for all layers with their caches, and enough for half of them."""


def reference(
    checkpoint: Path, tokens: int, sampling: SamplingOptions, dtype: torch.dtype = torch.float32
) -> tuple[int, ...]:
    """What ``transformers.generate`` writes with the whole model."""
    drawn = Sampling(0.9, 40, 0.95, 7) if sampling is SAMPLED else Sampling(temperature=0)
    return tuple(generated(opened(checkpoint, dtype), list(PROMPT.encode()), tokens, drawn))


class VirtualCluster(Cluster):
    """All of its threads' work is done on the loop, and takes virtual time: nobody is ever late."""

    def world(self, network: Network | None = None, probe: Probe | None = None) -> World:
        threads = LoopThreads()
        threads.call_s["compute"] = COMPUTE_S
        return replace(super().world(network, probe), threads=threads)


class Served:
    """A verifier with its model on workers, a drafter, and a client."""

    def __init__(
        self, cluster: Cluster, model: Path, split: int | None = 2, dtype: str = "", **more: list[Path]
    ) -> None:
        self.cluster, self._model = cluster, model
        self.workers: dict[str, Peer] = {}
        models = [model, *more.pop("others", [])]
        options = JoinOptions(role="verifier", models=models, split=split, dtype=dtype, **more)
        self.verifier = self._serve("verifier", serving_module.serve, options)
        self.drafter: Peer | None = None
        self.client: VerifierClient

    def _serve(self, role: str, serve: Any, options: JoinOptions) -> Peer:
        async def program(member: ServingMember) -> None:
            await serve(member, options, Console(quiet=True))

        return self.cluster.serve(role, program)

    def draft(self) -> None:
        options = JoinOptions(role="drafter", models=[self._model], device="cpu", threads=1)
        self.drafter = self._serve("drafter", serving_module.serve, options)

    def told(self, kind: str) -> int:
        return len(self.said(kind))

    def said(self, kind: str) -> list[str]:
        return [text for _, each, text in self.verifier.told if each == kind]

    async def until(self, kind: str, count: int = 1) -> None:
        await self.until_said(kind, lambda said: len(said) >= count)

    async def until_said(self, kind: str, fits: Callable[[list[str]], bool]) -> None:
        while True:
            if fits(self.said(kind)):
                return
            await asyncio.sleep(0.05)  # virtual

    async def ask(self, tokens: int, sampling: SamplingOptions, at: dict[int, Callable[[], Any]] | None = None) -> Any:
        """A text's tokens and figures; ``at``: what happens once so many are there."""
        text = await self.client.write(TextRequest(prompt=PROMPT, max_new_tokens=tokens, sampling=sampling))
        made: list[int] = []
        due = dict(at or {})
        async for piece in text:
            made += piece.tokens
            for count in [count for count in due if len(made) >= count]:
                await due.pop(count)()
        assert not due
        return tuple(made), text.stats()


def stage_of(served: Served, index: int) -> Peer:
    """The worker that holds a stage now."""
    for peer in served.workers.values():
        worker = peer.worker
        assert worker is not None
        if not peer.task.done() and any(index == (part.spec.start > 0) for part in _parts(worker) if part.users):
            return peer
    raise AssertionError(f"nobody holds stage {index}")


def _parts(worker: Any) -> list[Any]:
    return list(worker._stages.cache.parts.values())


def join(cluster: Cluster, slot: int, memory_bytes: int = HALF_BYTES) -> Peer:
    return cluster.join(slot=slot, holding=build_holding(device="cpu", threads=1, memory_bytes=memory_bytes))


@asynccontextmanager
async def serving(
    tmp_path: Path, model: Path, split: int | None = 2, dtype: str = "", **more: list[Path]
) -> AsyncIterator[Served]:
    cluster = VirtualCluster(tmp_path / "cluster", MemoryNetwork())
    await cluster.start_seed()
    try:
        async with asyncio.timeout(PATIENCE_S):
            workers = {str(slot): join(cluster, slot) for slot in (1, 2, 3)}
            for peer in workers.values():
                await peer.joined.wait()
            served = Served(cluster, model, split, dtype, **more)
            served.workers = workers
            at = None
            while at is None:
                answer = await cluster.ask("serving.list")
                listed = [ServingInfo.from_map_untrusted(item) for item in answer["serving"]]
                at = next((info for info in listed if info.is_ready), None)
                await asyncio.sleep(0.05)
            context = ClientContext(real_world(cluster.network), "1" * 32, "client", cluster.address[0])
            served.client = VerifierClient(context, at)
            served.draft()
            yield served
    finally:
        await cluster.close()


@on_virtual_time
async def test_a_split_verifiers_text_is_transformers_own_whoever_dies(tmp_path: Path) -> None:
    model = made(tmp_path)
    expected = {sampling: reference(model, 60, sampling) for sampling in (GREEDY, SAMPLED)}
    async with serving(tmp_path, model) as served:
        drafted: dict[str, Any] = {"drafters": []}
        while not drafted["drafters"]:  # until they have met
            tokens, drafted = await served.ask(16, GREEDY)
        for sampling in (GREEDY, SAMPLED):
            tokens, stats = await served.ask(60, sampling)
            assert tokens == expected[sampling]
            assert stats["accepted"] > 0

        # A stage dies in the middle, and the drafter; a spare takes the place, and the text is the same.
        assert served.drafter is not None
        happens = {12: lambda: stage_of(served, 1).die(), 30: served.drafter.die}
        tokens, stats = await served.ask(60, SAMPLED, happens)
        assert tokens == expected[SAMPLED]
        assert served.told("stage-replaced") == 1

        # Nobody is left: what came is there, more is refused with what to do, and it goes on when somebody joins.
        lost = stage_of(served, 0)
        with pytest.raises(NetworkError, match="cannot be repaired"):
            await served.ask(60, GREEDY, {20: lost.die})
        with pytest.raises(NetworkError, match="no worker can hold") as refused:
            await served.ask(8, GREEDY)
        assert "p2ptrain join" in refused.value.remedy
        slot = next(slot for slot, peer in served.workers.items() if peer is lost)
        served.workers[slot] = join(served.cluster, int(slot))
        while True:
            try:
                tokens, _ = await served.ask(60, GREEDY)
            except P2PTrainError:
                await asyncio.sleep(0.1)
            else:
                break
        assert tokens == expected[GREEDY]


@on_virtual_time
async def test_a_model_of_bf16_writes_in_fp32_where_that_is_asked_for(tmp_path: Path) -> None:
    model = made(tmp_path, torch.bfloat16)
    expected = reference(model, 200, SAMPLED)
    assert expected != reference(model, 200, SAMPLED, torch.bfloat16), "a text this long shows the type"
    (model / "generation_config.json").write_text('{"typical_p": 0.5}')
    async with serving(tmp_path, model, None, "fp32") as served:
        assert served.said("serving") == ["model writes text in fp32, 256 tokens of context"]
        assert served.said("unused-settings") == ["model/generation_config.json also says typical_p = 0.5: not applied"]
        tokens, _ = await served.ask(200, SAMPLED)
        assert tokens == expected


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft calls it
@pytest.mark.parametrize("other", ["model", "adapter"])
@on_virtual_time
async def test_verifier_of_two_models_writes_with_the_one_that_is_named(tmp_path: Path, other: str) -> None:
    model, second = made(tmp_path), tmp_path / "other"
    expected = [reference(model, 20, GREEDY)]
    if other == "model":
        made(tmp_path, name="other", seed=3)
        expected.append(reference(second, 20, GREEDY))
        more = {"others": [second]}
    else:
        tuned = adapted(model, second, ["q_proj", "down_proj"])
        expected.append(tuple(generated(tuned, list(PROMPT.encode()), 20, Sampling(temperature=0))))
        more = {"adapters": [second]}
    assert expected[0] != expected[1]
    async with serving(tmp_path, model, None, **more) as served:
        assert [text.split()[0] for text in served.said("serving")] == ["model", "other"]
        verifiers: list[ServingInfo] = []
        while len(verifiers) < 2:
            answer = await served.cluster.ask("serving.list")
            listed = [ServingInfo.from_map_untrusted(item) for item in answer["serving"]]
            verifiers = [info for info in listed if info.role == "verifier" and info.is_ready]
        for at, tokens in zip(verifiers, expected, strict=True):
            context = ClientContext(real_world(served.cluster.network), "1" * 32, "client", served.cluster.address[0])
            served.client = VerifierClient(context, at)
            assert (await served.ask(20, GREEDY))[0] == tokens


def made(tmp_path: Path, dtype: torch.dtype = torch.float32, *, name: str = "model", seed: int = 2) -> Path:
    model = tmp_path / name
    build_model(tiny(layers=4, context=256), 256, seed=seed).to(dtype).save_pretrained(model)
    Tokenizer.of_bytes().save(model)
    return model


@asynccontextmanager
async def alone(tmp_path: Path, model: Path, split: int, dtype: str = "") -> AsyncIterator[Served]:
    """A seed, and a verifier that was started before anybody else."""
    cluster = VirtualCluster(tmp_path / "cluster", MemoryNetwork())
    await cluster.start_seed()
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield Served(cluster, model, split, dtype)
    finally:
        await cluster.close()


@on_virtual_time
async def test_it_waits_for_enough_workers_and_says_for_what(tmp_path: Path) -> None:
    model = made(tmp_path)
    async with alone(tmp_path, model, 2) as served:
        await served.until("waiting")
        await asyncio.sleep(60)  # virtual: it is told once, and waited for as long as it takes
        assert served.told("waiting") == 1
        assert "no worker has joined" in served.said("waiting")[0]
        assert "p2ptrain join" in served.said("waiting")[0]
        join(served.cluster, 1)
        await served.until("waiting", 2)
        assert "1 of 2 workers joined to hold a part" in served.said("waiting")[1]
        join(served.cluster, 2)
        await served.until("serving")
        assert served.told("waiting") == 2


def test_workers_need_the_memory_of_the_type_that_is_asked_for(tmp_path: Path) -> None:
    model = made(tmp_path, torch.bfloat16)

    async def scene(dtype: str, workers: int) -> None:
        async with alone(tmp_path / (dtype or "own"), model, 0, dtype) as served:
            for slot in range(1, workers):
                join(served.cluster, slot)
                await served.until_said("waiting", lambda said: "the model needs" in "".join(said))
            join(served.cluster, workers)
            await served.until("serving")
            assert served.said("serving") == [f"model writes text in {dtype or 'bf16'}, 256 tokens of context"]

    run_virtual(scene("fp32", 2))
    run_virtual(scene("", 1))


@on_virtual_time
async def test_who_waits_for_workers_leaves_at_once(tmp_path: Path) -> None:
    model = made(tmp_path)
    async with alone(tmp_path, model, 2) as served:
        await served.until("waiting")
        served.verifier.stop.set()
        async with asyncio.timeout(1.5):
            await served.verifier.task


@pytest.mark.parametrize(
    ("table", "split", "problem"),
    [
        ({"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 50}, 2, "cannot be split"),
        ({}, 5, "a model of 4 layers cannot have 5 stages"),
    ],
)
@on_virtual_time
async def test_it_ends_once_a_worker_says_that_the_model_does_not_split(
    tmp_path: Path, table: dict[str, Any], split: int, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(tmp_path)
    (model / "config.json").write_text(json.dumps(json.loads((model / "config.json").read_text()) | table))
    monkeypatch.setattr("p2ptrain.cluster.split_model.model_of_directory", None)  # nothing is hashed before
    async with alone(tmp_path, model, split) as served:
        await served.until("waiting")
        join(served.cluster, 1)
        with pytest.raises(P2PTrainError, match=problem):
            await served.verifier.task
        served.cluster.peers.remove(served.verifier)
        served.verifier.identity.release()
