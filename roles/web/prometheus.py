"""The cluster's state as a page for Prometheus: gauges and counters of jobs, peers and serving peers.

Every series belongs to the seed, to a job or to a peer, and there are at most so many of them (``MAX_JOBS``,
``MAX_PEERS``, ``MAX_SERVING``). Values are in seconds and bytes. Nothing is kept between two calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import TypeVar, cast

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from wire.records import FINISHED_STATES, ClusterInfo, JobInfo, PeerInfo, ServingInfo

CONTENT_TYPE = CONTENT_TYPE_LATEST
MAX_JOBS, MAX_PEERS, MAX_SERVING = 50, 256, 64
"""Of the jobs, those that have not ended come first, then the newest."""
MAX_LABEL = 256
"""Longest value of a label, in characters."""

R = TypeVar("R", JobInfo, PeerInfo, ServingInfo)
Value = Callable[[R], float | None]

JOBS: dict[str, tuple[str, Value[JobInfo]]] = {
    "step": ("Last committed step.", lambda job: job.step),
    "steps_planned": ("Steps of the whole job.", lambda job: job.steps_total),
    "members": ("Members of the ring.", lambda job: len(job.members)),
    "generation": ("Number of the view.", lambda job: job.generation),
    "train_loss": ("Training loss of the last step, in nats per token.", lambda job: job.loss),
    "validation_loss": ("Last validation loss, in nats per token.", lambda job: job.val_loss),
    "learning_rate": ("Learning rate of the last step.", lambda job: job.lr),
    "gradient_norm": ("L2 norm of the last step's gradient.", lambda job: job.grad_norm),
    "tokens_per_second": ("Tokens trained per second.", lambda job: job.tokens_per_s),
    "step_seconds": ("Duration of the last step.", lambda job: _seconds(job.step_ms)),
    "compute_seconds": ("Time of it that its first member computed.", lambda job: _seconds(job.compute_ms)),
    "communicate_seconds": ("Time that it communicated.", lambda job: _seconds(job.communicate_ms)),
    "wait_seconds": ("Time that it waited for members.", lambda job: _seconds(job.wait_ms)),
    "privacy_epsilon": ("Privacy spent by a private job.", lambda job: job.epsilon),
    "tokens_total": ("Tokens trained; falls if the job goes back.", lambda job: job.tokens_total),
    "trained_seconds_total": ("Duration of all committed steps.", lambda job: job.trained_s),
}
PEERS: dict[str, tuple[str, Value[PeerInfo]]] = {
    "heartbeat_age_seconds": ("Time since the seed heard of it.", lambda peer: peer.heartbeat_age_s),
    "round_trip_seconds": ("Round trip to the seed.", lambda peer: _seconds(peer.rtt_ms)),
    "memory_bytes": ("Memory of its process.", lambda peer: peer.memory_bytes or None),
    "memory_limit_bytes": ("Memory of its machine.", lambda peer: peer.memory_total_bytes or None),
    "gpu_load_ratio": ("Load of its GPU, from 0 to 1.", lambda peer: peer.gpu_load),
    "receive_bytes_per_second": ("Received over the ring.", lambda peer: peer.in_bps / 8),
    "send_bytes_per_second": ("Sent over the ring.", lambda peer: peer.out_bps / 8),
    "tokens_per_second": ("Tokens that it trains per second.", lambda peer: peer.tokens_per_s),
    "step": ("Last step that it applied.", lambda peer: peer.step),
    "micro_batches": ("Its micro-batches of the last step.", lambda peer: peer.share),
    "staleness_versions": ("Mean staleness of its gradients (server).", lambda peer: peer.staleness),
    "sent_bytes_total": ("Sent to members by its process.", lambda peer: peer.sent_bytes),
    "gradients_accepted_total": ("Gradients that were used (server).", lambda peer: peer.accepted),
    "gradients_refused_total": ("Gradients that were too old (server).", lambda peer: peer.refused),
}
SERVING: dict[str, tuple[str, Value[ServingInfo]]] = {
    "sessions": ("Open sessions.", lambda info: info.sessions),
    "waiting_texts": ("Texts that wait for a place.", lambda info: info.stats.get("waiting")),
    "tokens_per_second": ("Tokens written per second.", lambda info: info.stats.get("tokens_per_s")),
    "prompt_tokens_per_second": (
        "Tokens of prompts per second.",
        lambda info: info.stats.get("prompt_tokens_per_s"),
    ),
    "first_token_seconds": ("Median time to the first token.", lambda info: _seconds(info.stats.get("first_ms"))),
    "first_token_p95_seconds": (
        "Time to the first token of all but 5 % of texts.",
        lambda info: _seconds(info.stats.get("first_p95_ms")),
    ),
    "between_tokens_seconds": ("Median time between tokens.", lambda info: _seconds(info.stats.get("between_ms"))),
    "between_tokens_p95_seconds": (
        "Time between tokens, all but the longest 5 %.",
        lambda info: _seconds(info.stats.get("between_p95_ms")),
    ),
    "cached_prompt_ratio": ("Share of prompts' tokens found computed.", lambda info: info.stats.get("cached_share")),
    "preemptions_total": ("Texts that lost their memory to older ones.", lambda info: info.stats.get("preemptions")),
    "token_seconds": ("Time per token.", lambda info: _seconds(info.stats.get("token_ms"))),
    "acceptance_ratio": ("Share of drafts accepted.", lambda info: info.stats.get("alpha")),
    "accepted_length_tokens": ("Tokens per pass.", lambda info: info.stats.get("accepted_length")),
    "speed_up_ratio": ("Speed relative to no drafters.", lambda info: info.stats.get("speed_up")),
}


def exposition(
    cluster: ClusterInfo, jobs: Sequence[JobInfo], peers: Sequence[PeerInfo], serving: Sequence[ServingInfo]
) -> bytes:
    """The page's text. Values that are unknown are left out."""
    newest = sorted(jobs, key=lambda job: (job.state not in FINISHED_STATES, job.created_at), reverse=True)
    page = _page(cluster, newest[:MAX_JOBS], peers[:MAX_PEERS], serving[:MAX_SERVING])
    return generate_latest(cast(Collector, SimpleNamespace(collect=lambda: page)))


