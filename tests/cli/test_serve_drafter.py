"""What ``join --role drafter`` puts together, with a member that only notes what it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from safetensors.numpy import save_file

from p2ptrain.cli import serving
from p2ptrain.cli.join_options import JoinOptions
from p2ptrain.cluster.console import Console
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.core.errors import ConfigError, ResourceError
from p2ptrain.lab.memory import MemoryNetwork, run_virtual
from roles.member import ServingMember
from roles.serving.worker_peer import ClientContext
from tests.roles.drafter_hosts import around_of, whole
from tests.wire.doubles import on_virtual_time
from wire.text_messages import Serving


class Member:
    """As much of a ``ServingMember`` as a program uses."""

    def __init__(self) -> None:
        context: ClientContext = around_of(MemoryNetwork())
        self.world = context.world
        self.doors: list[str] = []
        self.told: list[str] = []
        self.serving: Callable[[], Serving] | None = None
        self.ready = asyncio.Event()

    def answer(self, purpose: str, serve: Any, *, judge: Any) -> None:
        self.doors.append(purpose)

    def serves(self, serving: Callable[[], Serving]) -> None:
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
    monkeypatch.setattr(serving, "_prepare_torch", lambda directory, threads: None)
    (tmp_path / "small").mkdir()
    Tokenizer.of_bytes().save(tmp_path / "small")
    return tmp_path / "small"


@on_virtual_time
async def test_a_model_is_told_of_with_what_verifiers_must_know(model: Path) -> None:
    member = await served(JoinOptions(role="drafter", model=str(model)))
    assert member.serving is not None
    said = member.serving()
    assert (said.model, said.vocab_size, said.context) == ("small", 97, 512)
    assert said.tokenizer == Tokenizer.of_bytes().digest
    assert member.told == ["small drafts on stand-in in fp32, 512 tokens of context"]


def test_a_model_drafts_in_the_type_that_is_asked_for(model: Path) -> None:
    member = run_virtual(served(JoinOptions(role="drafter", model=str(model), dtype="bf16")))
    assert member.told == ["small drafts on stand-in in bf16, 512 tokens of context"]


def test_a_model_beyond_its_memory_or_without_a_tokenizer_is_refused(model: Path) -> None:
    save_file({"a": np.zeros(9, np.uint8)}, model / "model.safetensors")  # the loaded weights are larger
    with pytest.raises(ResourceError, match="--memory is 40 B"):
        run_virtual(served(JoinOptions(role="drafter", model=str(model), memory="40")))
    (model / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="tokenizer"):
        run_virtual(served(JoinOptions(role="drafter", model=str(model))))
