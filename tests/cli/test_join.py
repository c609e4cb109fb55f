"""``p2ptrain join``: what its options may say for each role, before anything is dialled."""

from __future__ import annotations

import asyncio
import io
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from p2ptrain.cli import join as command_of
from p2ptrain.cli import joining, serving
from p2ptrain.cli.join_options import JoinOptions
from p2ptrain.cli.joining import JoinContext, MemberRun
from p2ptrain.cluster.access import usual_host
from p2ptrain.cluster.console import Console
from p2ptrain.cluster.island import IslandOptions
from p2ptrain.core.errors import ResourceError, Unreachable, UserError
from p2ptrain.core.hours import OpenHours
from wire.connection import Connection
from wire.handshake import local_welcome, serve
from wire.messages import Hello, Welcome
from wire.transport import TcpNetwork, every_interface

from .conftest import Command


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[JoinOptions]:
    """What a command would have begun."""
    found: list[JoinOptions] = []

    async def served(of: JoinOptions) -> None:
        assert of.role != "worker"
        found.append(of)

    async def work(of: JoinOptions, island: IslandOptions | None) -> None:
        assert of.role == "worker"
        found.append(of)

    monkeypatch.setattr(serving, "join_to_serve", served)
    monkeypatch.setattr(command_of, "_pass_on", served)
    monkeypatch.setattr(command_of, "_work", work)
    return found


