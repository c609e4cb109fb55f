"""The page for Prometheus, read by Prometheus' own parser, and the dashboard over it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from roles.web.prometheus import MAX_JOBS, MAX_LABEL, MAX_PEERS, exposition
from wire.records import ClusterInfo, JobInfo, PeerInfo, ServingInfo

CLUSTER = ClusterInfo("c1", "seed", "1.0", "127.0.0.1:7337", 1e9, 2, 1)
DASHBOARD = Path(__file__).parents[3] / "docs" / "grafana.json"


def _job(number: int = 1, state: str = "running", name: str = "tiny") -> JobInfo:
    return JobInfo(
        f"j{number}", name, "tiny", "sync", state, float(number), 100, step=5, loss=2.5, step_ms=120.0,
        members=["a", "b"], tokens_total=4096, grad_norm=float("nan"),
    )  # fmt: skip


def _peer(number: int = 1, name: str = "one") -> PeerInfo:
    return PeerInfo(f"p{number}", name, ["worker"], "cpu", "training", "h:1", 1e9, out_bps=8e6, sent_bytes=77)


SERVING = ServingInfo(
    id="v/m",
    peer="v",
    name="v",
    role="verifier",
    host="h",
    port=1,
    model="m",
    stats={"alpha": 0.5, "token_ms": 20.0, "first_ms": 50.0, "preemptions": 3.0},
)


def _read(jobs: list[JobInfo], peers: list[PeerInfo], serving: list[ServingInfo]) -> dict[str, Metric]:
    text = exposition(CLUSTER, jobs, peers, serving).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_values_are_in_base_units_and_unknown_ones_left_out() -> None:
    found = _read([_job()], [_peer()], [SERVING])
    one = {family: metric.samples[0] for family, metric in found.items() if metric.samples}
    assert one["p2ptrain_job_train_loss"].labels == {"job": "j1", "name": "tiny"}
    values = {name: sample.value for name, sample in one.items()}
    assert values["p2ptrain_job_train_loss"] == 2.5
    assert values["p2ptrain_job_step_seconds"] == 0.12
    assert values["p2ptrain_peer_send_bytes_per_second"] == 1e6
    assert values["p2ptrain_serving_token_seconds"] == 0.02
    assert values["p2ptrain_serving_first_token_seconds"] == 0.05
    assert values["p2ptrain_serving_preemptions"] == 3
    assert one["p2ptrain_serving_token_seconds"].labels == {"peer": "v", "name": "v", "model": "m"}
    assert one["p2ptrain_job_state"].labels["state"] == "running"
    assert found["p2ptrain_peer_sent_bytes"].type == "counter"
    assert not found["p2ptrain_job_validation_loss"].samples, "unknown"
    assert not found["p2ptrain_job_gradient_norm"].samples, "not finite"
    assert all(metric.documentation for metric in found.values())


def test_there_are_at_most_so_many_series_and_a_label_is_no_longer_than_that() -> None:
    awkward = 'a "quoted" \\ name\n' * 20
    jobs = [_job(1, name=awkward), *(_job(number, "done") for number in range(2, 4 * MAX_JOBS))]
    found = _read(jobs, [_peer(number, awkward) for number in range(2 * MAX_PEERS)], [])
    shown = {sample.labels["job"] for sample in found["p2ptrain_job_step"].samples}
    assert len(shown) == MAX_JOBS
    assert "j1" in shown, "the oldest, but it runs"
    peers = found["p2ptrain_peer_info"].samples
    assert len(peers) == MAX_PEERS
    assert peers[0].labels["name"] == awkward[:MAX_LABEL]


def test_each_query_of_the_dashboard_is_about_a_metric_that_there_is() -> None:
    lines = exposition(CLUSTER, [], [], []).decode().splitlines()
    known = {line.split()[2] for line in lines if line.startswith("# TYPE ")}
    text = DASHBOARD.read_text()
    panels = [panel for panel in json.loads(text)["panels"] if panel["type"] != "row"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(queries) >= len(panels) > 10
    assert {name for query in queries for name in re.findall(r"p2ptrain_\w+", query)} <= known
    assert set(re.findall(r"\bp2ptrain_\w+", text)) <= known
