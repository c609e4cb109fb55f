"""The writers of the trackers: blocking, each used by one thread. ``roles.seed.tracking`` runs them.

A writer raises whatever its library raises. ``begin`` makes everything after ``TrackedRun.after_step`` void: a job that
restarts, or that went back to an earlier step, has each step once. Files can do that. W&B and MLflow keep what they
were told; there a job that went back begins a new run (``TrackedRun.id``).
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from configs.schema import Profile, Track
from p2ptrain.core import plugins
from p2ptrain.core.errors import P2PTrainError, Refused
from p2ptrain.core.texts import install_command

KEYS = ("WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD")
"""Variables of the environment whose values are secret."""
REQUEST_S = 20.0
"""Longest wait for an answer of MLflow's server."""
STUCK_S, FINISH_S = 120, 60
MAX_PARAMS, MAX_PARAM = 100, 500
"""How many parameters a request to MLflow may hold, and the length of a value."""


class Point(NamedTuple):
    """The values of one step. ``wall``: Unix seconds at which the seed recorded it."""

    step: int
    wall: float
    values: dict[str, float]


class TrackedRun(NamedTuple):
    """A job as trackers see it, with its profile, and the directory for its files."""

    id: str  # the job's; with a number behind it after the job went back to an earlier step
    job: str
    name: str
    tags: dict[str, str]
    config: dict[str, dict[str, Any]]
    after_step: int  # the last step that is written already: what a tracker has beyond it is void
    directory: Path
    wall: float  # Unix seconds at which it begins, or goes on


def check(name: str, profile: Profile, environ: Mapping[str, str]) -> None:
    """Raise ``Refused`` if the seed's machine lacks what a tracker needs."""
    track, lacks, remedy = profile.track, "", "set it and start the seed again"
    if name not in WRITERS and f"trackers:{name}" not in plugins.installed():
        lacks, remedy = "it", f"run on the seed's machine: pip install {profile.plugins.package_of(name)}"
    elif name in ("wandb", "tensorboard") and find_spec(name) is None:
        lacks, remedy = f"the package {name}", f"run on the seed's machine: {install_command(name)}"
    elif name == "wandb" and not track.offline and not environ.get("WANDB_API_KEY"):
        lacks, remedy = "WANDB_API_KEY in its environment", f"{remedy}, or set track.offline = true"
    elif name == "mlflow" and not re.fullmatch(r"https?://[^@/\s]+(/[^@\s]*)?", environ.get("MLFLOW_TRACKING_URI", "")):
        lacks = "MLFLOW_TRACKING_URI in its environment: an address such as http://127.0.0.1:5000, without a password"
    if lacks:
        text = f"track.to = {name!r}: the seed lacks {lacks}"
        raise Refused("bad-spec", text, remedy=f"{remedy}, or leave {name!r} out of track.to")


class Writer:
    """Writes one job to one place."""

    def __init__(self, track: Track, environ: Mapping[str, str]) -> None:
        self._track, self._environ = track, environ

    def begin(self, run: TrackedRun) -> None:
        run.directory.mkdir(parents=True, exist_ok=True)
        metadata = {"job": run.job, "name": run.name, **run.tags, "config": run.config}
        (run.directory / "job.json").write_text(json.dumps(metadata, indent=1) + "\n", encoding="utf-8")

    def write(self, points: Sequence[Point]) -> None:
        """When it returns, the points are on the disk, or with the other program."""

    def end(self, state: str) -> None:
        """``state``: of a job that has ended; empty: the writer failed, or the seed goes on with the run later."""


