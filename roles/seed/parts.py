"""Which parts of which models are held by whom: what workers say of it, checked, and forgotten with their links. Pure.

It is kept in memory only: a worker says all that it holds whenever that changes, and again over every new link.
"""

from __future__ import annotations

from collections.abc import Callable

from roles.seed.peers import NAME_CHARS, clipped
from wire.chain_messages import HeldPart, PartsHeld
from wire.records import PartInfo

DTYPE_BYTES = 16


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
        before, held = self._held.get(peer, {}), infos_of(peer, peer_name, message)
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


def infos_of(peer: str, peer_name: str, message: PartsHeld) -> dict[str, PartInfo]:
    """Id → part, of what a worker says that it holds."""
    infos = [_info(peer, peer_name, part) for part in message.parts]
    return {info.id: info for info in infos}


def _info(peer: str, peer_name: str, part: HeldPart) -> PartInfo:
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
        busy=min(part.busy, 1.0),  # its own clock may say a little more
        tokens_per_s=part.tokens_per_s,
        out_position_bytes=part.out_position_bytes,
        next=part.next,
    )
