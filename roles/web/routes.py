"""The endpoints of the HTTP API: they read the records of the seed, and send it the requests of operators."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import segno
from pydantic import Field

from configs.loader import describe, load_settings, shipped
from configs.schema import Profile
from p2ptrain.core.errors import ConfigError, Refused
from roles.http.answers import Problem
from roles.web.endpoints import MOST_ITEMS, AfterStep, Call, Endpoint, Fields, Handle, Limit, Page, Paging
from wire.address import join_command
from wire.messages import GpuInfo, RefusalCode
from wire.records import (
    ABSENT_STATES,
    CheckpointInfo,
    ClusterInfo,
    EventInfo,
    JobInfo,
    MetricRow,
    PeerInfo,
    RecoveryInfo,
    ServingInfo,
    TicketInfo,
)
from wire.schema import Record

R = TypeVar("R", bound=Record)


def _page(call: Call, records: Sequence[R], order: Callable[[R], Any]) -> Page:
    """The part of a list that is asked for. The id of its last record names the next part."""
    ordered, query = sorted(records, key=order), call.query
    ids = ["", *(getattr(record, "id", "") for record in ordered)]
    if query.after not in ids:
        text = "what `after` names is not in the list any more"
        raise Problem(409, text, code="stale_cursor", param="after", remedy="begin again without it")
    begin = ids.index(query.after)
    end = begin + query.limit
    return Page(ordered[begin:end], ids[end] if end < len(ordered) else None)


# ---------------------------------------------------------------------------------------------------------------- jobs


class JobRequest(Fields):
    profile: str | dict[str, Any] = Field(
        default="tiny",
        description='Name of a profile that ships, or settings: {"base": "tiny", "optimizer": {"lr": 0.001}}.',
    )
    set: dict[str, Any] = Field(default_factory=dict, description='Settings that override: {"job.steps": 100}.')
    name: str = Field(default="", max_length=64, description="Name of the job; empty: that of the profile.")
    drafter: bool = Field(default=False, description="Create the job of the profile's [drafter].")


class Removal(Fields):
    forget: bool = Field(default=False, description="Remove the record of a job that is over.")


async def list_jobs(call: Call) -> Page:
    return _page(call, call.overview.job_infos(), lambda job: (job.created_at, job.id))


async def create_job(call: Call) -> JobInfo:
    asked: JobRequest = call.body
    label = asked.profile if isinstance(asked.profile, str) else str(asked.profile.get("base") or "settings")
    profile = await asyncio.to_thread(load_settings, asked.profile, asked.set)
    name = asked.name or label
    if asked.drafter:
        if not profile.drafter.layers:
            raise ConfigError(f"the profile {label} has no drafter", remedy="set drafter.layers, or choose pair")
        profile, name = profile.of_drafter(), asked.name or f"{label}-drafter"
    job = await call.create_job(call.client, name, label[:64], profile)
    return (await call.client.job(job))[0]


async def get_job(call: Call) -> JobInfo:
    return (await call.client.job(call.path["job"]))[0]


async def delete_job(call: Call) -> JobInfo:
    info = await get_job(call)
    await call.client.tell_job(info.id, "forget" if call.query.forget else "cancel")
    return info if call.query.forget else (await call.client.job(info.id))[0]


class Settings(Record):
    """All settings of a job, by table. ``profile``: the profile that they come from."""

    profile: str
    settings: dict[str, dict[str, Any]]


async def get_settings(call: Call) -> Settings:
    info, spec = await call.client.job(call.path["job"])
    return Settings(info.profile, Profile.from_spec_untrusted(spec).model_dump(mode="json"))


def tell_job(verb: str, *already: str) -> Handle:
    """A handler that tells a job. A request that is repeated finds it in one of the states ``already``, and does
    nothing."""

    async def handle(call: Call) -> JobInfo:
        info = await get_job(call)
        if info.state in already:
            return info
        await call.client.tell_job(info.id, verb)
        return (await call.client.job(info.id))[0]

    handle.__name__ = f"{verb}_job"
    return handle


async def list_recoveries(call: Call) -> Page:
    return Page(await call.client.recoveries(call.path["job"], call.query.limit))


# ------------------------------------------------------------------------------------------------------------- cluster


class NodeRequest(Fields):
    role: Literal["worker", "verifier", "drafter", "operator"] = "worker"
    expires_s: float = Field(default=7 * 86_400.0, ge=60, le=366 * 86_400, description="How long its ticket is valid.")
    uses: int | None = Field(default=None, ge=1, le=1_000_000, description="Peers that may use it; null: any number.")
    host: str = Field(default="", max_length=255, description="The seed's address for that machine; empty: the usual.")


class Invitation(Record):
    """How a machine joins. ``ticket`` and ``text``, a secret, are null on a plain loopback, where none is needed."""

    command: str
    ticket: TicketInfo | None = None
    text: str | None = None


class WatchLink(Record):
    """A link that opens the page with the key to read, and its QR code: rows of modules, 1 is a dark one."""

    link: str
    rows: list[str]


async def get_watch_link(call: Call) -> WatchLink:
    link = await call.client.watch_link()
    return WatchLink(link, ["".join(map(str, row)) for row in segno.make_qr(link).matrix])


class Removed(Record):
    """What was removed. ``name``: of a node."""

    id: str
    name: str = ""


async def list_nodes(call: Call) -> Page:
    return _page(call, call.overview.peer_infos(), lambda peer: (peer.joined_at, peer.id))


async def invite_node(call: Call) -> Invitation:
    asked: NodeRequest = call.body
    ticket: TicketInfo | None = None
    try:
        ticket, where = await call.client.new_ticket(asked.role, asked.expires_s, asked.uses, asked.host)
    except Refused as refusal:
        if refusal.code != RefusalCode.NOT_ENCRYPTED:
            raise
        where = call.overview.cluster_info().address
    return Invitation(join_command(where, asked.role), ticket, where if ticket else None)


async def evict_node(call: Call) -> Removed:
    return Removed(*await call.client.evict(call.path["node"]))


class GpuStatus(GpuInfo):
    """One GPU of one node. Nodes of the same machine report the same GPUs."""

    node: str = ""
    node_name: str = ""


async def list_gpus(call: Call) -> Page:
    peers = sorted(call.overview.peer_infos(), key=lambda peer: (peer.joined_at, peer.id))
    return Page([GpuStatus(**gpu.to_map(), node=peer.id, node_name=peer.name) for peer in peers for gpu in peer.gpus])


class ClusterSummary(Record):
    """The whole cluster in figures. ``peers`` and ``jobs`` are counted by state; ``tokens_per_s`` is of all jobs.

    ``memory_bytes``, ``in_bps``, ``out_bps``: of all peers that are there. ``gpu_load``: the mean; null without a GPU.
    """

    cluster: ClusterInfo
    peers: dict[str, int]
    jobs: dict[str, int]
    tokens_per_s: float
    in_bps: float
    out_bps: float
    memory_bytes: int
    gpus: int
    gpu_load: float | None
    sessions: int


async def summarise_cluster(call: Call) -> ClusterSummary:
    peers, jobs = call.overview.peer_infos(), call.overview.job_infos()
    there = [peer for peer in peers if peer.state not in ABSENT_STATES]
    gpus = [gpu for peer in there for gpu in peer.gpus]
    loads = [gpu.load for gpu in gpus if gpu.load is not None]
    return ClusterSummary(
        call.overview.cluster_info(),
        dict(Counter(peer.state for peer in peers)),
        dict(Counter(job.state for job in jobs)),
        math.fsum(job.tokens_per_s or 0.0 for job in jobs if job.state == "running"),
        math.fsum(peer.in_bps for peer in there),
        math.fsum(peer.out_bps for peer in there),
        sum(peer.memory_bytes for peer in there),
        len(gpus),
        math.fsum(loads) / len(loads) if loads else None,
        sum(peer.sessions for peer in there),
    )


class EventPaging(Limit):
    after_id: int | None = Field(default=None, ge=0, le=2**53, description="Events after it; none: the newest ones.")


async def list_events(call: Call) -> Page:
    after, limit = call.query.after_id, call.query.limit
    events = await call.client.events(-limit if after is None else after, limit)
    return Page(events, events[-1].id if events else after)


async def list_serving(call: Call) -> Page:
    return _page(call, call.overview.serving_infos(), lambda item: item.id)


# ------------------------------------------------------------------------------------------------ metrics, checkpoints


class MetricPaging(AfterStep):
    limit: int = Field(default=MOST_ITEMS, ge=1, le=MOST_ITEMS, description="Longest list in an answer.")


async def list_metrics(call: Call) -> Page:
    rows = await call.client.metrics(call.path["job"], call.query.after_step, call.query.limit)
    return Page(rows, rows[-1].step if len(rows) == call.query.limit else None)


async def list_checkpoints(call: Call) -> Page:
    job = (await get_job(call)).id
    found = [item for item in call.overview.checkpoint_infos() if item.job == job]
    return _page(call, found, lambda item: (item.created_at, item.id))


async def delete_checkpoint(call: Call) -> Removed:
    ident = call.path["checkpoint"]
    await call.client.delete_checkpoint(ident)
    return Removed(ident)


class Restoring(Fields):
    shards: int = Field(
        default=0, ge=0, le=64, description="Hold the model in so many shards from now on; 0: as before."
    )


async def restore_checkpoint(call: Call) -> JobInfo:
    job = await call.client.restore(call.path["checkpoint"], call.body.shards)
    return (await call.client.job(job))[0]


class ProfileInfo(Record):
    """A profile that ships, and its purpose."""

    name: str
    about: str


async def list_profiles(call: Call) -> Page:
    return Page([ProfileInfo(name, describe(path)) for name, path in shipped().items()])


_GOING = ("queued", "waiting", "forming", "running", "saving")
_JOB, _CHECKPOINT = "training/jobs/{job}", "checkpoints/{checkpoint}"
_CREATES = "Create a job. It starts when enough workers are ready."
_CANCELS = (
    "Cancel a job; its checkpoints stay.\n\nOf a job that is over it is refused, so the request may be repeated. With "
    "`forget` the record and the metrics of a job that is over are removed."
)
_INVITES = "Make a ticket, a secret, for a machine, and the command with which it joins."
_RESTORES = "Return a job to a checkpoint, which its worker first verifies (up to a minute)."
_METRICS = "The rows of a job's steps. `next` is the `after_step` of the following ones."
_EVENTS = "The event log. `next` is the `after_id` of later ones."


def _list(path: str, about: str, item: type[Record], handle: Handle, query: type[Fields] = Paging) -> Endpoint:
    return Endpoint("GET", path, about, item, handle, listed=True, query=query)


ENDPOINTS: list[Endpoint] = [
    _list("training/profiles", "The profiles that ship.", ProfileInfo, list_profiles, Fields),
    _list("training/jobs", "All jobs, oldest first.", JobInfo, list_jobs),
    Endpoint("POST", "training/jobs", _CREATES, JobInfo, create_job, body=JobRequest, status=201),
    Endpoint("GET", _JOB, "One job.", JobInfo, get_job),
    Endpoint("DELETE", _JOB, _CANCELS, JobInfo, delete_job, query=Removal),
    Endpoint("GET", f"{_JOB}/settings", "All settings of a job.", Settings, get_settings),
    Endpoint("PUT", f"{_JOB}/pause", "Stop a job at the next step.", JobInfo, tell_job("pause", "paused")),
    Endpoint("PUT", f"{_JOB}/resume", "Let a paused job go on.", JobInfo, tell_job("resume", *_GOING)),
    Endpoint("PUT", f"{_JOB}/save", "Write a checkpoint after the step that runs now.", JobInfo, tell_job("save")),
    _list(f"{_JOB}/recoveries", "The newest interruptions, oldest first.", RecoveryInfo, list_recoveries, Limit),
    _list("cluster/nodes", "All peers.", PeerInfo, list_nodes),
    Endpoint("POST", "cluster/nodes", _INVITES, Invitation, invite_node, body=NodeRequest, status=201),
    Endpoint(
        "GET", "cluster/watch-link", "The link for a phone, a secret, and its QR code.", WatchLink, get_watch_link
    ),
    Endpoint("DELETE", "cluster/nodes/{node}", "Evict a peer for good.", Removed, evict_node),
    _list("cluster/gpu-status", "Every GPU of every node, as it was a second ago.", GpuStatus, list_gpus, Fields),
    Endpoint("GET", "metrics/cluster/summary", "The cluster in figures.", ClusterSummary, summarise_cluster),
    _list("metrics/jobs/{job}", _METRICS, MetricRow, list_metrics, MetricPaging),
    _list("events", _EVENTS, EventInfo, list_events, EventPaging),
    _list("serving", "What verifiers and drafters serve.", ServingInfo, list_serving),
    _list("checkpoints/jobs/{job}", "The checkpoints of a job, oldest first.", CheckpointInfo, list_checkpoints),
    Endpoint("DELETE", _CHECKPOINT, "Delete a checkpoint.", Removed, delete_checkpoint),
    Endpoint("POST", f"{_CHECKPOINT}/restore", _RESTORES, JobInfo, restore_checkpoint, body=Restoring),
]
"""The endpoints of every seed."""
