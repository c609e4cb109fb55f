"""Verifiers and drafters at the seed: what they say that they serve, checked, and whom verifiers are told of.

It is kept in memory only, as long as a member's link lives: a member says it again over every new link.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from p2ptrain.core.errors import ProtocolError, Refused
from roles.seed.links import host_seen_from
from roles.seed.peers import NAME_CHARS, Link, clipped
from wire.handshake import PERMITTED
from wire.messages import EventNotice, Hello
from wire.records import ServingInfo
from wire.speculation_messages import MAX_DRAFTERS, DrafterAt, DraftersHere, Serving

ASKED_BY_VERIFIERS = frozenset({"peers.list", "parts.list", "checkpoints.list", "serving.list"})
"""Requests that a verifier may make, over its link: it uses workers as an operator does, and controls nothing."""
HTTP_BYTES = 255


def check_role(hello: Hello) -> None:
    """Raise ``Refused`` where a peer is none that a seed knows."""
    if len(hello.roles) != 1 or hello.roles[0] not in PERMITTED["peer"]:
        text = "a peer of a seed is a worker, a verifier or a drafter"
        raise Refused("role", text, remedy="join with p2ptrain join, and --role")


class Services:
    """What is served in a cluster.

    Args:
        links: the peers that are connected; each has its own under ``serving``.
        touch: told of the ids of peers whose record is new, changed or gone.
    """

    def __init__(self, links: Mapping[str, Link], touch: Callable[..., None]) -> None:
        self._links, self._touch = links, touch
        self._here: list[DrafterAt] = []

    def joined(self, link: Link) -> None:
        """A peer's link is there."""
        if link.role == "verifier":
            self._tell(link)

    def told(self, link: Link, message: Serving) -> None:
        """A verifier or a drafter says what it serves.

        Raises:
            ProtocolError: it serves what cannot be, or another model than before: that takes a new link.
        """
        before, link.serving = link.serving, info_of(link, message)
        if before is not None and _model(before) != _model(link.serving):
            raise ProtocolError(f"a {link.role} served {before.model!r}, and now it is another model")
        if link.serving != before:
            self._touch(link.id)
        if before is None:
            self._tell_unfit(link.serving)
            if link.role == "drafter":
                self._tell_all()

    def _tell_unfit(self, new: ServingInfo) -> None:
        """Who lends a drafter hears for which verifier it is of no use: that one does not even dial it."""
        for link in self._links.values():
            if (other := link.serving) is None or {other.role, new.role} != {"verifier", "drafter"}:
                continue
            verifier, drafter = (new, other) if new.role == "verifier" else (other, new)
            if drafter.tokenizer not in ("", verifier.tokenizer):
                text = f"{verifier.name} writes with {verifier.model}, which has another tokenizer than {drafter.model}"
                remedy = "nothing is drafted for it; draft with a model of the same family"
                self._links[drafter.id].say(EventNotice("warning", "other-tokenizer", f"{text}: {remedy}"))

    def gone(self, link: Link) -> None:
        """A peer's link is lost, and taken from ``links``."""
        serving, link.serving = link.serving, None
        if serving is not None:
            self._touch(link.id)
            if link.role == "drafter":
                self._tell_all()

    def info(self, peer_id: str) -> ServingInfo | None:
        """What a peer serves; None where it does not."""
        link = self._links.get(peer_id)
        return link.serving if link is not None else None

    def infos(self) -> list[ServingInfo]:
        """All of it, verifiers first, by name."""
        found = [link.serving for link in self._links.values() if link.serving is not None]
        return sorted(found, key=lambda info: (info.role != "verifier", info.name, info.id))

    def _tell_all(self) -> None:
        for link in self._links.values():
            if link.role == "verifier":
                self._tell(link)

    def _tell(self, link: Link) -> None:
        """Of those that were here first, where there are more than it takes: a newcomer ousts nobody by its name."""
        links = sorted(
            (each for each in self._links.values() if each.role == "drafter"), key=lambda each: each.joined_at
        )
        here = [each.serving for each in links if each.serving is not None]
        link.say(DraftersHere([_seen_from(link.host, info) for info in here[:MAX_DRAFTERS]]))


def _seen_from(host: str, info: ServingInfo) -> DrafterAt:
    return DrafterAt(
        info.id, info.name, host_seen_from(host, info.host), info.port, info.model, info.vocab_size, info.tokenizer
    )


def _model(info: ServingInfo) -> tuple[str, int, str, str]:
    return info.model, info.vocab_size, info.tokenizer, info.weights


def info_of(link: Link, message: Serving) -> ServingInfo:
    """What a peer says that it serves, as a record."""
    return ServingInfo(
        id=link.id,
        name=clipped(link.name, NAME_CHARS),
        role=link.role,
        host=link.host,
        port=link.port,
        model=clipped(message.model, NAME_CHARS),
        vocab_size=message.vocab_size,
        context=message.context,
        tokenizer=message.tokenizer,
        http=clipped(message.http, HTTP_BYTES),
        sessions=message.sessions,
        stats=dict(message.stats),
        drafters=list(message.drafters),
        drafter_alpha=list(message.drafter_alpha),
        drafter_latency_ms=list(message.drafter_latency_ms),
        drafter_share=list(message.drafter_share),
        weights=message.weights,
    )