def test_state_is_claimed_before_a_seed_is_looked_for(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(joining, "discover", None)
    assert "cannot make the directory" in command("join", "--state", str(tmp_path / "file")).err


def test_a_worker_is_what_nobody_names(command: Command, begun: list[JoinOptions]) -> None:
    assert command("join").code == 0
    (of,) = begun
    assert (of.role, of.targets, of.advertised) == ("worker", [("127.0.0.1", 7337)], ("", 0))


@pytest.mark.parametrize(
    ("seed", "host"),
    [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("::1", "::1"), ("fd00::1", every_interface())],
)
def test_a_member_listens_where_its_seed_can_reach_it(seed: str, host: str) -> None:
    assert usual_host(seed) == host


def test_worker_that_may_draft_has_a_model(command: Command, begun: list[JoinOptions], model: Path) -> None:
    assert command("join", "--allow", "train, draft", "--model", model, "--hours", "22-8").code == 0
    assert (begun[0].allowed, begun[0].models) == ({"train", "draft"}, [model])


def test_a_verifier_and_its_options(command: Command, begun: list[JoinOptions], model: Path) -> None:
    outcome = command("join", "10.0.0.7", "--role", "verifier", "--model", model, "--sessions", "3", "--memory", "1G")
    assert (outcome.code, outcome.err) == (0, "")
    assert begun == [JoinOptions("10.0.0.7", role="verifier", models=[model], sessions=3, memory="1G")]
    command("join", "--role", "verifier", "--model", model, "--split", "2", "--http", "[::1]:8000")
    assert (begun[-1].models, begun[-1].split, begun[-1].http_place) == ([model], 2, ("::1", 8000))
    command("join", "--role", "verifier", "--model", model, "--split", "--dtype", "bf16")
    assert (begun[-1].split, begun[-1].http_place, begun[-1].dtype) == (0, None, "bf16")
    command("join", "--role", "verifier", "--model", model, "--model", model)
    assert begun[-1].models == [model] * 2, "names are compared when it begins to serve"


def test_existing_server_needs_no_model(command: Command, begun: list[JoinOptions]) -> None:
    outcome = command("join", "--role", "verifier", "--upstream", "http://127.0.0.1:8000/v1/")
    assert (outcome.code, begun[0].upstream, begun[0].models) == (0, "http://127.0.0.1:8000", [])


@pytest.mark.parametrize(
    ("arguments", "problem", "remedy"),
    [
        (
            ["--role", "verifyer"],
            "--role verifyer is not a valid value",
            "did you mean verifier? use worker, verifier, drafter",
        ),
        (["--role", "operator"], "--role operator is not a valid value", "use worker, verifier, drafter"),
        (["--role", "verifier"], "a verifier needs a model", "--model"),
        (["--role", "drafter"], "a drafter needs a model", "--model"),
        (["--role", "verifier", "--model", "x", "--http", "a:99999"], "--http: 'a:99999' is", "such as 127.0.0.1:8000"),
        (["--advertise", "a b:1"], "--advertise: 'a b:1' is not an address", "the address that others dial"),
        (["--role", "drafter", "--model", "nowhere"], "nowhere is not a directory", "checkpoints list"),
        (["--model", "x"], "--model is not for a worker", "--role drafter, or verifier"),
        (["--sessions", "2"], "--sessions is not for a worker", "--role drafter, or verifier"),
        (["--allow", "train,pray"], "--allow pray is not a valid value", "use train, serve, draft"),
        (["--allow", "train,draft"], "a worker drafts with one model", "--model"),
        (["--weight", "2"], "--weight is not for a worker", "--role verifier"),
        (["--hours", "8"], "--hours 8 are no hours", "such as 22-8"),
        (["--dtype", "fp32"], "--dtype is not for a worker", "--role drafter, or verifier"),
        (["--role", "verifier", "--model", "x", "--dtype", "int8"], "--dtype int8 is not", "fp32, bf16, fp16"),
        (["--http", "127.0.0.1:8000"], "--http is not for a worker", "--role verifier"),
        (["--split"], "--split is not for a worker", "--role verifier"),
        (["--role", "drafter", "--devices", "2"], "--devices is not for a drafter", "--device chooses"),
        (["--devices", "two"], "--devices two is not a number of devices", "use all, or a number"),
        (["--devices", "2", "--device", "mps"], "--device mps is one device", "--device cuda with --devices"),
        (["--devices", "all", "--device", "cpu"], "--devices all: no GPU", "number of processes"),
        *(
            (["--role", "verifier", "--model", "x", "--split", *given], f"{given[0]} does not apply", "to the workers")
            for given in (["--memory", "4GiB"], ["--device", "cpu"], ["--threads", "2"])
        ),
        (["--role", "drafter", "--model", "x", "--model", "y"], "a drafter has one model", "a drafter for each"),
        (["--role", "drafter", "--model", "x", "--adapter", "y"], "--adapter is not for a drafter", "--role verifier"),
        *(
            (["--role", "verifier", "--model", "x", "--adapter", "y", *more], "--adapter does not work with", "merge")
            for more in (["--model", "z"], ["--split"])
        ),
        (["--role", "drafter", "--model", "x", "--memory", "10"], "--memory 10 is too small", "add a unit"),
        (["--role", "drafter", "--model", "x", "--split", "2"], "--split is not for a drafter", "--role verifier"),
        (["--role", "drafter", "--model", "x", "--api-key-file", "x"], "is not for a drafter", "--role verifier"),
        (["--role", "verifier", "--model", "x", "--http", "127.0.0.1"], "127.0.0.1 has no port", "HOST:PORT"),
        (["--role", "verifier", "--model", "x", "--api-key-file", "x"], "is for an HTTP endpoint", "--http"),
        (
            ["--role", "verifier", "--model", "x", "--http", "127.0.0.1:80", "--api-key-file", "none"],
            "cannot read the API key in none",
            "secrets.token_urlsafe",
        ),
        (["--upstream", "http://a"], "--upstream is not for a worker", "--role verifier"),
        (["--role", "verifier", "--upstream", "a:80"], "--upstream 'a:80' is not a URL", "http://127.0.0.1:8000"),
        (["--role", "verifier", "--upstream-key-file", "y"], "--upstream '' is not a URL", "http://127.0.0.1:8000"),
        *(
            (
                ["--role", "verifier", "--upstream", "http://a", *more],
                f"{more[0]} does not apply with --upstream",
                "out",
            )
            for more in (["--model", "x"], ["--split"], ["--sessions", "2"], ["--http", "a:1"], ["--memory", "4GiB"])
        ),
    ],
)
def test_nonsense_is_told_with_a_remedy(command: Command, arguments: list[str], problem: str, remedy: str) -> None:
    outcome = command("join", *arguments)
    assert outcome.code == 2
    assert problem in outcome.err
    assert remedy in outcome.err


async def test_what_http_cannot_be_is_refused_before_anything_is_dialled(model: Path, tmp_path: Path) -> None:
    root = tmp_path / "state"
    of = JoinOptions("127.0.0.1:1", role="verifier", models=[model], state=root)
    with pytest.raises(UserError, match="needs an API key"):
        await serving.join_to_serve(replace(of, http="0.0.0.0:1"))
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UserError, match="is in use"):
        await serving.join_to_serve(replace(of, http="{}:{}".format(*taken.getsockname())))
    save_file({"weight": np.zeros(1250, np.float32)}, model / "model.safetensors")
    with pytest.raises(ResourceError, match="but --memory is"):
        await serving.join_to_serve(replace(of, memory="4000"))
    save_file({"weight": np.zeros(1250, np.float16)}, model / "model.safetensors")
    with pytest.raises(ResourceError, match="in fp32, but --memory is"):
        await serving.join_to_serve(replace(of, memory="4000", dtype="fp32"))
    assert not root.exists()


