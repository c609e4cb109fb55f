"""The parts of models that a worker holds: their memory, and which parts are unloaded to make room for another.

A pure core. A part is *in use* while a session is open on it, or a client that asked for it is connected. Else it is
idle: kept for the next client until its memory is needed or it has been idle for ``IDLE_S``.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from p2ptrain.core.errors import Refused
from p2ptrain.core.serving import PartSpec, round_to_blocks
from p2ptrain.core.texts import human_bytes
from roles.engine import StageEngine
from roles.gauges import Rate
from wire.chain_messages import UNKNOWN_PART, HeldPart

MAX_PARTS = 16
MAX_SESSIONS = 64
"""Sessions on one part."""
IDLE_S = 600.0
FULL, MEMORY = "full", "memory"


@dataclass(eq=False)
class Part:
    """A loaded part.

    Attributes:
        users: sessions and clients that keep it loaded.
        wanted: client → positions that it asked memory for, for all of its sessions together.
        pool_positions: positions of all sessions for which there is to be memory.
        reserved_positions: those for which the engine has it.
        compute_s: moving average of the time of one forward request.
        busy: seconds of computing. positions: computed.
        next: peer id of the next stage of the newest session.
        out_position_bytes: size of one position's output on the way there.
    """

    id: str
    model: str
    name: str
    spec: PartSpec
    engine: StageEngine
    idle_since: float
    users: set[Hashable] = field(default_factory=set)
    wanted: dict[Hashable, int] = field(default_factory=dict)
    pool_positions: int = 0
    reserved_positions: int = 0
    compute_s: float = 0.0
    busy: Rate = field(default_factory=Rate)
    positions: Rate = field(default_factory=Rate)
    next: str = ""
    out_position_bytes: float = 0.0

    @property
    def bytes(self) -> int:
        return self.engine.weights_bytes + self.pool_bytes

    @property
    def pool_bytes(self) -> int:
        return self.pool_positions * self.engine.cache_position_bytes

    def add_pass(self, now: float, took_s: float, positions: int) -> None:
        self.compute_s += (took_s - self.compute_s) / 8 if self.compute_s else took_s
        self.busy.add(took_s, now)
        self.positions.add(positions, now)


PartKey = tuple[str, int, int, int, str, str]


def part_key(model: str, spec: PartSpec) -> PartKey:
    return model, spec.start, spec.stop, spec.layers, spec.dtype, spec.weights


class PartCache:
    """Accounts for the loaded parts. ``limit_bytes``: for weights and sessions' caches together."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.parts: dict[str, Part] = {}
        self._reserved: dict[Hashable, int] = {}

    @property
    def free_bytes(self) -> int:
        in_use = sum(part.bytes for part in self.parts.values() if part.users)
        return max(0, self.limit_bytes - in_use - sum(self._reserved.values()))

    def get(self, part: str) -> Part:
        found = self.parts.get(part)
        if found is None:
            raise Refused(UNKNOWN_PART, f"part {part} is not loaded here", remedy="load it again: part.load")
        return found

    def find(self, model: str, spec: PartSpec) -> Part | None:
        wanted = part_key(model, spec)
        return next((part for part in self.parts.values() if part_key(part.model, part.spec) == wanted), None)

    def make_room(self, need_bytes: int, what: str, *, keep: Part | None = None) -> list[Part]:
        """Forget and return the idle parts, longest idle first, whose memory is needed for ``need_bytes`` more.

        Args:
            what: the need, in words.
            keep: a part that stays in any case. None: the room is for one more, and its place is needed, too.

        Raises:
            Refused: there is no such room even without all idle parts; nothing was forgotten.
        """
        idle = sorted(
            (part for part in self.parts.values() if not part.users and part is not keep),
            key=lambda part: part.idle_since,
        )
        left = self.limit_bytes - sum(part.bytes for part in self.parts.values()) - sum(self._reserved.values())
        places = MAX_PARTS - len(self.parts) - len(self._reserved) - (keep is None)
        going: list[Part] = []
        for part in idle:
            if left >= need_bytes and places >= 0:
                break
            going.append(part)
            left, places = left + part.bytes, places + 1
        if places < 0:
            raise Refused(FULL, f"this worker holds {MAX_PARTS} parts, all in use", remedy="try another worker")
        if left < need_bytes:
            raise Refused(
                MEMORY,
                f"{what} need {human_bytes(need_bytes)}, but only {human_bytes(max(left, 0))} of "
                f"{human_bytes(self.limit_bytes)} for parts of models on this worker are free",
                remedy="ask for fewer positions, split the model further, or start the worker with a larger --memory",
            )
        for part in going:
            del self.parts[part.id]
        return going

    def use(self, part: Part, client: Hashable, positions: int) -> list[Part]:
        """Let a client use the part, with memory for so many positions beside what others asked for. Returns and
        raises as ``grow``."""
        others = sum(wanted for who, wanted in part.wanted.items() if who is not client)
        wanted = max(positions, part.wanted.get(client, 0))
        going = self.grow(part, others + wanted)
        part.users.add(client)
        part.wanted[client] = wanted
        return going

    def grow(self, part: Part, positions: int) -> list[Part]:
        """Account for memory of ``positions`` positions of all of the part's sessions together, if it has less. The
        memory stays with the part: what it holds may be of use for later sessions. Returns and raises as ``make_room``.
        """
        new = round_to_blocks(positions) - part.pool_positions
        if new <= 0:
            return []
        need_bytes = new * part.engine.cache_position_bytes
        going = self.make_room(need_bytes, f"{positions} positions of sessions", keep=part)
        part.pool_positions += new
        return going

    def reserve(self, who: Hashable, size_bytes: int) -> None:
        self._reserved[who] = size_bytes

    def release(self, who: Hashable) -> None:
        self._reserved.pop(who, None)

    def leave(self, part: Part, user: Hashable, now: float) -> None:
        part.users.discard(user)
        part.wanted.pop(user, None)
        if not part.users:
            part.idle_since = now

    def expired(self, now: float, *, idle_s: float = IDLE_S) -> list[Part]:
        unused = [part for part in self.parts.values() if not part.users and now - part.idle_since >= idle_s]
        for part in unused:
            del self.parts[part.id]
        return unused

    def describe(self, part: Part, now: float, sessions: int) -> HeldPart:
        engine, spec = part.engine, part.spec
        return HeldPart(
            part=part.id,
            model=part.model,
            name=part.name,
            start=spec.start,
            stop=spec.stop,
            layers=spec.layers,
            dtype=f"{spec.dtype or engine.encoding} {spec.weights}".rstrip(),
            weights_bytes=engine.weights_bytes,
            cache_bytes=part.pool_bytes,
            limit_bytes=self.limit_bytes,
            sessions=sessions,
            compute_ms=1000 * part.compute_s,
            busy=min(1.0, part.busy.per_s(now)),
            tokens_per_s=part.positions.per_s(now),
            out_position_bytes=part.out_position_bytes,
            next=part.next,
        )
