"""What peers hold and serve: parts of models at workers, models at verifiers and drafters. Kept in memory only.

A peer reports it over every new link and after every change. The seed forgets it when the link ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict

from p2ptrain.core.errors import ProtocolError
from roles.seed.peers import NAME_CHARS, ConnectedPeer, clipped, host_dialled_from
from wire.chain_messages import HeldPart, PartsHeld
from wire.enrol import RENEW
from wire.messages import EventNotice
from wire.records import PartInfo, ServingInfo
from wire.text_messages import MAX_DRAFTERS, DrafterAt, DrafterList, Serving


def part_infos(peers: Iterable[ConnectedPeer]) -> list[PartInfo]:
    found = [part for peer in peers for part in peer.parts.values()]
    return sorted(found, key=lambda part: (part.name, part.model, part.start, part.stop, part.id))


def serving_infos(peers: Iterable[ConnectedPeer]) -> list[ServingInfo]:
    found = [peer.serving for peer in peers if peer.serving is not None]
    return sorted(found, key=lambda info: (info.role != "verifier", info.name, info.id))


def infos_of(peer: str, peer_name: str, message: PartsHeld) -> dict[str, PartInfo]:
    infos = [_info(peer, peer_name, part) for part in message.parts]
    return {info.id: info for info in infos}


def _info(peer: str, peer_name: str, part: HeldPart) -> PartInfo:
    shown = {
        "name": clipped(part.name, NAME_CHARS) or part.model[:12],
        "dtype": clipped(part.dtype, 16),
        "busy": min(part.busy, 1.0),  # the worker's clock may give a little more than 1
    }
    return PartInfo(id=f"{peer}/{part.part}", peer=peer, peer_name=peer_name, **asdict(part) | shown)


ASKED_BY = {"verifier": {"peers.list", "parts.list", "checkpoints.list", "serving.list", RENEW}}
"""Role → requests over its link. A verifier may look for workers as an operator does, but change nothing. Others may
only renew their certificate."""


class Services:
    """What verifiers and drafters serve. Each peer's record is in ``Link.serving``.

    ``touch`` is called with the ids of peers whose record is new, changed or gone.
    """

    def __init__(self, peers: Mapping[str, ConnectedPeer], touch: Callable[..., None]) -> None:
        self._peers, self._touch = peers, touch

    def joined(self, peer: ConnectedPeer) -> None:
        if peer.role == "verifier":
            self._send_drafters(peer)

    def reported(self, peer: ConnectedPeer, message: Serving) -> None:
        """Store a peer's report. Raises ``ProtocolError`` if the model changed: that requires a new link."""
        before, peer.serving = peer.serving, info_of(peer, message)
        if before is not None and _model(before) != _model(peer.serving):
            raise ProtocolError(f"a {peer.role} changed its model {before.model!r} without a new connection")
        if peer.serving != before:
            self._touch(peer.id)
        if before is None:
            self._warn_of_other_tokenizers(peer.serving)
            if peer.role == "drafter":
                self._send_drafters_to_all()

    def _warn_of_other_tokenizers(self, new: ServingInfo) -> None:
        """Warn drafters whose tokenizer differs from a verifier's. That verifier does not dial them."""
        for peer in self._peers.values():
            if (other := peer.serving) is None or {other.role, new.role} != {"verifier", "drafter"}:
                continue
            verifier, drafter = (new, other) if new.role == "verifier" else (other, new)
            if drafter.tokenizer not in ("", verifier.tokenizer):
                text = f"{verifier.name} uses {verifier.model}, whose tokenizer differs from that of {drafter.model}"
                remedy = "that verifier requests no drafts here; use a draft model of the same family"
                self._peers[drafter.id].send(EventNotice("warning", "other-tokenizer", f"{text}: {remedy}"))

    def lost(self, peer: ConnectedPeer) -> None:
        serving, peer.serving = peer.serving, None
        if serving is not None:
            self._touch(peer.id)
            if peer.role == "drafter":
                self._send_drafters_to_all()

    def _send_drafters_to_all(self) -> None:
        for peer in self._peers.values():
            if peer.role == "verifier":
                self._send_drafters(peer)

    def _send_drafters(self, peer: ConnectedPeer) -> None:
        """Send the list of drafters. If it is too long, those that joined first stay in it."""
        peers = sorted(
            (each for each in self._peers.values() if each.role == "drafter"), key=lambda each: each.joined_at
        )
        here = [each.serving for each in peers if each.serving is not None]
        peer.send(DrafterList([_drafter_for(peer.host, info) for info in here[:MAX_DRAFTERS]]))


def _drafter_for(host: str, info: ServingInfo) -> DrafterAt:
    return DrafterAt(
        info.id, info.name, host_dialled_from(host, info.host), info.port, info.model, info.vocab_size, info.tokenizer
    )


def _model(info: ServingInfo) -> tuple[str, int, str, str]:
    return info.model, info.vocab_size, info.tokenizer, info.weights


def info_of(peer: ConnectedPeer, message: Serving) -> ServingInfo:
    fields = asdict(message) | {"model": clipped(message.model, NAME_CHARS), "http": clipped(message.http, 255)}
    return ServingInfo(
        id=peer.id, name=clipped(peer.name, NAME_CHARS), role=peer.role, host=peer.host, port=peer.port, **fields
    )
