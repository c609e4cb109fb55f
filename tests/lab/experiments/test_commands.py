"""The processes that an experiment starts on this machine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2ptrain.cluster.local_cluster import LocalCluster
from p2ptrain.core.errors import JobFailed
from p2ptrain.lab.experiments.executors import LocalWorkers
from p2ptrain.lab.experiments.grid import plan_of
from p2ptrain.lab.experiments.results import Result


class Recorded(LocalCluster):
    """Only records what it is told to start. ``fails``: how the next run ends."""

    made: list[Recorded]
    fails: Exception | None = None

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._seed: Any = SimpleNamespace(process=SimpleNamespace(returncode=None))
        self.made.append(self)

    async def start_seed(self) -> Any:
        """Nothing to wait for."""

    async def start_peer(self, name: str, slot: int, *options: str, target: str = "") -> Any:
        self.peers[name] = list(options)

    async def wait_until_joined(self, names: list[str]) -> None:
        assert names == list(self.peers)

    async def end(self) -> None:
        """Nothing runs."""

    @classmethod
    async def while_alive(cls, work: Any, *, needed: list[Any]) -> Result:
        work.close()
        assert needed == [cls.made[-1].seed, *cls.made[-1].peers.values()]
        if cls.fails is not None:
            raise cls.fails
        return Result("done")


async def test_what_is_started_for_each_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2ptrain.lab.experiments.executors.LocalCluster", Recorded)
    Recorded.made, Recorded.fails = [], None
    fixed = {"job": {"workers": 2}, "device.threads": 1}
    own = {"data.private": True, "job.strategy": "federated"}
    kinds = {
        "a": {"straggler": 4, "link.preset": "wan"},
        "b": {"attack": "noise"},
        "c": own,
        "d": {},
        "e": {"job.steps": 7},
    }
    made = plan_of({"name": "x", "set": fixed, "axes": {"kind": kinds}}, "grid", None)
    workers, runs = LocalWorkers(made, tmp_path), {run.cell["kind"]: run for run in made.runs}
    for kind in "abcde":
        assert (await workers(runs[kind], lambda text: None)).state == "done"
    threads = ["--threads", "1"]
    assert [[*cluster.peers.values()] for cluster in Recorded.made] == [
        [[*threads, "--link", "wan"], [*threads, "--link", "wan", "--straggler", "4"]],
        [threads, [*threads, "--attack", "noise"]],
        [[*threads, "--data", "stdlib/asyncio"], [*threads, "--data", "stdlib/email"]],
        [threads, threads],  # of d and e
    ]
    Recorded.fails = JobFailed("worker-1 ended: it was killed by SIGKILL", remedy="look")
    assert (await workers(runs["e"], lambda text: None)).state == "out-of-memory"
    assert (await workers(runs["e"], lambda text: None)).state == "out-of-memory"
    assert len(Recorded.made) == 5  # what is left of a run that is not done is not used again
    Recorded.fails = None
    assert (await workers(runs["e"], lambda text: None)).state == "done"
    Recorded.fails, Recorded.made[-1].seed.process.returncode = JobFailed("seed ended"), -9
    with pytest.raises(JobFailed, match="seed ended"):  # no result
        await workers(runs["e"], lambda text: None)
