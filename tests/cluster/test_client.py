"""The clients of programs, with a seed of the test on a real port."""

from __future__ import annotations

import _thread
import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from p2ptrain.cluster.client import AsyncClient, Client, TextSettings
from p2ptrain.cluster.local_cluster import LocalCluster
from p2ptrain.cluster.loops import ServiceThread
from p2ptrain.cluster.viewing import new_app
from p2ptrain.core.errors import ConfigError, DeadlineExceeded, Refused, UserError
from tests.fake_seed import FakeSeed
from wire.connection import Connection
from wire.messages import Request, Update
from wire.records import ClusterInfo, JobInfo, MetricRow
from wire.transport import TcpNetwork

JOB = JobInfo("j1", "tiny", "tiny", "sync", "running", 0.0, 9, step=2)


class MetricsSeed(FakeSeed):
    """It has a job with two steps. If ``ends``, it reports two more to a viewer, and the end."""

    ends = True
    address = ""

    def __init__(self) -> None:
        super().__init__()
        self.rows = [MetricRow("j1", step, 0.0, loss=5.0 - step) for step in (1, 2)]

    def answer_for(self, request: Request) -> dict[str, Any] | Refused:
        match request.method:
            case "jobs.show" if request.params["job"] in ("j1", "tiny"):
                return {"job": JOB.to_map(), "spec": "{}"}
            case "metrics.history":
                return {"rows": [row.to_map() for row in self.rows if row.step > request.params["after_step"]]}
            case "jobs.create" | "jobs.pause" | "checkpoints.restore":
                return {"job": "j1"}
            case "cluster.info":
                return {"cluster": ClusterInfo("c1", "fake", "0.1.0", "198.51.100.7:7337", 0.0, 0, 0).to_map()}
            case "subscribe":
                return {}
        return super().answer_for(request)

    def subscribed(self, connection: Connection) -> None:
        if self.ends:
            self.rows[2:] = [MetricRow("j1", step, 0.0) for step in (3, 4)]
            connection.send(Update("metrics", [self.rows[-2].to_map(), self.rows[-1].to_map()]))
            connection.send(Update("jobs", [replace(JOB, state="done", step=4).to_map()]))


@pytest.fixture
def seed() -> Iterator[MetricsSeed]:
    thread, seed = ServiceThread("fake seed"), MetricsSeed()
    seed.address = "{}:{}".format(*thread.call(seed.start(TcpNetwork(), "127.0.0.1", 0)))
    yield seed
    thread.call(seed.stop())
    thread.close()


async def test_client_blocks_where_an_event_loop_runs_and_finds_the_seed_as_commands_do(
    seed: MetricsSeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("P2PTRAIN_SEED", seed.address)
    with Client() as client:
        assert client.job("tiny") == JOB
        client.pause("j1")
        assert client.restore("j1@2@a") == "j1"
        assert [row.step for row in client.metrics("tiny")] == [1, 2]
        assert client.metrics_frame("tiny").loss.to_dict() == {1: 4.0, 2: 3.0}
        with pytest.raises(Refused, match=r"no answer for jobs\.show"):
            client.job("other")
    assert ("jobs.pause", {"job": "j1"}) in seed.asked


def test_each_step_comes_once_until_the_job_ends(seed: MetricsSeed) -> None:
    with Client(seed.address) as client:
        assert [row.step for row in client.follow_metrics("tiny")] == [1, 2, 3, 4]
        assert client.wait("tiny").state == "done"
        steps = client.follow_metrics("tiny")
        assert next(steps).step == 1
        steps.close()
        assert client.job("tiny") == JOB


async def test_waiting_ends_in_time(seed: MetricsSeed) -> None:
    seed.ends = False
    async with AsyncClient(seed.address) as client:
        with pytest.raises(DeadlineExceeded, match=r"job tiny has not ended after 0\.05 s"):
            await client.wait("tiny", 0.05)
    with pytest.raises(UserError, match="not connected"):
        await client.jobs()
    with pytest.raises(UserError, match="max_tokens is no setting of a text"):
        await client.generate("x", **cast(TextSettings, {"max_tokens": 5}))


def test_job_has_the_settings_of_a_profile_a_file_or_a_table(seed: MetricsSeed, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('base = "tiny"\njob.steps = 7\n')
    with Client(seed.address) as client:
        client.create_job("tiny", {"job.steps": 7})
        client.create_job(file)
        client.create_job({"base": "tiny", "job": {"steps": 5}}, {"job.steps": 7}, name="other")
        with pytest.raises(ConfigError, match=r"unknown key job\.step"):
            client.create_job("tiny", {"job.step": 7})
    asked = [params for method, params in seed.asked if method == "jobs.create"]
    assert [(each["name"], each["profile"]) for each in asked] == [("tiny",) * 2, ("mine",) * 2, ("other", "custom")]
    assert [json.loads(each["spec"])["job"]["steps"] for each in asked] == [7, 7, 7]


async def test_viewer_creates_a_job_from_a_typed_line(seed: MetricsSeed, tmp_path: Path) -> None:
    (file := tmp_path / "my own.toml").write_text('base = "tiny"\n')
    actions = new_app(seed.address).source.actions
    assert actions.profiles()["tiny"].startswith("tiny   ")
    await actions.create_job("tiny", "ti job.steps=7")
    await actions.create_job("", f"{file} job.steps=7 data.text_key='two words'")
    with pytest.raises(ConfigError, match=r"unknown key job\.step"):
        await actions.create_job("tiny", "job.step=7")
    with pytest.raises(ConfigError, match="No closing quotation"):
        await actions.create_job("tiny", "data.text_key='two words")
    asked = [params for method, params in seed.asked if method == "jobs.create"]
    assert [each["name"] for each in asked] == ["tiny", "my own"]
    assert [json.loads(each["spec"])["job"]["steps"] for each in asked] == [7, 7]
    assert json.loads(asked[1]["spec"])["data"]["text_key"] == "two words"


def test_cluster_is_ended_after_ctrl_c_during_its_start(tmp_path: Path) -> None:
    ended = list[str]()

    class InterruptedCluster(LocalCluster):
        async def start_seed(self) -> Any:
            _thread.interrupt_main()
            await asyncio.Event().wait()

        async def end(self) -> None:
            ended.append("all")

    with pytest.raises(KeyboardInterrupt), InterruptedCluster(tmp_path):
        pass
    assert ended == ["all"]
