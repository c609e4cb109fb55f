"""Data and models are checked before any process starts; a model of the hub is fetched from a hub on the loopback."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.cli.text_options import newest_in, newest_of_job
from p2ptrain.cluster.console import Console
from tests.cli.test_operator_commands import CHECKPOINT
from wire.records import ClusterInfo

from .conftest import Command

COMMIT = "c0ffee" + "0" * 34
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"a pickle",
    "tokenizer.pkl": b"a pickle",
    "onnx/config.json": b"{}",
}


class _Hub(BaseHTTPRequestHandler):
    asked: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(path)
        name = path.rpartition(f"/resolve/{COMMIT}/")[2]
        if path == "/api/models/owner/small/revision/main":
            listed = [{"rfilename": name} for name in FILES]
            self._answer(json.dumps({"id": "owner/small", "sha": COMMIT, "siblings": listed}).encode())
        elif path == f"/api/models/owner/small/tree/{COMMIT}":
            tree = [{"type": "file", "path": name, "size": len(data), "oid": "0" * 40} for name, data in FILES.items()]
            self._answer(json.dumps(tree).encode())
        elif name in FILES:
            self._answer(FILES[name])
        else:
            self._answer(b"{}", 404, **{"X-Error-Code": "RepoNotFound"})

    def _answer(self, body: bytes, code: int = 200, **headers: str) -> None:
        self.send_response(code)
        headers |= {"Content-Length": str(len(body)), "ETag": f'"{hash(body)}"', "X-Repo-Commit": COMMIT}
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """A hub with one model; the paths that it is asked for."""
    asked: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Hub", (_Hub,), {"asked": asked}))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    yield asked
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_model_of_the_hub_is_fetched_without_pickles(hub: list[str]) -> None:
    found = newest_in(Path("owner/small"), download=True)
    assert {path.name for path in found.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    assert (found / "model.safetensors").read_bytes() == b"weights"
    assert not any(name in path for path in hub for name in ("pytorch_model", "pkl", "onnx"))


def test_what_the_hub_does_not_have_is_said(command: Command, hub: list[str]) -> None:
    outcome = command("generate", "x", "-c", "owner/other", "--download", "--json")
    assert (outcome.code, "does not show owner/other" in outcome.json["error"]["message"]) == (2, True)


def test_without_a_hub_the_command_to_run_elsewhere_is_named(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free_port: int
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    outcome = command("generate", "x", "-c", "owner/small", "--download")
    assert outcome.code == 3
    assert "run: hf download owner/small --include '*.safetensors'" in outcome.err
    assert "--download fetches it" in command("generate", "x", "-c", "owner/small").err


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("data.path=/no/such", "data.path = '/no/such' does not exist"),
        ("model.path=/no/such", "/no/such is not a directory"),
        ("model.path=owner/small", "--download fetches it"),
        ("model.path=/", "holds no model"),
    ],
)
def test_what_is_missing_is_refused_before_anything_starts(
    command: Command, fake_seed: Any, tmp_path: Path, setting: str, says: str
) -> None:
    outcome = command("up", "--plain", "--state", str(tmp_path / "state"), "--set", setting)
    assert (outcome.code, says in outcome.err) == (2, True), outcome.err
    assert not (tmp_path / "state").exists()
    cluster = ClusterInfo("c", "attic", "0", fake_seed.address, 0.0, 0, 0).to_map()
    fake_seed.answers |= {"cluster.info": {"cluster": cluster}, "jobs.create": {"job": "3f9a"}}
    outcome = command("jobs", "create", "--set", setting)
    assert (outcome.code, says in outcome.err) == (2, True), outcome.err
    cluster["address"] = "192.168.1.20:7337"  # its workers read disks of their own
    assert command("jobs", "create", "--set", setting).code == 0


def test_a_text_without_enough_is_refused_once_and_before_anything_starts(command: Command, tmp_path: Path) -> None:
    (tmp_path / "x.txt").touch()
    typed = ("up", "--plain", "--state", str(tmp_path / "state"), "--set", f"data.path={tmp_path}")
    outcome = command(*typed)
    said = f"error: data.path = '{tmp_path}' names only empty files\n  → name files with text\n"
    assert (outcome.code, outcome.err) == (2, said)
    (tmp_path / "x.txt").write_text("x" * 252)
    outcome = command(*typed)
    assert (outcome.code, "is too short for 2 sequences of 128 tokens" in outcome.err) == (2, True)
    assert not (tmp_path / "state").exists()


def test_a_directory_of_models_is_searched_and_the_choice_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fake_seed: Any
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")

    os.utime(tmp_path / "a" / "config.json", (0, 0))
    assert newest_in(tmp_path) == tmp_path / "b"
    chosen = f"(the model is {tmp_path / 'b'}, the newest of 2; to use another: --checkpoint DIR)\n"
    assert capsys.readouterr().err.endswith(chosen)
    found = [dataclasses.replace(CHECKPOINT, path=str(tmp_path / name), step=step) for step, name in enumerate("ab")]
    fake_seed.answers["checkpoints.list"] = {"checkpoints": [item.to_map() for item in found]}
    assert newest_of_job(fake_seed.address, "tiny") == tmp_path / "b"
    assert capsys.readouterr().err == chosen


def test_long_work_is_shown_and_short_work_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = threading.Event()

    def text() -> str:
        shown.set()
        return "loading"

    with Console().during(text):
        pass
    assert not shown.is_set()
    monkeypatch.setattr("p2ptrain.cluster.console.SHORT_S", 0.0)
    with Console(itertools.count().__next__).during(text):
        assert shown.wait(10)
    assert capsys.readouterr().err.startswith("loading  (")
