"""A model split over real processes: its text is transformers' own, whoever asks, and whoever leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from p2ptrain.compute.model import build_model
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.core.serving import Sampling
from tests.compute.families import generated, opened
from tests.compute.tiny_trainer import tiny
from tests.e2e.conftest import DEADLINE_S, Machine
from tests.e2e.terminal import Terminal

LEFT_S = 2.0
STAGES, LAYERS, CONTEXT = 2, 6, 60_000
PROMPTS = ["Once upon a time", "def main(", "x", "The ring: ", "中文 and more", "0, 1, 1, 2, 3, 5, 8"]


@dataclass(frozen=True)
class Cluster:
    """A machine with a running ``up --split`` of a checkpoint. ``place``: options that name both."""

    machine: Machine
    checkpoint: Path
    place: tuple[str, ...]

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "p2ptrain", *arguments, *self.place]


@pytest.fixture(scope="module", autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What commands keep for this user, such as digests of models, is the test's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("PYTHONUNBUFFERED", "1")
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    checkpoint = tmp_path_factory.mktemp("model")
    build_model(tiny(layers=LAYERS, context=CONTEXT), 256, seed=1).save_pretrained(checkpoint)
    Tokenizer.of_bytes().save(checkpoint)
    machine = Machine(tmp_path_factory.mktemp("up"))
    shape = ("--split", str(STAGES), "--state", str(machine.root), "--json")
    up = await machine.start("up", "-c", str(checkpoint), *shape)
    try:
        await up.until("^}$")
        seed = json.loads("\n".join(up.out))["seed"]
        yield Cluster(machine, checkpoint, ("-c", str(checkpoint), "--seed", seed))
        assert await up.interrupt() == 0
    finally:
        await up.kill()


def reference(checkpoint: Path, prompts: Sequence[str], tokens: int, seed: int | None) -> list[str]:
    """What the whole model writes; ``seed`` None: greedily."""
    whole, sampling = opened(checkpoint), Sampling(temperature=0) if seed is None else Sampling(0.9, 40, 0.95, seed)
    made = [generated(whole, list(prompt.encode()), tokens, sampling) for prompt in prompts]
    return [bytes(ids).decode(errors="replace") for ids in made]


def options(tokens: int, seed: int | None) -> list[str]:
    if seed is None:
        return ["-n", str(tokens), "--temperature", "0"]
    shape = ["--temperature", "0.9", "--top-k", "40", "--top-p", "0.95", "--random-seed", str(seed)]
    return ["-n", str(tokens), *shape]


@pytest.mark.asyncio(loop_scope="module")
async def test_the_texts_are_those_of_transformers(cluster: Cluster, tmp_path: Path) -> None:
    """Sampled; greedy texts are compared below."""
    seed = 7
    prompts = [f"{number}: {prompt * (1 + number % 5)}" for number, prompt in enumerate(PROMPTS * 2)]
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(prompts))
    asked = ["--split", str(STAGES), "--prompts", str(file), "--sessions", "4", *options(20, seed), "--json"]
    process = await cluster.machine.start("generate", *asked, *cluster.place)
    assert await process.end() == 0, process.text
    document = json.loads("\n".join(process.out))
    assert [item["text"] for item in document["texts"]] == reference(cluster.checkpoint, prompts, 20, seed)
    assert len(document["split"]["stages"]) == STAGES


@pytest.mark.asyncio(loop_scope="module")
async def test_an_evaluation_by_workers_is_that_of_one_process(cluster: Cluster, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(PROMPTS * 20))
    asked = ["evaluate", "--data", str(text), "--window", "64", "--json"]
    found = []
    for more in ([], ["--split", "2"]):
        process = await cluster.machine.start(*asked, *more, *(cluster.place if more else cluster.place[:2]))
        assert await process.end() == 0, process.text
        found.append(json.loads("\n".join(process.out)))
    whole, split = found
    assert [len(document.get("split", [])) for document in found] == [0, 1]
    assert split["total"]["loss"] == pytest.approx(whole["total"]["loss"], abs=1e-5)
    assert split["total"]["tokens"] == whole["total"]["tokens"] == len(text.read_bytes())


def test_ctrl_c_leaves_at_once_and_takes_nothing_from_others(cluster: Cluster) -> None:
    leaving = subprocess.Popen(
        cluster.command("generate", "hello", "--split", str(STAGES), *options(50_000, None)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert leaving.stdout is not None
    assert leaving.stderr is not None
    assert len(os.read(leaving.stdout.fileno(), 16)) > 0, "the text has begun"
    staying = subprocess.Popen(
        cluster.command("generate", "x", "--split", str(STAGES), "--json", *options(100, 5)),
        stdout=subprocess.PIPE,
        text=True,
    )
    os.read(leaving.stdout.fileno(), 16)
    began = time.monotonic()
    leaving.send_signal(signal.SIGINT)
    leaving.stdout.close()
    code = leaving.wait(DEADLINE_S)
    assert time.monotonic() - began < LEFT_S
    assert code == 130
    said = leaving.stderr.read()
    leaving.stderr.close()
    assert "leaving" in said
    assert "Traceback" not in said
    out, _ = staying.communicate(timeout=DEADLINE_S)
    assert json.loads(out)["text"] == reference(cluster.checkpoint, ["x"], 100, 5)[0]


def test_a_conversation_at_a_terminal(cluster: Cluster) -> None:
    asked = ["--split", str(STAGES), "--positions", "4992", *options(4000, None)]
    terminal = Terminal("chat", *asked, *cluster.place)
    try:
        terminal.until(r"plain turns, 4992 tokens of context.*> ")
        terminal.type("hello\n")
        terminal.until(r"hello\r\n.{20}")
        terminal.type("\x03")
        terminal.until(r"cancelled\. Ctrl\+C again leaves\).*> ")
        terminal.type("/stats\n")
        terminal.until(r"WIRE.*a token took .* computing.*> ")
        terminal.type("and now?\n")
        terminal.until(r"now\?\r\n.{20}")
        terminal.type("\x03")
        terminal.until(r"cancelled.*> ")
        terminal.type("\x04")
        code, seconds = terminal.left()
        assert (code, seconds < LEFT_S) == (0, True)
    finally:
        terminal.end()


async def test_a_checkpoint_that_lies_on_workers(machine: Machine) -> None:
    await machine.seed(*machine.settings(job__steps=10, job__workers=1, checkpoint__every=10))
    worker = await machine.join()
    ended = await machine.job_until(lambda item: item["state"] == "done")
    found = await machine.ask("checkpoints.list", job=ended["id"])
    arguments = ["generate", "def ", "--split", "1", "--job", ended["id"], "--json", *options(24, None)]
    process = await machine.start(*arguments, "--seed", f"127.0.0.1:{machine.port}")
    assert await process.end() == 0, process.text
    document = json.loads("\n".join(process.out))
    assert document["text"] == reference(Path(found["checkpoints"][0]["path"]), ["def "], 24, None)[0]
    assert len(document["split"]["stages"]) == 1
    assert await worker.interrupt() == 0