class JsonLines(Writer):
    """``metrics.jsonl``: a line for each step."""

    _file: BinaryIO

    def begin(self, run: TrackedRun) -> None:
        super().begin(run)
        file = self._file = (run.directory / "metrics.jsonl").open("ab+")
        file.seek(0)
        kept_bytes = 0
        for line in file:
            if not line.endswith(b"\n") or int(line.split(b",", 1)[0].split()[1]) > run.after_step:  # {"step": 7, ...
                break
            kept_bytes += len(line)
        file.truncate(kept_bytes)

    def write(self, points: Sequence[Point]) -> None:
        lines = (json.dumps({"step": point.step, "wall": point.wall, **point.values}) + "\n" for point in points)
        self._file.write("".join(lines).encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def end(self, state: str) -> None:
        self._file.close()


class TensorBoard(Writer):
    """Event files, in TensorBoard's own format: one from each ``begin`` on. Its own writer shows tracebacks."""

    _file: BinaryIO

    def begin(self, run: TrackedRun) -> None:
        super().begin(run)
        self._file = (run.directory / f"events.out.tfevents.{run.wall:.6f}.p2ptrain").open("wb")
        self._add(wall_time=run.wall, file_version="brain.Event:2")
        # TensorBoard forgets what an earlier file has from this step on.
        self._add(step=run.after_step + 1, session_log={"status": "START"})

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            values = [{"tag": name, "simple_value": value} for name, value in point.values.items()]
            self._add(step=point.step, wall_time=point.wall, summary={"value": values})
        self._file.flush()

    def end(self, state: str) -> None:
        self._file.close()

    def _add(self, **event: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        RecordWriter(self._file).write(Event(**event).SerializeToString())


class MlFlow(Writer):
    """A tracking server, by its REST API (mlflow.org/docs/latest/rest-api.html), so MLflow itself is not needed."""

    _run: str

    def begin(self, run: TrackedRun) -> None:
        name, tags = self._track.project, {"p2ptrain.run": run.id, "p2ptrain.job": run.job, **run.tags}
        known = self._ask("experiments/search", filter=f"name = '{name}'", max_results=1).get("experiments")
        experiment = (known[0] if known else self._ask("experiments/create", name=name))["experiment_id"]
        wanted = f"tags.`p2ptrain.run` = '{run.id}'"
        if found := self._ask("runs/search", experiment_ids=[experiment], filter=wanted, max_results=1).get("runs"):
            self._run = found[0]["info"]["run_id"]
            self._ask("runs/update", run_id=self._run, status="RUNNING")
            return
        made = self._ask("runs/create", experiment_id=experiment, run_name=run.name, tags=_pairs(tags))
        self._run = made["run"]["info"]["run_id"]
        config = {f"{table}.{key}": value for table, fields in run.config.items() for key, value in fields.items()}
        for start in range(0, len(config), MAX_PARAMS):
            self._ask("runs/log-batch", run_id=self._run, params=_pairs(config)[start : start + MAX_PARAMS])

    def write(self, points: Sequence[Point]) -> None:
        metrics = [
            {"key": name, "value": value, "timestamp": round(point.wall * 1e3), "step": point.step}
            for point in points
            for name, value in point.values.items()
        ]
        self._ask("runs/log-batch", run_id=self._run, metrics=metrics)

    def end(self, state: str) -> None:
        if status := {"done": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}.get(state):
            self._ask("runs/update", run_id=self._run, status=status)

    def _ask(self, method: str, **body: Any) -> Any:
        import httpx2

        uri, token, user, password = (
            self._environ.get(f"MLFLOW_TRACKING_{name}", "") for name in ("URI", "TOKEN", "USERNAME", "PASSWORD")
        )
        address, headers = f"{uri.rstrip('/')}/api/2.0/mlflow/{method}", {"Authorization": f"Bearer {token}"}
        known = {"headers": headers} if token else {"auth": (user, password)} if user else dict[str, Any]()
        try:
            return httpx2.post(address, json=body, timeout=REQUEST_S, **known).raise_for_status().json()
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
            text = f"MLflow's server does not do {method}: {str(error).partition(chr(10))[0]}"
            raise P2PTrainError(text, remedy="check MLFLOW_TRACKING_URI and its credentials") from error


def _pairs(values: Mapping[str, Any]) -> list[dict[str, str]]:
    return [{"key": key, "value": str(value)[:MAX_PARAM]} for key, value in values.items()]


class WandB(Writer):
    """Weights & Biases, in a process of its own (``run_wandb``): its threads, its output and the time
    that it takes to load, to upload or to give up do not concern the seed. The process gets the seed's environment."""

    _process: Any
    _log: Path

    def begin(self, run: TrackedRun) -> None:
        super().begin(run)
        self._log = run.directory / "wandb.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "roles.track.writers"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # it survives Ctrl+C, to finish
                env=dict(self._environ),
            )
        mode, tags = "offline" if self._track.offline else "online", list(run.tags.values())
        place = {"project": self._track.project, "mode": mode, "dir": str(run.directory)}
        self._tell({**place, "id": run.id, "name": run.name, "group": run.job, "tags": tags, "config": run.config})

    def write(self, points: Sequence[Point]) -> None:
        self._tell(points)

    def end(self, state: str) -> None:
        """Do not wait: the process uploads what is left, and ends, even after the seed."""
        if state == "done":
            self._tell([])
        self._process.stdout.close()
        with suppress(BrokenPipeError):  # it has died, and not read all
            self._process.stdin.close()

    def _tell(self, message: Any) -> None:
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        if (answer := self._process.stdout.readline().decode()) != "\n":
            raise P2PTrainError(answer.strip() or "its process ended", remedy=f"see {self._log}")


WRITERS: dict[str, Callable[[Track, Mapping[str, str]], Writer]] = {
    "jsonl": JsonLines, "tensorboard": TensorBoard, "mlflow": MlFlow, "wandb": WandB,
}  # fmt: skip


def run_wandb() -> None:
    """The process that speaks with W&B for one job.

    It reads lines of JSON: the arguments of ``wandb.init``, then lists of [step, wall, values]; an empty one says that
    the job is done. It answers each with a line: the problem, if there is one. At the end of its input it finishes the
    run. It dies if it waits for W&B for longer than ``STUCK_S``.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what wandb prints goes to the log
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    run: Any = None
    exit_code = 1
    for line in sys.stdin:
        faulthandler.dump_traceback_later(STUCK_S, exit=True)
        problem, message = "", json.loads(line)
        try:
            if run is None:
                run = _init_wandb(message)
            else:
                exit_code = 1 if message else 0
                for step, wall, values in message:
                    run.log({**values, "_timestamp": wall}, step=step)
        except Exception as error:  # noqa: BLE001 - told to the seed
            problem = " ".join(f"{type(error).__name__}: {error}".split())
        faulthandler.cancel_dump_traceback_later()
        with suppress(OSError):  # the seed may be gone
            print(problem, file=answers, flush=True)
    faulthandler.dump_traceback_later(FINISH_S + 5, exit=True)
    if run is not None:
        run.finish(exit_code=exit_code)


def _init_wandb(wanted: dict[str, Any]) -> Any:
    import wandb

    quiet = wandb.Settings(
        console="off", silent=True, init_timeout=45, finish_timeout=FINISH_S, disable_git=True, save_code=False,
        x_disable_stats=True, x_disable_machine_info=True, x_save_requirements=False,
    )  # fmt: skip
    return wandb.init(**wanted, resume="allow", settings=quiet)


if __name__ == "__main__":
    run_wandb()