async def test_it_waits_for_a_seed_that_is_not_there_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    waits, said, made = asyncio.Event(), list[str](), list[JoinContext]()

    def progress(console: Console, text: str, **_: Any) -> None:
        said.append(text)
        waits.set()

    async def running(stop: asyncio.Event) -> None:
        pass

    def make(found: JoinContext) -> MemberRun:
        made.append(found)
        return running

    async def decide(hello: Hello, connection: Connection) -> Welcome:
        return local_welcome(peer_id="seed", name="seed", wall=0.0)

    async def hang_up(connection: Connection, hello: Hello) -> None:
        pass

    monkeypatch.setattr(Console, "progress", progress)
    of = JoinOptions(f"127.0.0.1:{port}", role="drafter", state=tmp_path)
    with pytest.raises(Unreachable):
        await joining.run_member(replace(of, wait=0.0), make)
    assert said == made == []
    assert " joins " not in capsys.readouterr().err, "it has not reached the seed"
    async with asyncio.timeout(10):
        staying = asyncio.create_task(joining.run_member(of, make))
        await waits.wait()
        assert " s: cannot reach 127.0.0.1" in said[0]
        server = await serve(TcpNetwork(), "127.0.0.1", port, decide=decide, serve=hang_up, on_problem=lambda *_: None)
        await staying
        await server.close()
    assert made[0].access.port == port
    assert f"joins 127.0.0.1:{port}\n" in capsys.readouterr().err


async def test_it_takes_part_in_its_hours_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_open, runs = False, asyncio.Queue[str]()
    monkeypatch.setattr(OpenHours, "until_change_s", lambda self, wall: (is_open, 0.01))

    async def running(stop: asyncio.Event) -> None:
        assert is_open
        runs.put_nowait("joined")
        await stop.wait()
        runs.put_nowait("left")

    async def decide(hello: Hello, connection: Connection) -> Welcome:
        return local_welcome(peer_id="seed", name="seed", wall=0.0)

    async def hang_up(connection: Connection, hello: Hello) -> None:
        pass

    server = await serve(TcpNetwork(), "127.0.0.1", 0, decide=decide, serve=hang_up, on_problem=lambda *_: None)
    of = JoinOptions(f"127.0.0.1:{server.address[1]}", state=tmp_path, hours="22-8")
    async with asyncio.timeout(10):
        staying = asyncio.create_task(joining.run_member(of, lambda context: running))
        for _ in range(2):
            is_open = True
            assert await runs.get() == "joined"
            is_open = False
            assert await runs.get() == "left"
    staying.cancel()
    await asyncio.gather(staying, return_exceptions=True)
    await server.close()


def test_progress_is_rewritten_on_a_terminal_and_rarer_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    for live, shown in ((True, "\r0�\r1�\r2�\r3�\r4�"), (False, "0�\n1�\n2�\n4�\n")):
        monkeypatch.setattr(sys, "stderr", written := io.StringIO())
        written.isatty = lambda live=live: live  # type: ignore[method-assign]
        times = [0.0, 1.0, 2.0, 3.0, 4.0]
        console = Console(iter(times).__next__)
        for now in times:
            console.progress(f"{now:.0f}\x1b", every_s=max(now, 1.0))
        assert written.getvalue() == shown