def _page(
    cluster: ClusterInfo, jobs: Sequence[JobInfo], peers: Sequence[PeerInfo], serving: Sequence[ServingInfo]
) -> Iterator[Metric]:
    yield _make_info_family(
        "p2ptrain_seed_info", "The seed.", [{"cluster": cluster.cluster_id, "version": cluster.version}]
    )
    yield GaugeMetricFamily("p2ptrain_seed_start_time_seconds", "When the seed started.", value=cluster.started_at)
    yield GaugeMetricFamily("p2ptrain_seed_peers", "Connected peers.", value=cluster.peers)
    yield GaugeMetricFamily("p2ptrain_seed_jobs", "Jobs, with those that have ended.", value=cluster.jobs)
    labels = [{"job": job.id, "name": job.name, "profile": job.profile, "strategy": job.strategy} for job in jobs]
    yield _make_info_family("p2ptrain_job_info", "A job.", labels)
    labels = [{"job": job.id, "name": job.name, "state": job.state} for job in jobs]
    yield _make_info_family("p2ptrain_job_state", "State of a job.", labels)
    yield from _families("job", JOBS, jobs)
    labels = [
        {"peer": peer.id, "name": peer.name, "role": ",".join(peer.roles), "device": peer.device} for peer in peers
    ]
    yield _make_info_family("p2ptrain_peer_info", "A peer.", labels)
    labels = [{"peer": peer.id, "name": peer.name, "state": peer.state} for peer in peers]
    yield _make_info_family("p2ptrain_peer_state", "State of a peer.", labels)
    yield from _families("peer", PEERS, peers)
    yield from _families("serving", SERVING, serving)


def _families(kind: str, table: dict[str, tuple[str, Value[R]]], records: Sequence[R]) -> Iterator[Metric]:
    labels = {"job": ("id", "name"), "peer": ("id", "name"), "serving": ("peer", "name", "model")}[kind]
    for name, (text, value_of) in table.items():
        made = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        family = made(f"p2ptrain_{kind}_{name}", text, labels=[kind if label == "id" else label for label in labels])
        for record in records:
            value = value_of(record)
            if value is not None and math.isfinite(value):
                family.add_metric([getattr(record, label)[:MAX_LABEL] for label in labels], value)
        yield family


def _make_info_family(name: str, text: str, labels: Sequence[dict[str, str]]) -> Metric:
    """A gauge of constant value 1, whose labels say something."""
    family = GaugeMetricFamily(name, text, labels=list(labels[0]) if labels else [])
    for values in labels:
        family.add_metric([value[:MAX_LABEL] for value in values.values()], 1.0)
    return family


def _seconds(value_ms: float | None) -> float | None:
    return None if value_ms is None else value_ms / 1e3
