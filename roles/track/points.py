"""What trackers are told: a run, its points, and their names (docs/tracking.md has the table)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wire.records import JobInfo, MetricRow, PeerInfo, ServingInfo

MAX_NODES = 64
"""Members of a job with figures of their own: those with the lowest ranks."""
_NAMES = {"loss": "train/loss", "val_loss": "val/loss"}
_COLUMNS = [item.name for item in dataclasses.fields(MetricRow) if item.name not in ("job", "step", "wall")]


@dataclass(frozen=True, slots=True)
class Point:
    """The values of one step. ``wall``: Unix seconds at which the seed recorded it."""

    step: int
    wall: float
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class Run:
    """A job as trackers see it.

    Attributes:
        id: the job's; with a number behind it after the job went back to an earlier step.
        config: the profile, by table and name.
        after_step: the last step that is written already. What a tracker has beyond it is void.
        directory: for the job's files.
    """

    id: str
    job: str
    name: str
    tags: dict[str, str]
    config: dict[str, dict[str, Any]]
    after_step: int
    directory: Path


def values_of(row: MetricRow) -> dict[str, float]:
    return _known({_NAMES.get(name, name): getattr(row, name) for name in _COLUMNS})


def figures_of(job: JobInfo, peers: Sequence[PeerInfo], serving: Sequence[ServingInfo]) -> dict[str, float]:
    """The present figures that belong to no step: of the job's members, and of the first verifier."""
    found: dict[str, float | None] = {}
    members = [peer for peer in peers if peer.id in job.members[:MAX_NODES]]
    for peer in members:
        found[f"node/{peer.id}/memory"] = peer.memory_bytes or None
        found[f"node/{peer.id}/staleness"] = peer.staleness if peer.accepted else None
    if accepted := sum(peer.accepted for peer in members):
        found["staleness"] = sum(peer.staleness * peer.accepted for peer in members) / accepted
    for score in job.scores[:MAX_NODES]:
        found |= {f"node/{score.peer}/distance": score.distance, f"node/{score.peer}/excluded": score.excluded}
    stats = next((info.stats for info in serving if info.role == "verifier"), {})
    found["infer/latency_ms_per_token"] = stats.get("token_ms")
    if "alpha" in stats and "token_ms" in stats:
        found |= {"spec/alpha": stats["alpha"], "spec/s_per_token": stats["token_ms"] / 1e3}
    return _known(found)


def _known(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}
