"""What ``join --role verifier`` puts together: how a model is called, and what memory is left for its texts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from safetensors.numpy import save_file

from p2ptrain.cli import serving
from p2ptrain.cli.join_options import JoinOptions
from p2ptrain.cli.serving import cache_bytes, check
from p2ptrain.cluster.console import Console
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.core.adapters import model_name
from p2ptrain.core.errors import ConfigError, ResourceError, UserError
from p2ptrain.lab.memory import MemoryNetwork, run_virtual
from roles.member import ServingMember
from roles.serving.worker_peer import ClientContext
from tests.roles.drafter_hosts import around_of, whole
from tests.wire.doubles import on_virtual_time
from wire.text_messages import MOST_MODELS, Serving


def test_how_a_model_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_job = tmp_path / "jobs" / "abc" / "checkpoints" / "step-00000400"
    first = of_job.with_name("step-00000000")
    for directory in (of_job, first, tmp_path / "SmolLM2-135M"):
        directory.mkdir(parents=True)
    assert model_name(of_job) == "abc@400"
    assert model_name(first) == "abc@0"
    assert model_name(tmp_path / "SmolLM2-135M") == "SmolLM2-135M"
    assert model_name(tmp_path / "models--acme--toy--2" / "snapshots" / ("0123456789" * 4)) == "acme/toy--2"
    monkeypatch.chdir(tmp_path / "SmolLM2-135M")
    assert model_name(Path(".")) == "SmolLM2-135M"


async def test_more_stages_than_layers_are_refused_before_it_joins(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 4}')
    await check(JoinOptions(role="verifier", models=[tmp_path], split=4))
    with pytest.raises(UserError, match="a model of 4 layers cannot have 9 stages"):
        await check(JoinOptions(role="verifier", models=[tmp_path], split=9))


async def test_models_of_one_name_are_refused_before_it_joins(tmp_path: Path) -> None:
    twins = [tmp_path / side / "small" for side in ("one", "two")]
    with pytest.raises(UserError, match="two models are called small") as caught:
        await check(JoinOptions(role="verifier", models=twins))
    assert "different names" in caught.value.remedy
    many = [tmp_path / f"model-{number}" for number in range(MOST_MODELS + 1)]
    with pytest.raises(UserError, match="at most 16 models"):
        await check(JoinOptions(role="verifier", models=many))
    await check(JoinOptions(role="verifier", models=many[1:]))


async def test_adapter_of_another_model_is_refused_before_it_joins(tmp_path: Path) -> None:
    base, other, adapter = (tmp_path / name for name in ("base", "other", "adapter"))
    for directory in (base, other, adapter):
        directory.mkdir()
    for directory in (base, other):
        (directory / "config.json").write_text("{}")
    config = {"peft_type": "LORA", "lora_alpha": 8, "base_model_name_or_path": "../base"}
    (adapter / "adapter_config.json").write_text(json.dumps(config))

    def of(model: Path, *adapters: Path) -> JoinOptions:
        return JoinOptions(role="verifier", models=[model], adapters=list(adapters))

    await check(of(base, adapter))
    with pytest.raises(UserError, match=r"adapter is an adapter of .*/base, not of .*/other"):
        await check(of(other, adapter))
    with pytest.raises(UserError, match="base is a whole model, not an adapter"):
        await check(of(other, base))
    with pytest.raises(UserError, match="two models are called adapter"):
        await check(of(base, adapter, adapter))
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(ConfigError, match="use_dora = True") as caught:
        await check(of(base, adapter))
    assert "merge it with peft" in caught.value.remedy


def test_what_memory_is_left_for_caches(tmp_path: Path) -> None:
    save_file({"a": np.zeros(1000, np.uint8), "b": np.zeros(500, np.uint8)}, tmp_path / "model.safetensors")
    save_file({"moments": np.zeros(9000, np.uint8)}, tmp_path / "optimizer.safetensors")
    assert cache_bytes(0, [tmp_path]) == 0
    assert cache_bytes(4000, [tmp_path]) == 2500
    with pytest.raises(ResourceError, match="but --memory is"):
        cache_bytes(1500, [tmp_path])
    assert cache_bytes(4000, [tmp_path] * 2) == 1000, "of all models together"
    with pytest.raises(ResourceError, match=r"the models together have 2\.9 KiB, but"):
        cache_bytes(3000, [tmp_path] * 2)


def test_what_memory_is_left_beside_weights_of_another_type(tmp_path: Path) -> None:
    save_file({"a": np.zeros((10, 100), np.float16), "b": np.zeros(500, np.float16)}, tmp_path / "model.safetensors")
    given = [cache_bytes(9000, [tmp_path], dtype) for dtype in ("", "fp16", "bf16", "fp32")]
    assert given == [6000, 6000, 6000, 3000]
    with pytest.raises(ResourceError, match=r"5\.9 KiB in fp32, but --memory is"):
        cache_bytes(6000, [tmp_path], "fp32")
    assert cache_bytes(9000, [tmp_path], "fp32", 7000) == 2000, "the loaded weights count"


def test_buffers_in_old_files_take_no_memory(tmp_path: Path) -> None:
    tensors = {name: np.zeros(100, np.float32) for name in ("h.0.attn.bias", "h.0.attn.c_attn.bias")}
    save_file(tensors, tmp_path / "model.safetensors")
    assert cache_bytes(1000, [tmp_path]) == 600


# ----------------------------------------------------------------------------------------------------------- a drafter


class Member:
    """As much of a ``ServingMember`` as a program uses."""

    def __init__(self) -> None:
        context: ClientContext = around_of(MemoryNetwork())
        self.world = context.world
        self.doors: list[str] = []
        self.told: list[str] = []
        self.serving: Callable[[], Sequence[Serving]] | None = None
        self.ready = asyncio.Event()

    def answer(self, purpose: str, serve: Any, *, judge: Any) -> None:
        self.doors.append(purpose)

    def serves(self, serving: Callable[[], Sequence[Serving]]) -> None:
        self.serving = serving

    def notify(self, level: str, kind: str, text: str) -> None:
        self.told.append(text)
        self.ready.set()


async def served(options: JoinOptions) -> Member:
    """A member whose program ran until it was ready, and then was cancelled."""
    member = Member()
    program = asyncio.create_task(serving.serve(cast(ServingMember, member), options, Console(quiet=True)))
    ready = asyncio.create_task(member.ready.wait())
    await asyncio.wait([program, ready], return_when=asyncio.FIRST_COMPLETED)
    ready.cancel()
    if program.done():
        await program
    program.cancel()
    with pytest.raises(asyncio.CancelledError):
        await program
    return member


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory whose weights nobody has to load."""

    async def load(directory: Path, compute: Any, **how: Any) -> Any:
        assert directory == tmp_path / "small"
        how["on_bytes"](5, 10)
        engine = whole()
        engine.encoding = how["dtype"] or engine.encoding
        return engine, 512

    monkeypatch.setattr(serving, "load_local_engine", load)
    (tmp_path / "small").mkdir()
    Tokenizer.of_bytes().save(tmp_path / "small")
    return tmp_path / "small"


@on_virtual_time
async def test_a_model_is_told_of_with_what_verifiers_must_know(model: Path) -> None:
    member = await served(JoinOptions(role="drafter", models=[model]))
    assert member.serving is not None
    [said] = member.serving()
    assert (said.model, said.vocab_size, said.context) == ("small", 97, 512)
    assert said.tokenizer == Tokenizer.of_bytes().digest
    assert member.told == ["small drafts on stand-in in fp32, 512 tokens of context"]


def test_a_model_drafts_in_the_type_that_is_asked_for(model: Path) -> None:
    member = run_virtual(served(JoinOptions(role="drafter", models=[model], dtype="bf16")))
    assert member.told == ["small drafts on stand-in in bf16, 512 tokens of context"]


def test_a_model_beyond_its_memory_or_without_a_tokenizer_is_refused(model: Path) -> None:
    save_file({"a": np.zeros(9, np.uint8)}, model / "model.safetensors")  # the loaded weights are larger
    with pytest.raises(ResourceError, match="--memory is 40 B"):
        run_virtual(served(JoinOptions(role="drafter", models=[model], memory="40")))
    (model / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="tokenizer"):
        run_virtual(served(JoinOptions(role="drafter", models=[model])))
