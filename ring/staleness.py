"""The parameter server of asynchronous training with bounded staleness: what it decides and says. Pure.

One member of a view is the *server*: it holds the newest *version* of the model, the state after as many steps. The
others, its *workers*, each pull a version, compute a contribution against it and push that. No worker waits for a
slower one.

Rules
-----
1. A worker has one contribution under way: it pulls, computes, pushes, and pulls again after the contribution has
   become part of a version, or was refused. The server remembers which version it gave, the *base*, and which number.
2. The first ``buffer`` contributions to arrive, of distinct workers, make the next version.
3. The *staleness* of a contribution is the number of versions that were made after its base and before the version that
   it becomes part of. If it is beyond the worker's bound, the contribution is refused.
4. A contribution of staleness s has the weight (1 + s)^-0.5.
5. The bound is fixed, or adaptive: ``USUAL_BOUND`` times the median of all workers' times for a contribution, divided
   by the worker's own mean time, within ``LEAST_BOUND`` and ``MOST_BOUND``.
6. Contribution q of the run is of micro-batches [q m, (q + 1) m), where m is a global batch's number divided by
   ``buffer``. Numbers are assigned in order, that of a refused contribution again. When a view ends, contributions
   under way are lost: the next server begins after the highest number that became part of a version. So no number
   becomes part of two versions of the run, and the text of a lost number below that is left out of its epoch.

Each version's row in the ledger says what it was made of (``Accepted``), so an audit can check rules 2 to 6.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from heapq import heappop, heappush
from statistics import median

from p2ptrain.core.errors import ProtocolError

USUAL_BOUND, LEAST_BOUND, MOST_BOUND = 50, 5, 500
RECENT = 0.2
"""Weight of the newest time in a worker's moving average: about ten contributions."""
MOST_ROWS_BYTES = 2 << 20
_ACCEPTED = struct.Struct("!QQHd")  # number, base, bound, weight
_REQUEST = struct.Struct("!?Q16s16s")
_REPLY = struct.Struct("!BIH???Q16sdQI16s")
ACCEPTED_BYTES, REQUEST_BYTES, REPLY_BYTES = _ACCEPTED.size, _REQUEST.size, _REPLY.size


def weight_of(staleness: int) -> float:
    return float((1 + staleness) ** -0.5)


# ------------------------------------------------------------------------------------------------- what is in a version


@dataclass(frozen=True, slots=True)
class Accepted:
    """A contribution that became part of a version. ``rank``: of its worker. ``bound``: of the staleness, then."""

    rank: int
    number: int
    base: int
    bound: int
    weight: float


def packed(accepted: Iterable[Accepted]) -> bytes:
    """For ``LedgerRow.made_of``, in rank order. The row's shares show the ranks."""
    ordered = sorted(accepted, key=lambda item: item.rank)
    return b"".join(_ACCEPTED.pack(item.number, item.base, item.bound, item.weight) for item in ordered)


def unpacked_untrusted(made_of: bytes, counts: Sequence[int]) -> list[Accepted]:
    """The contributions of a row with these shares. Raises ``ProtocolError``."""
    ranks = [rank for rank, count in enumerate(counts) if count]
    if len(made_of) != len(ranks) * ACCEPTED_BYTES:
        raise ProtocolError(f"{len(ranks)} members have a share of the version, which is made of {len(made_of)} bytes")
    return [Accepted(rank, *found) for rank, found in zip(ranks, _ACCEPTED.iter_unpack(made_of), strict=True)]


def next_number(made: Iterable[bytes], version: int, buffer: int) -> int:
    """The number after the highest one in the newest versions (``LedgerRow.made_of``) up to ``version``. If none of
    their rows is left, one that is likely to be new."""
    found = [number for made_of in made for number, *_ in _ACCEPTED.iter_unpack(made_of)]
    return max(found) + 1 if found else (version + MOST_BOUND) * buffer if version else 0


def problem_of(accepted: Sequence[Accepted], step: int, *, buffer: int, bound: int) -> str:
    """How the version ``step`` breaks rules 2 to 5; empty if it does not. ``bound``: the fixed one; 0: adaptive."""
    if len(accepted) != buffer:
        return f"it is made of {len(accepted)} contributions, not {buffer}"
    for item in accepted:
        staleness, who = step - 1 - item.base, f"the contribution {item.number} of rank {item.rank}"
        if item.rank == 0:
            return f"the contribution {item.number} is of the server"
        if item.bound != bound if bound else not LEAST_BOUND <= item.bound <= MOST_BOUND:
            return f"{who} has the bound {item.bound}"
        if not 0 <= staleness <= item.bound:
            return f"{who} has a staleness of {staleness}, its bound is {item.bound}"
        if not math.isclose(item.weight, weight_of(staleness), rel_tol=1e-9):
            return f"{who} has a weight of {item.weight:.6g}, for a staleness of {staleness}"
    return ""


# ------------------------------------------------------------------------------------------------------------ decisions


@dataclass(slots=True)
class _Worker:
    """``number``: of its contribution under way; None: it has none. ``mean_s``: from a pull to a push; 0: not known."""

    number: int | None = None
    base: int = 0
    assigned_at: float = 0.0
    mean_s: float = 0.0


