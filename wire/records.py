"""What the seed tells about the cluster: records shared by its store, the command line and the TUI.

Every record is a frozen dataclass with ``to_map()`` (JSON-like, None for unknown) and ``from_map_untrusted(map)``
(``ProtocolError`` on anything ill-typed; unknown keys are ignored so that an older viewer can watch a newer seed).
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass
from typing import Any, Self

from p2ptrain.core.errors import ProtocolError

_Fields = dict[str, tuple[tuple[type, ...], bool]]
_known_fields: dict[type, _Fields] = {}


def _field_types(cls: type[Any]) -> _Fields:
    """Field name → (accepted types, required), from the annotations; found once per class."""
    if cls not in _known_fields:
        _known_fields[cls] = _read_annotations(cls)
    return _known_fields[cls]


def _read_annotations(cls: type[Any]) -> _Fields:
    hints = typing.get_type_hints(cls)
    result = {}
    for item in dataclasses.fields(cls):
        hint = hints[item.name]
        args = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        accepted = tuple(typing.get_origin(arg) or arg for arg in args)
        if float in accepted:
            accepted += (int,)
        required = item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        result[item.name] = (accepted, required)
    return result


@dataclass(frozen=True, slots=True)
class Record:
    """Base of all records."""

    def to_map(self) -> dict[str, Any]:
        """The record as a JSON-like map."""
        return dataclasses.asdict(self)

    @classmethod
    def from_map_untrusted(cls, source: object) -> Self:
        """The record from a peer's map. Raises ``ProtocolError``."""
        if not isinstance(source, dict):
            raise ProtocolError(f"{cls.__name__} is not a map")
        values: dict[str, Any] = {}
        for name, (accepted, required) in _field_types(cls).items():
            if name not in source:
                if required:
                    raise ProtocolError(f"{cls.__name__} lacks {name!r}")
                continue
            value = source[name]
            if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in accepted):
                raise ProtocolError(f"{cls.__name__}.{name} has type {type(value).__name__}")
            values[name] = value
        return cls(**values)


@dataclass(frozen=True, slots=True)
class ClusterInfo(Record):
    """The seed itself. ``started_at`` is Unix seconds."""

    cluster_id: str
    name: str
    version: str
    address: str
    started_at: float
    peers: int
    jobs: int


@dataclass(frozen=True, slots=True)
class PeerInfo(Record):
    """One peer, as the seed sees it now.

    Attributes:
        state: ``joining``, ``idle``, ``building``, ``waiting``, ``healing``, ``training``, ``held``, ``failed``,
            ``leaving``, ``lost``.
        in_bps, out_bps: bits per second over the ring.
        rank: position in its job's ring; None outside one.
        share: micro-batches of a step that it computes.
    """

    id: str
    name: str
    roles: list[str]
    device: str
    state: str
    address: str
    joined_at: float
    heartbeat_age_s: float = 0.0
    rtt_ms: float | None = None
    in_bps: float = 0.0
    out_bps: float = 0.0
    tokens_per_s: float = 0.0
    memory_bytes: int = 0
    memory_total_bytes: int = 0
    gpu_load: float | None = None
    job: str = ""
    rank: int | None = None
    generation: int = 0
    step: int = 0
    share: int = 0


FINISHED_STATES = frozenset({"done", "cancelled", "failed"})
"""Of a job: it will not go on by itself."""


@dataclass(frozen=True, slots=True)
class JobInfo(Record):
    """One job.

    Attributes:
        state: ``queued`` (another job runs), ``waiting`` (for its first members), ``forming``, ``running``, ``paused``,
            ``done``, ``cancelled``, ``failed``.
        members: peer ids in rank order.
        reason: why it is in this state, for people.
    """

    id: str
    name: str
    profile: str
    strategy: str
    state: str
    created_at: float
    steps_total: int
    step: int = 0
    generation: int = 0
    members: list[str] = dataclasses.field(default_factory=list)
    started_at: float | None = None
    finished_at: float | None = None
    loss: float | None = None
    val_loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    tokens_per_s: float | None = None
    step_ms: float | None = None
    compute_ms: float | None = None
    communicate_ms: float | None = None
    wait_ms: float | None = None
    tokens_total: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class MetricRow(Record):
    """One committed step of a job. Times are rank 0's."""

    job: str
    step: int
    wall: float
    loss: float | None = None
    val_loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    tokens_per_s: float | None = None
    step_ms: float | None = None
    compute_ms: float | None = None
    communicate_ms: float | None = None
    wait_ms: float | None = None
    members: int | None = None
    generation: int | None = None


@dataclass(frozen=True, slots=True)
class EventInfo(Record):
    """One line of the cluster's diary. ``id`` grows by one per event."""

    id: int
    wall: float
    level: str
    kind: str
    text: str
    peer: str = ""
    job: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointInfo(Record):
    """One durable checkpoint and where it lies. ``id`` is ``<job>@<step>@<peer>``."""

    id: str
    job: str
    step: int
    path: str
    peer_id: str
    peer_name: str
    digest: str
    size_bytes: int
    created_at: float
    val_loss: float | None = None
