"""What the trackers' writers leave behind, read by the programs that it is for."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Profile, Track
from p2ptrain.core.errors import P2PTrainError
from roles.track.writers import JsonLines, MlFlow, Point, TensorBoard, TrackedRun, WandB, Writer, check


def _run(directory: Path, *, name: str = "job1", after_step: int = 0) -> TrackedRun:
    tags = {"strategy": "sync", "profile": "small"}
    return TrackedRun(name, "job1", "tiny", tags, {"job": {"steps": 9}}, after_step, directory, 1e9)


def _points(*steps: int, loss: float = 2.0) -> list[Point]:
    return [Point(step, 1e9 + step, {"train/loss": loss + step, "members": 2.0}) for step in steps]


def _written(writer: Writer, run: TrackedRun, points: list[Point]) -> None:
    writer.begin(run)
    writer.write(points)
    writer.end("")


def test_json_lines_have_each_step_once(tmp_path: Path) -> None:
    run = _run(tmp_path / "run")
    _written(JsonLines(Track(), {}), run, _points(1, 2, 3, 4))
    file = run.directory / "metrics.jsonl"
    file.write_text(file.read_text() + '{"step": 5, "wa')  # the machine lost its power there
    _written(JsonLines(Track(), {}), run._replace(after_step=3), _points(4, 5, loss=7.0))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines[3] == {"step": 4, "wall": 1e9 + 4, "train/loss": 11.0, "members": 2.0}
    assert json.loads((run.directory / "job.json").read_text())["config"] == {"job": {"steps": 9}}


def test_tensorboard_reads_each_step_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, threads = _run(tmp_path / "run"), threading.active_count()
    first = TensorBoard(Track(), {})
    first.begin(run)
    first.write(_points(1, 2, 3, 4))
    assert threading.active_count() == threads, "on a full disk its thread would show a traceback"
    first.end("")
    _written(TensorBoard(Track(), {}), run._replace(after_step=2, wall=1e9 + 2), _points(3, 4, 5, loss=7.0))
    read = EventAccumulator(str(run.directory))
    read.Reload()
    assert [(event.step, event.value, event.wall_time) for event in read.Scalars("train/loss")] == [
        (1, 3.0, 1e9 + 1), (2, 4.0, 1e9 + 2), (3, 10.0, 1e9 + 3), (4, 11.0, 1e9 + 4), (5, 12.0, 1e9 + 5),
    ]  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- MLflow


class MlFlowServer(BaseHTTPRequestHandler):
    """As much of MLflow's REST API as the writer uses, for one experiment and one run."""

    asked: list[tuple[str, dict[str, Any]]]
    run: dict[str, Any] | None

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        method = self.path.removeprefix("/base/api/2.0/mlflow/")
        here = type(self)
        here.asked.append((method, body))
        if self.headers["Authorization"] == "Bearer moved":
            self.send_response(302)
            self.send_header("Location", "/elsewhere")
            self.end_headers()
            return
        if self.headers["Authorization"] != "Bearer s3cret":
            self.send_error(401)
            return
        answer: dict[str, Any] = {}
        match method:
            case "experiments/create":
                answer = {"experiment_id": "7"}
            case "runs/create":
                answer = {"run": {"info": {"run_id": "r1"}}}
                here.run = answer["run"]
            case "runs/search":
                answer = {"runs": [here.run]} if here.run else {}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def mlflow() -> Iterator[tuple[str, type[MlFlowServer]]]:
    MlFlowServer.asked, MlFlowServer.run = [], None
    server = HTTPServer(("127.0.0.1", 0), MlFlowServer)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/base/", MlFlowServer
    server.shutdown()
    thread.join()
    server.server_close()


