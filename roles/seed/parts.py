"""Which parts of which models are held by whom: what workers say of it, checked, and forgotten with their links. Pure.

It is kept in memory only: a worker says all that it holds whenever that changes, and again over every new link.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from p2ptrain.core.errors import ProtocolError
from p2ptrain.core.ids import is_id
from roles.seed.peers import NAME_CHARS, clipped
from wire.chain_messages import HeldPart, PartsHeld
from wire.records import PartInfo

MAX_PARTS = 16
"""Of one worker."""
DTYPE_BYTES = 16
_TOKEN = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,127}")
"""Ids of parts and models: a digest in hex, or a job's id."""


class Holdings:
    """All parts that are held in a cluster.

    Args:
        touch: told of the ids of parts that are new, changed or gone.
    """

    def __init__(self, touch: Callable[..., None]) -> None:
        self._touch = touch
        self._held: dict[str, dict[str, PartInfo]] = {}  # peer id → id → part

    def told(self, peer: str, peer_name: str, message: PartsHeld) -> None:
        """A worker says what it holds: what it does not name is gone.

        Raises:
            ProtocolError: it holds what cannot be; what is known of it stays as it was.
        """
        before, held = self._held.get(peer, {}), held_untrusted(peer, peer_name, message)
        changed = [item_id for item_id in {**before, **held} if before.get(item_id) != held.get(item_id)]
        if held:
            self._held[peer] = held
        else:
            self._held.pop(peer, None)
        if changed:
            self._touch(*changed)

    def drop(self, peer: str) -> None:
        """The worker is gone, and what it held."""
        gone = self._held.pop(peer, None)
        if gone:
            self._touch(*gone)

    def info(self, item_id: str) -> PartInfo | None:
        """A part by its id, None where nobody holds it."""
        return self._held.get(item_id.partition("/")[0], {}).get(item_id)

    def infos(self) -> list[PartInfo]:
        """All of them, by model and layers."""
        found = [part for held in self._held.values() for part in held.values()]
        return sorted(found, key=lambda part: (part.name, part.model, part.start, part.stop, part.id))


def held_untrusted(peer: str, peer_name: str, message: PartsHeld) -> dict[str, PartInfo]:
    """Id → part, of what a worker says that it holds. Raises ``ProtocolError`` where that cannot be."""
    if len(message.parts) > MAX_PARTS:
        raise ProtocolError(f"a worker that holds {len(message.parts)} parts; {MAX_PARTS} is the most")
    held: dict[str, PartInfo] = {}
    for part in message.parts:
        info = _info(peer, peer_name, part)
        if info.id in held:
            raise ProtocolError(f"a worker that holds part {part.part} twice")
        info.check()
        held[info.id] = info
    return held


def _info(peer: str, peer_name: str, part: HeldPart) -> PartInfo:
    if not (_TOKEN.fullmatch(part.part) and _TOKEN.fullmatch(part.model)) or (part.next and not is_id(part.next)):
        raise ProtocolError("a part with an id that is none")
    return PartInfo(
        id=f"{peer}/{part.part}",
        peer=peer,
        peer_name=peer_name,
        part=part.part,
        model=part.model,
        name=clipped(part.name, NAME_CHARS) or part.model[:12],
        start=part.start,
        stop=part.stop,
        layers=part.layers,
        dtype=clipped(part.dtype, DTYPE_BYTES),
        weights_bytes=part.weights_bytes,
        cache_bytes=part.cache_bytes,
        limit_bytes=part.limit_bytes,
        sessions=part.sessions,
        compute_ms=part.compute_ms,
        busy=min(part.busy, 1.0) if math.isfinite(part.busy) else part.busy,  # its own clock may say a little more
        tokens_per_s=part.tokens_per_s,
        out_position_bytes=part.out_position_bytes,
        next=part.next,
    )
