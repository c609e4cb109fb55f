"""What peers hold and serve: parts of models at workers, models at verifiers and drafters. Kept in memory only.

A peer reports it over every new link and after every change. The seed forgets it when the link ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict

from p2ptrain.core.errors import ProtocolError
from roles.seed.peers import NAME_CHARS, Link, clipped, host_seen_from
from wire.chain_messages import HeldPart, PartsHeld
from wire.enrol import RENEW
from wire.messages import EventNotice
from wire.records import PartInfo, ServingInfo
from wire.text_messages import MAX_DRAFTERS, DrafterAt, DrafterList, Serving


def part_infos(links: Iterable[Link]) -> list[PartInfo]:
    found = [part for link in links for part in link.parts.values()]
    return sorted(found, key=lambda part: (part.name, part.model, part.start, part.stop, part.id))


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

    def __init__(self, links: Mapping[str, Link], touch: Callable[..., None]) -> None:
        self._links, self._touch = links, touch

    def joined(self, link: Link) -> None:
        if link.role == "verifier":
            self._tell(link)

    def told(self, link: Link, message: Serving) -> None:
        """Store a peer's report. Raises ``ProtocolError`` if the model changed: that requires a new link."""
        before, link.serving = link.serving, info_of(link, message)
        if before is not None and _model(before) != _model(link.serving):
            raise ProtocolError(f"a {link.role} changed its model {before.model!r} without a new connection")
        if link.serving != before:
            self._touch(link.id)
        if before is None:
            self._tell_unfit(link.serving)
            if link.role == "drafter":
                self._tell_all()

    def _tell_unfit(self, new: ServingInfo) -> None:
        """Warn drafters whose tokenizer differs from a verifier's. That verifier does not dial them."""
        for link in self._links.values():
            if (other := link.serving) is None or {other.role, new.role} != {"verifier", "drafter"}:
                continue
            verifier, drafter = (new, other) if new.role == "verifier" else (other, new)
            if drafter.tokenizer not in ("", verifier.tokenizer):
                text = f"{verifier.name} uses {verifier.model}, whose tokenizer differs from that of {drafter.model}"
                remedy = "that verifier requests no drafts here; use a draft model of the same family"
                self._links[drafter.id].say(EventNotice("warning", "other-tokenizer", f"{text}: {remedy}"))

    def gone(self, link: Link) -> None:
        serving, link.serving = link.serving, None
        if serving is not None:
            self._touch(link.id)
            if link.role == "drafter":
                self._tell_all()

    def infos(self) -> list[ServingInfo]:
        found = [link.serving for link in self._links.values() if link.serving is not None]
        return sorted(found, key=lambda info: (info.role != "verifier", info.name, info.id))

    def _tell_all(self) -> None:
        for link in self._links.values():
            if link.role == "verifier":
                self._tell(link)

    def _tell(self, link: Link) -> None:
        """Send the list of drafters. If it is too long, those that joined first stay in it."""
        links = sorted(
            (each for each in self._links.values() if each.role == "drafter"), key=lambda each: each.joined_at
        )
        here = [each.serving for each in links if each.serving is not None]
        link.say(DrafterList([_seen_from(link.host, info) for info in here[:MAX_DRAFTERS]]))


def _seen_from(host: str, info: ServingInfo) -> DrafterAt:
    return DrafterAt(
        info.id, info.name, host_seen_from(host, info.host), info.port, info.model, info.vocab_size, info.tokenizer
    )


def _model(info: ServingInfo) -> tuple[str, int, str, str]:
    return info.model, info.vocab_size, info.tokenizer, info.weights


def info_of(link: Link, message: Serving) -> ServingInfo:
    said = asdict(message) | {"model": clipped(message.model, NAME_CHARS), "http": clipped(message.http, 255)}
    return ServingInfo(
        id=link.id, name=clipped(link.name, NAME_CHARS), role=link.role, host=link.host, port=link.port, **said
    )
