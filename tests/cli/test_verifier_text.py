"""``generate`` and ``chat`` with a verifier: a real door on a real port, behind it a model of whole numbers."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer

from p2ptrain.cluster.console import LEAVING, Console
from p2ptrain.core.serving import Sampling
from roles.http.passed_requests import answer_request
from roles.serving.texts import TextRequest
from roles.verifier.server import text_app
from tests.roles.verifier.doubles import ScriptedTarget, reference, service, text_of
from wire.connection import Connection
from wire.handshake import PeerServer, local_welcome, serve
from wire.messages import Hello, Welcome
from wire.transport import TcpNetwork

from .conftest import Command, Typed

PROMPT = "def f(x):"
PEER = "aa00aa00aa00"


@dataclass
class Verifier:
    """On a thread of its own. ``start`` and ``stop`` may follow one another: it has the same port."""

    directory: Path
    target: ScriptedTarget = field(default_factory=lambda: ScriptedTarget(pass_s=0.0005))
    requests: list[TextRequest] = field(default_factory=list)
    port: int = 0

    def start(self) -> Verifier:
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(ready)), daemon=True)
        self._thread.start()
        assert ready.wait(10)
        return self

    def stop(self) -> None:
        """All at once, as a process that is killed."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def record(self, **changed: Any) -> dict[str, Any]:
        plain = {
            "id": f"{PEER}/stand-in",
            "peer": PEER,
            "name": "big one",
            "role": "verifier",
            "host": "127.0.0.1",
            "port": self.port,
            "model": "stand-in",
            "vocab_size": 256,
            "context": 600,
            "tokenizer": "",
            "http": "",
            "sessions": 0,
            "stats": {},
            "drafters": [],
        }
        return plain | changed

    async def _run(self, ready: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        serving = service(self.directory, self.target, network=TcpNetwork())
        write = serving.write

        async def recorded(request: TextRequest) -> Any:
            self.requests.append(request)
            return await write(request)

        serving.write = recorded  # type: ignore[method-assign]
        connections: list[Connection] = []

        async def decide(hello: Hello, connection: Connection) -> Welcome:
            connections.append(connection)
            return local_welcome(peer_id=PEER, name="big one", wall=0.0)

        server: PeerServer = await serve(
            TcpNetwork(),
            "127.0.0.1",
            self.port,
            decide=decide,
            serve=partial(answer_request, text_app([serving])),
            on_problem=lambda problem, _: None,
        )
        self.port = server.address[1]
        ready.set()
        await self._stop.wait()
        for connection in connections:
            connection.abort()
        await server.close()
        await serving.close()


@pytest.fixture
def verifier(tmp_path: Path) -> Iterator[Verifier]:
    made = Verifier(tmp_path / "model").start()
    yield made
    made.stop()


@pytest.fixture
def at(fake_seed: Any, verifier: Verifier) -> list[str]:
    """The seed's address, as options."""
    fake_seed.answers["serving.list"] = {"serving": [verifier.record()]}
    return ["--seed", fake_seed.address]


def test_a_text(command: Command, at: list[str]) -> None:
    outcome = command("generate", PROMPT, *at, "--tokens", "30")
    assert outcome.code == 0, outcome.err
    assert outcome.out == PROMPT + text_of(reference(PROMPT, 30))
    assert "tokens/s, stand-in of the verifier big one)" in outcome.err


def test_sampling_and_speculation_are_as_asked_for(command: Command, at: list[str], verifier: Verifier) -> None:
    drawn = ["--temperature", "0.9", "--top-k", "0", "--random-seed", "7"]
    expected = text_of(reference(PROMPT, 25, Sampling(0.9, 0, 1.0, 7)))
    for options in ([], ["--no-speculation"]):
        assert command("generate", PROMPT, *at, *drawn, "-n", "25", "--json", *options).json["text"] == expected
    assert [request.speculate for request in verifier.requests] == [True, False]


def test_a_text_that_was_interrupted(
    command: Command, at: list[str], verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is said of leaving stands below the text, and nothing comes behind it."""

    shown = PROMPT + text_of(reference(PROMPT, 20)).rstrip("�")

    async def interrupted() -> None:
        async with asyncio.timeout(10.0):
            while sys.stdout.getvalue() != shown:  # type: ignore[attr-defined]  # noqa: ASYNC110 - another thread writes
                await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()

    def before(count: int) -> Any:
        return interrupted() if count == 20 else None

    monkeypatch.setattr(Console, "event", lambda self, level, text: typer.echo(text))
    verifier.target.before = before
    outcome = command("generate", PROMPT, *at, "-n", "400", "--no-speculation")
    assert outcome.code == 130
    assert outcome.out == f"{shown}{LEAVING}\n"


def test_nobody_is_there(command: Command, fake_seed: Any) -> None:
    fake_seed.answers["serving.list"] = {"serving": []}
    fake_seed.answers["peers.list"] = {"peers": []}
    for words in (["generate", "x"], ["chat"]):
        outcome = command(*words, "--seed", fake_seed.address)
        assert (outcome.code, outcome.out) == (2, "")
        assert "no verifier is connected to write text" in outcome.err
        assert "p2ptrain join SEED --role verifier --model DIR" in outcome.err
        assert "--checkpoint DIR" in outcome.err
    outcome = command("generate", "x", "--seed", "127.0.0.1:1")
    assert outcome.code == 3
    assert "--checkpoint DIR, or --job JOB" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "x", "-c", "d", "--verifier", "v"], "--verifier does not work with --checkpoint"),
        (["chat", "-c", "d", "--model-name", "m"], "--model-name does not work with --checkpoint"),
        (["chat", "--split", "--job", "j", "--no-speculation"], "--no-speculation does not work with --checkpoint"),
        (["generate", "x", "--device", "cuda"], "a verifier, or workers, compute the model"),
        (["chat", "--device", "cpu"], "a verifier, or workers, compute the model"),
        (["generate", "x", "--split", "-c", "d", "--device", "cpu"], "a verifier, or workers, compute the model"),
    ],
)
def test_what_does_not_belong_together(command: Command, arguments: list[str], said: str) -> None:
    outcome = command(*arguments)
    assert outcome.code == 2
    assert said in outcome.err


def test_which_verifier(command: Command, fake_seed: Any, verifier: Verifier) -> None:
    other = verifier.record(name="small one", peer="b" * 12, model="other", port=1)
    fake_seed.answers["serving.list"] = {"serving": [other, verifier.record()]}
    ask = ["generate", PROMPT, "--seed", fake_seed.address, "-n", "5"]
    assert "small one (other, weights , id bbbbbbbbbbbb)" in command(*ask).err
    assert command(*ask, "--verifier", "big one").code == 0
    assert "no verifier is called x" in command(*ask, "--verifier", "x").err
    passing = verifier.record(name="ollama", peer="c" * 12, upstream=True)
    fake_seed.answers["serving.list"] = {"serving": [passing, verifier.record(), verifier.record(loaded=0.5)]}
    assert command(*ask).code == 0, "one writes itself"
    assert "ollama passes HTTP requests on" in command(*ask, "--verifier", "ollama").err
    twin = verifier.record(peer="b" * 12, port=1, weights="1234567890")
    fake_seed.answers["serving.list"] = {"serving": [twin, verifier.record(weights="abcdefghij")]}
    assert "verifiers called big one have different models" in command(*ask, "--verifier", "big one").err
    assert command(*ask, "--verifier", PEER).code == 0
    both = [verifier.record(), verifier.record(model="other")]
    fake_seed.answers["serving.list"] = {"serving": both}
    assert "the verifier big one has several models\n  → name one with --model-name" in command(*ask).err
    assert command(*ask, "--model-name", "stand-in").code == 0
    assert "no verifier has the model x" in command(*ask, "--model-name", "x").err
    assert "the model other is not served here" in command(*ask, "--model-name", "other").err
    busy = verifier.record(name="busy", peer="b" * 12, sessions=3, port=1)
    fake_seed.answers["serving.list"] = {"serving": [busy, verifier.record()]}
    assert command(*ask).code == 0
    fake_seed.answers["serving.list"] = {"serving": [verifier.record(peer="b" * 12)]}
    assert "another peer, " in command(*ask).err


def test_a_verifier_that_is_lost_in_mid_answer_and_comes_back(
    command: Command, at: list[str], fake_seed: Any, verifier: Verifier
) -> None:
    """What was said stays, and the question may be asked again: the seed knows the verifier's new port."""
    question = "what is a ring?"
    killed = threading.Event()

    def before(count: int) -> Any:
        if count == 30 and not killed.is_set():
            killed.set()
            verifier._stop.set()
            return asyncio.Event().wait()
        return None

    def then(line: int) -> None:
        if line == 1:
            verifier._thread.join(10)
            old, verifier.port = verifier.port, 0
            assert verifier.start().port != old
            fake_seed.answers["serving.list"] = {"serving": [verifier.record()]}

    verifier.target.before = before
    typed = Typed(f"{question}\n{question}\n/stats\n/quit\n", then)
    outcome = command("chat", *at, "-n", "40", "--no-speculation", stdin=typed)
    assert outcome.code == 0, outcome.err
    asked = f"User: {question}\nAssistant:"
    partial, whole = (text_of(reference(asked, count)).strip() for count in (29, 40))
    assert partial.rstrip("�") in outcome.out
    assert outcome.out.index(partial.rstrip("�")) < outcome.out.rindex(whole)
    assert "lost in the middle of a text" in outcome.err
    assert "ask again when it is back, or use another one: --verifier NAME" in outcome.err
    assert "drafters: none" in outcome.out