def test_mlflow_is_told_each_value_and_finds_the_run_again(
    mlflow: tuple[str, type[MlFlowServer]], tmp_path: Path
) -> None:
    address, server = mlflow
    environ = {"MLFLOW_TRACKING_URI": address, "MLFLOW_TRACKING_TOKEN": "s3cret"}
    run, many = _run(tmp_path), [*range(1, 502)]
    run = run._replace(config={"job": {f"n{number}": number for number in range(250)}})
    _written(MlFlow(Track(), environ), run, _points(*many))
    again = MlFlow(Track(), environ)
    again.begin(run._replace(after_step=501))
    again.write(_points(502))
    again.end("done")
    told = [metric for method, body in server.asked if method == "runs/log-batch" for metric in body.get("metrics", ())]
    assert [metric["step"] for metric in told if metric["key"] == "train/loss"] == [*many, 502]
    assert told[0] == {"key": "train/loss", "value": 3.0, "timestamp": 1_000_000_001_000, "step": 1}
    told = [param for method, body in server.asked if method == "runs/log-batch" for param in body.get("params", ())]
    assert [param["key"] for param in told] == [f"job.n{number}" for number in range(250)]
    assert max(len(body.get("params", ())) for _, body in server.asked) == 100
    methods = [method for method, _ in server.asked]
    assert (methods.count("runs/create"), methods.count("experiments/create")) == (1, 2)
    assert server.asked[-1] == ("runs/update", {"run_id": "r1", "status": "FINISHED"})
    with pytest.raises(P2PTrainError, match="401") as caught:
        MlFlow(Track(), environ | {"MLFLOW_TRACKING_TOKEN": "wrong"}).begin(run)
    assert "MLFLOW_TRACKING_URI" in caught.value.remedy
    with pytest.raises(P2PTrainError, match="302"):  # it does not follow, nor tell its key elsewhere
        MlFlow(Track(), environ | {"MLFLOW_TRACKING_TOKEN": "moved"}).begin(run)


@pytest.mark.parametrize("address", ["", "file:///x", "http://me:key@host", "http:///"])
def test_mlflow_needs_an_address_without_credentials(address: str) -> None:
    check("mlflow", Profile(), {"MLFLOW_TRACKING_URI": "https://host:5000/base/"})
    with pytest.raises(P2PTrainError, match="the seed lacks MLFLOW_TRACKING_URI in its") as caught:
        check("mlflow", Profile(), {"MLFLOW_TRACKING_URI": address})
    assert "key" not in str(caught.value)


# ------------------------------------------------------------------------------------------------------------------ W&B

STAND_IN = """
import json, os, pathlib
Settings = dict
log = pathlib.Path(os.environ["WANDB_NOTES"]).open("a")
def note(*what):
    print(json.dumps(what), file=log, flush=True)
class Run:
    def log(self, values, step): note("log", step, values)
    def finish(self, exit_code): note("finish", exit_code)
def init(**wanted):
    print("talkative")
    if wanted["project"] == "none":
        raise PermissionError("no such project")
    note("init", {name: wanted[name] for name in ("id", "group", "mode", "tags", "resume", "config")})
    return Run()
"""


def _ended(writer: WandB, state: str) -> None:
    writer.end(state)
    writer._process.wait(60)


def test_wandb_gets_the_run_from_a_process_that_finishes_it(tmp_path: Path) -> None:
    (tmp_path / "wandb.py").write_text(STAND_IN)
    environ = {"PYTHONPATH": f"{tmp_path}:{':'.join(sys.path)}", "WANDB_NOTES": str(tmp_path / "notes")}
    writer = WandB(Track(offline=True), environ)
    writer.begin(_run(tmp_path / "run"))
    writer.write(_points(1, 2))
    _ended(writer, "done")
    refused = WandB(Track(project="none"), environ)
    with pytest.raises(P2PTrainError, match="PermissionError: no such project"):
        refused.begin(_run(tmp_path / "run"))
    _ended(refused, "")
    killed = WandB(Track(), environ)
    killed.begin(_run(tmp_path / "run", name="job1-2", after_step=1))
    killed._process.kill()
    with pytest.raises(P2PTrainError, match="its process ended"):
        killed.write(_points(2))
    _ended(killed, "")
    notes = [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()]
    config = {"job": {"steps": 9}}
    about = {"group": "job1", "tags": ["sync", "small"], "resume": "allow", "config": config}
    assert notes == [
        ["init", {"id": "job1", "mode": "offline", **about}],
        ["log", 1, {"train/loss": 3.0, "members": 2.0, "_timestamp": 1e9 + 1}],
        ["log", 2, {"train/loss": 4.0, "members": 2.0, "_timestamp": 1e9 + 2}],
        ["finish", 0],
        ["init", {"id": "job1-2", "mode": "online", **about}],
    ]
    assert "talkative" in (tmp_path / "run" / "wandb.log").read_text()