class Intake:
    """The server's decisions in one view.

    Args:
        version: that the view starts from.
        number: the first contribution to assign.
        buffer: contributions in a version.
        bound: of the staleness; 0: adaptive.

    Attributes:
        version: the newest one.
    """

    def __init__(self, *, version: int, number: int, buffer: int = 1, bound: int = 0) -> None:
        self.version = version
        self._next, self._again = number, list[int]()
        self._buffer, self._bound = buffer, bound
        self._workers: dict[int, _Worker] = {}
        self._waiting: list[int] = []  # ranks, in the order of their contributions' arrival

    def assign(self, rank: int, base: int, now: float) -> int:
        """A worker pulls the version ``base``. Returns the number of the contribution that it is to compute."""
        worker = self._workers.setdefault(rank, _Worker())
        if worker.number is None:
            worker.number = heappop(self._again) if self._again else self._next
            self._next = max(self._next, worker.number + 1)
        worker.base, worker.assigned_at = base, now
        return worker.number

    def arrived(self, rank: int, now: float) -> None:
        """The contribution of a worker arrived. Raises ``ProtocolError`` if it was asked for none."""
        worker = self._workers.get(rank)
        if worker is None or worker.number is None or rank in self._waiting:
            raise ProtocolError("it sent a contribution that it was not asked for")
        took_s = max(now - worker.assigned_at, 1e-6)
        worker.mean_s += (RECENT if worker.mean_s else 1.0) * (took_s - worker.mean_s)
        self._waiting.append(rank)

    def choose(self) -> tuple[list[Accepted], list[int]]:
        """The contributions of the next version, empty if there are too few; and the ranks whose are refused now."""
        stale = [rank for rank in self._waiting if self.staleness(rank) > self.bound(rank)]
        for rank in stale:
            self.refuse(rank)
        first = self._waiting[: self._buffer] if len(self._waiting) >= self._buffer else []
        return [self._accepted(rank) for rank in first], stale

    def refuse(self, rank: int) -> None:
        self._waiting.remove(rank)
        worker = self._workers[rank]
        assert worker.number is not None
        heappush(self._again, worker.number)
        worker.number = None

    def made(self, accepted: Sequence[Accepted]) -> None:
        """The chosen contributions became the next version."""
        for item in accepted:
            self._waiting.remove(item.rank)
            self._workers[item.rank].number = None
        self.version += 1

    def staleness(self, rank: int) -> int:
        return self.version - self._workers[rank].base

    def bound(self, rank: int) -> int:
        own_s = self._workers[rank].mean_s
        if self._bound or not own_s:
            return self._bound or USUAL_BOUND
        usual_s = median(worker.mean_s for worker in self._workers.values() if worker.mean_s)
        return min(max(round(USUAL_BOUND * usual_s / own_s), LEAST_BOUND), MOST_BOUND)

    def _accepted(self, rank: int) -> Accepted:
        worker = self._workers[rank]
        assert worker.number is not None
        return Accepted(rank, worker.number, worker.base, self.bound(rank), weight_of(self.staleness(rank)))


# ------------------------------------------------------------------------------------------------- what members say


class ContributionStatus(IntEnum):
    """What became of the contribution that came with a request. ``NONE``: it had none, or the server stops."""

    NONE = 0
    ACCEPTED = 1
    REFUSED = 2


@dataclass(frozen=True, slots=True)
class PullRequest:
    """Worker to server.

    Attributes:
        contributes: a contribution follows. digest: its xxh3-128.
        applied, lineage: the version that the worker holds; hex.
    """

    contributes: bool
    applied: int
    lineage: str
    digest: bytes = bytes(16)

    def encode(self) -> bytes:
        return _REQUEST.pack(self.contributes, self.applied, bytes.fromhex(self.lineage), self.digest)

    @classmethod
    def decode_untrusted(cls, data: bytes) -> PullRequest:
        """Raises ``ProtocolError``."""
        if len(data) != REQUEST_BYTES:
            raise ProtocolError(f"a pull has {len(data)} bytes, expected {REQUEST_BYTES}")
        contributes, applied, lineage, digest = _REQUEST.unpack(data)
        return cls(contributes, applied, lineage.hex(), digest)


@dataclass(frozen=True, slots=True)
class PullReply:
    """Server to worker.

    Attributes:
        status, staleness, bound: of the contribution that came with the request.
        has_state: rows of the ledger (``rows_bytes``), then the state follow: the worker holds another version.
        over: the server stops here. last: the job has no further version.
        version, lineage, square_sum: of the version that the worker holds from now on. ``digest``: of its state.
        number: of the contribution to compute next.
    """

    status: ContributionStatus
    staleness: int
    bound: int
    has_state: bool
    over: bool
    last: bool
    version: int
    lineage: str
    square_sum: float
    number: int = 0
    rows_bytes: int = 0
    digest: bytes = bytes(16)

    def encode(self) -> bytes:
        return _REPLY.pack(
            self.status, min(self.staleness, 2**32 - 1), self.bound, self.has_state, self.over, self.last,
            self.version, bytes.fromhex(self.lineage), self.square_sum, self.number, self.rows_bytes, self.digest,
        )  # fmt: skip

    @classmethod
    def decode_untrusted(cls, data: bytes) -> PullReply:
        """Raises ``ProtocolError``."""
        if len(data) != REPLY_BYTES:
            raise ProtocolError(f"the answer to a pull has {len(data)} bytes, expected {REPLY_BYTES}")
        status, staleness, bound, state, over, last, version, lineage, square_sum, *rest = _REPLY.unpack(data)
        number, rows_bytes, digest = rest
        fits = rows_bytes <= MOST_ROWS_BYTES and max(version, number) < 2**53 and math.isfinite(square_sum)
        if status not in set(ContributionStatus) or not fits:
            raise ProtocolError("the answer to a pull is out of range")
        figures = ContributionStatus(status), staleness, bound, state, over, last
        return cls(*figures, version, lineage.hex(), square_sum, number, rows_bytes, digest)
