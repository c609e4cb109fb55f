"""``p2ptrain agent``: a fake agent shows what it is started with."""

from __future__ import annotations

import http.server
import json
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from string import Template

import pytest

import p2ptrain.cli
from p2ptrain.cluster.running import announce_seed
from wire.address import parse_address
from wire.records import ClusterInfo, ServingInfo

from .conftest import Command, JoinedSeed

KEY = "a-key-of-operators"
AGENTS = tomllib.loads(Path(p2ptrain.cli.__path__[0], "agents.toml").read_text())
PROGRAM = f"""#!{sys.executable}
import json, os, sys
print(json.dumps([sys.argv[1:], dict(os.environ)]), flush=True)
if sys.argv[-1] == "wait":
    sys.stdin.read()
sys.exit(7)
"""


class Endpoint(http.server.BaseHTTPRequestHandler):
    models = ("tiny",)

    def do_GET(self) -> None:
        is_right = self.headers["authorization"] == f"Bearer {KEY}" and self.path == "/v1/models"
        body = json.dumps({"data": [{"id": model} for model in self.models]}).encode()
        self.send_response(200 if is_right else 401)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        """Nobody reads it."""


@pytest.fixture
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endpoint) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "api-key"
    path.write_text(KEY)
    path.chmod(0o600)
    return path


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (directory := tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(directory))
    for name in ("claude", "codex"):
        (directory / name).write_text(PROGRAM)
        (directory / name).chmod(0o755)
    return directory


def started(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "p2ptrain", "agent", *words]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_agent_gets_address_key_and_model(url: str, key: Path, programs: Path) -> None:
    with started("claude", "--url", f"{url}/v1/", "--api-key-file", str(key), "--", "-p", "x y") as process:
        arguments, environment = json.loads(process.communicate(timeout=60)[0])
    assert (arguments, process.returncode) == (["-p", "x y"], 7)
    assert (environment["ANTHROPIC_BASE_URL"], environment["ANTHROPIC_AUTH_TOKEN"]) == (url, KEY)
    assert (environment["ANTHROPIC_MODEL"], environment["PATH"]) == ("tiny", str(programs))


def test_signals_reach_the_agent(url: str, key: Path, programs: Path) -> None:
    with started("codex", "--url", url, "--api-key-file", str(key), "--", "wait") as process:
        assert process.stdout is not None
        arguments, _ = json.loads(process.stdout.readline())
        assert f'base_url="{url}/v1"' in arguments[1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM


def test_endpoint_of_the_seed_is_found(
    command: Command, fake_seed: JoinedSeed, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "state" / "seed").mkdir(parents=True)
    (tmp_path / "state" / "seed" / "http-operate.key").write_text(KEY)
    cluster = ClusterInfo("c", "attic", "0", fake_seed.address, 0.0, 0, 0, http=url).to_map()
    fake_seed.answers["cluster.info"] = {"cluster": cluster}
    with announce_seed(parse_address(fake_seed.address), tmp_path / "state"):
        shown = command("agent", "aider", "--dry-run").out
    assert f"OPENAI_API_BASE={url}/v1" in shown
    assert shown.rstrip().endswith("aider --model openai/tiny")
    assert "OPENAI_API_KEY=HIDDEN" in shown
    assert KEY not in shown


def test_endpoint_of_a_verifier_is_found(command: Command, fake_seed: JoinedSeed, url: str, key: Path) -> None:
    cluster = ClusterInfo("c", "attic", "0", fake_seed.address, 0.0, 0, 0)
    verifier = ServingInfo(
        id="a/tiny", peer="a", name="big", role="verifier", host="127.0.0.1", port=1, model="tiny", http=f"{url}/v1"
    )
    fake_seed.answers["cluster.info"] = {"cluster": cluster.to_map()}
    fake_seed.answers["serving.list"] = {"serving": [verifier.to_map()]}
    shown = command("agent", "qwen", "--dry-run", "--api-key-file", str(key)).out
    assert f"OPENAI_BASE_URL={url}/v1" in shown
    fake_seed.answers["serving.list"] = {"serving": []}
    assert "neither the seed nor a verifier answers HTTP" in command("agent", "qwen", "--dry-run").err


def test_what_cannot_be_started_is_refused(
    command: Command, url: str, key: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.execvpe", None)
    here = ("--url", url, "--api-key-file", str(key))
    assert "did you mean claude? choose one of aider, claude" in command("agent", "claud").err
    assert "pipx install aider-chat" in command("agent", "aider").err
    assert "is no address" in command("agent", "codex", "--url", 'http://x"y').err
    assert "401 Unauthorized" in command("agent", "codex", "--url", url).err
    assert f"no model big: {url} has tiny" in command("agent", "codex", *here, "--model-name", "big").err
    monkeypatch.setattr(Endpoint, "models", ("a", "b"))
    outcome = command("agent", "codex", *here)
    assert (outcome.code, f"{url} has a, b" in outcome.err, "--model-name NAME" in outcome.err) == (2, True, True)
    monkeypatch.setattr(Endpoint, "models", ('x",y="',))
    assert "cannot be given a model with the name" in command("agent", "codex", *here).err
    monkeypatch.setattr(Endpoint, "models", ())
    outcome = command("agent", "codex", *here)
    assert ("has no model yet" in outcome.err, "start a verifier" in outcome.err) == (True, True)


def test_agents_are_listed(command: Command, programs: Path) -> None:
    lines = command("agent").out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == list(AGENTS)
    assert {line.split()[0] for line in lines if str(programs) in line} == {"claude", "codex"}


@pytest.mark.parametrize("name", AGENTS)
def test_row_names_the_endpoint_and_the_model(name: str) -> None:
    row = AGENTS[name]
    assert set(row) <= {"program", "install", "variables", "arguments"}
    texts = [*row["variables"].values(), *row.get("arguments", ())]
    filled = [Template(text).substitute(url="http://u", key="k", model="m") for text in texts]
    assert any("http://u" in text for text in filled)
    assert any(text.endswith(("m", 'm"')) or '"m"' in text for text in filled)
    assert "k" in row["variables"] or "$key" in texts
