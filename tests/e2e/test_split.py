"""A model split over real processes: its text is transformers' own, whoever asks, and whoever leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.compute.model import build_model
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.core.serving import Sampling
from p2ptrain.core.tensor_files import TensorTable
from tests.compute.families import generated, opened
from tests.compute.tiny_trainer import tiny
from tests.e2e.terminal import Terminal
from tests.e2e.warm import Nursery

DEADLINE_S = 180.0
LEFT_S = 2.0
STAGES, LAYERS, CONTEXT = 2, 6, 60_000
PROMPTS = ["Once upon a time", "def main(", "x", "The ring: ", "中文 and more", "0, 1, 1, 2, 3, 5, 8"]


@dataclass(frozen=True)
class Cluster:
    """A running ``up --split``, and what it said of itself."""

    process: subprocess.Popen[str]
    checkpoint: Path
    said: dict[str, Any]
    warm: Nursery | None

    @property
    def place(self) -> tuple[str, ...]:
        return "-c", str(self.checkpoint), "--seed", self.said["seed"]

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "p2ptrain", *arguments, *self.place]

    def run(
        self, *arguments: str, typed: str = "", at: Sequence[str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """A command that ends by itself. ``at``: other options than those that name this cluster and its model."""
        arguments = (*arguments, *(self.place if at is None else at))
        if self.warm is not None:
            return self.warm.run(arguments, Path.cwd(), typed, timeout_s=DEADLINE_S)
        command = [sys.executable, "-m", "p2ptrain", *arguments]
        return subprocess.run(command, input=typed, capture_output=True, text=True, timeout=DEADLINE_S, check=False)

    def json(self, *arguments: str, typed: str = "") -> Any:
        done = self.run(*arguments, "--json", typed=typed)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="module", autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What commands keep for this user, such as digests of models, is the test's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("PYTHONUNBUFFERED", "1")
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build_model(tiny(layers=LAYERS, context=CONTEXT), 256, seed=1).save_pretrained(path)
    Tokenizer.of_bytes().save(path)
    return path


def started(root: Path, checkpoint: Path, warm: Nursery | None, *options: str) -> Cluster:
    command = [sys.executable, "-m", "p2ptrain", "up", "-c", str(checkpoint), "--json"]
    with (root.parent / f"{root.name}.err").open("w") as errors:
        process = subprocess.Popen(
            [*command, "--state", str(root), *options],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert process.stdout is not None
    lines = list[str]()
    while not lines or lines[-1] != "}\n":
        lines.append(process.stdout.readline())
        assert lines[-1], (root.parent / f"{root.name}.err").read_text()
    said = json.loads("".join(lines))
    assert "split" in said, said
    return Cluster(process, checkpoint, said, warm)


def ended(cluster: Cluster) -> None:
    cluster.process.send_signal(signal.SIGINT)
    try:
        cluster.process.wait(DEADLINE_S)
    finally:
        if cluster.process.poll() is None:
            cluster.process.kill()
            cluster.process.wait()
        assert cluster.process.stdout is not None
        cluster.process.stdout.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path, warm: Nursery | None) -> Iterator[Cluster]:
    made = started(tmp_path_factory.mktemp("state") / "up", checkpoint, warm, "--split", str(STAGES))
    yield made
    ended(made)
    assert made.process.returncode == 0


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


def test_the_texts_are_those_of_transformers(cluster: Cluster, tmp_path: Path) -> None:
    """Sampled; greedy texts are compared below."""
    seed = 7
    prompts = [f"{number}: {prompt * (1 + number % 5)}" for number, prompt in enumerate(PROMPTS * 2)]
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(prompts))
    arguments = ["generate", "--split", str(STAGES), "--prompts", str(file), "--sessions", "4", *options(20, seed)]
    document = cluster.json(*arguments)
    texts = [item["text"] for item in document["texts"]]
    expected = reference(cluster.checkpoint, prompts, 20, seed)
    assert [index for index in range(len(prompts)) if texts[index] != expected[index]] == []
    assert len(document["split"]["stages"]) == STAGES


def test_each_stage_read_its_own_tensors_and_no_more(cluster: Cluster) -> None:
    entries = TensorTable(cluster.checkpoint).entries
    sizes = [0] * LAYERS
    embedding = norm = 0
    for name, entry in entries.items():
        if ".layers." in name:
            sizes[int(name.split(".")[2])] += entry.size_bytes
        elif "embed" in name:
            embedding += entry.size_bytes
        else:
            norm += entry.size_bytes
    stages = cluster.said["split"]["stages"]
    assert [stage["start"] for stage in stages] == [0, *(stage["stop"] for stage in stages[:-1])]
    for stage in stages:
        own = sum(sizes[stage["start"] : stage["stop"]])
        own += embedding if stage["start"] == 0 else 0
        own += embedding + norm if stage["stop"] == LAYERS else 0  # the matrices are tied
        assert own <= stage["read_bytes"] <= 1.01 * own
        assert stage["received_bytes"] == 0, "the files are on the same machine"
        assert stage["weights_bytes"] == own
        assert stage["resident_bytes"] > own


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
    place = ["-c", str(cluster.checkpoint), "--seed", cluster.said["seed"]]
    terminal = Terminal("chat", "--split", str(STAGES), "--positions", "5000", *options(4000, None), *place)
    try:
        terminal.until(r"plain turns, 5000 tokens of context.*> ")
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


async def test_a_checkpoint_that_lies_on_workers(machine: Any) -> None:
    sets = machine.settings(job__steps=10, checkpoint__every=10)
    await machine.seed(*sets)
    workers = [await machine.join(), await machine.join()]
    ended = await machine.job_until(lambda item: item["state"] == "done")
    found = await machine.ask("checkpoints.list", job=ended["id"])
    arguments = ["generate", "def ", "--split", "2", "--job", ended["id"], "--json", *options(24, None)]
    process = await machine.start(*arguments, "--seed", f"127.0.0.1:{machine.port}")
    assert await process.end() == 0, process.text
    document = json.loads("\n".join(process.out))
    directory = Path(found["checkpoints"][0]["path"])
    assert document["text"] == reference(directory, ["def "], 24, None)[0]
    assert [stage["name"] for stage in document["split"]["stages"]] != []
    assert [await worker.interrupt() for worker in workers] == [0, 0]
