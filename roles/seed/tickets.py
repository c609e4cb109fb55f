"""Who may become a member: tickets, what was issued from them, and who was evicted. A core: values in, values out.

A ticket lets peers *enrol*: each gets a certificate of a day, which it renews while it is a member. So a ticket has two
ends. Where it *expires*, is *used up* or is *rotated* away it lets nobody new in, and members stay. Where it is
*revoked*, the certificates that came from it are refused too, and so are their renewals.

A peer id belongs to the key that enrolled with it, for as long as a certificate of it is of use: else everybody with a
ticket could take the name of a neighbour. An evicted id stays out for good.

Times are Unix seconds of the seed's own clock, and are compared with nothing else.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from p2ptrain.core.errors import Refused, StorageError
from p2ptrain.core.ids import is_id
from wire.credentials import SKEW_S

Role = Literal["worker", "operator", "seed", "verifier", "drafter"]
Kind = Literal["", "first", "local"]
ROLES: tuple[Role, ...] = ("worker", "operator", "seed", "verifier", "drafter")

MAX_TICKETS = 256
"""That may be kept at a time: each is a line of a list that a person reads."""
MAX_MEMBERS = 4096
"""Peer ids with a valid certificate: more than a seed lets in at a time."""
MAX_EVICTED = 4096
MAX_USES = 1_000_000
TOLD_S = 7 * 86_400.0
"""As long as the longest-lived tickets are good by default: whoever tries a dead one is told what became of it."""
ID_BYTES = 6
SECRET_BYTES = 16
_VERSION = 1
_NEW = "on the seed's machine, `p2ptrain ticket new` makes another"


@dataclass(frozen=True, slots=True)
class TicketRecord:
    """One ticket.

    Attributes:
        secret: known to the seed and to whoever holds the ticket; in no event, list or message.
        host: the address that it was written for.
        kind: ``first``: shown when the seed starts; ``local``: a file for this machine's own programs.
        expires_at: None: never, which is for local ones only: who reads that file reads the authority's key too.
        uses: how many peers may enrol with it; None: any number. used: how many did.
        closed_at: it lets nobody new in since. revoked: its certificates are refused, too.
        lapses_at: the end of the last certificate that came from it.
    """

    id: str
    role: Role
    secret: bytes = field(repr=False)
    host: str
    created_at: float
    expires_at: float | None
    kind: Kind = ""
    uses: int | None = None
    used: int = 0
    closed_at: float | None = None
    revoked: bool = False
    lapses_at: float = 0.0

    def state(self, now: float) -> str:
        """``open``, or why it lets nobody new in: ``revoked``, ``rotated``, ``expired``, ``used``."""
        if self.revoked:
            return "revoked"
        if self.closed_at is not None:
            return "rotated"
        if self.expires_at is not None and now >= self.expires_at:
            return "expired"
        return "used" if self.uses is not None and self.used >= self.uses else "open"

    def kept_until(self, now: float, told_s: float) -> float:
        """When it may be forgotten: ``told_s`` after it was over, but not while a certificate of it is valid."""
        if self.state(now) == "open":
            return math.inf
        ends = [time for time in (self.closed_at, self.expires_at) if time is not None and time <= now]
        return max(self.lapses_at, min(ends, default=self.lapses_at) + told_s)

    def to_map(self, now: float) -> dict[str, Any]:
        """What people and programs may see: everything but the secret."""
        names = ("id", "role", "kind", "host", "created_at", "expires_at", "uses", "used")
        return {name: getattr(self, name) for name in names} | {"state": self.state(now)}


@dataclass(frozen=True, slots=True)
class Member:
    """A peer id with a valid certificate. ``key``: SHA-256 of its public key, hex; ``ticket``: where it came from."""

    ticket: str
    key: str
    not_after: float


@dataclass(frozen=True, slots=True)
class Book:
    """All of it, immutable: a change is a new book, which is on the disk before anybody is told of it."""

    tickets: Mapping[str, TicketRecord] = field(default_factory=dict)
    members: Mapping[str, Member] = field(default_factory=dict)
    evicted: Mapping[str, str] = field(default_factory=dict)
    """Peer id → name that it had."""

    # -------------------------------------------------------------------------------------------------------- decisions

    def judge_enrolment(self, ticket_id: str, peer_id: str, key: str, now: float) -> TicketRecord:
        """The ticket that this peer may enrol with. To be asked after the secret was proven, for it tells of tickets.

        Raises:
            Refused: why not, with what can be done.
        """
        ticket = self.ticket(ticket_id)
        member = self._member(peer_id, now)
        again = member is not None and (member.ticket, member.key) == (ticket.id, key)
        self._judge_open(ticket, now, again=again)
        self._judge_peer(peer_id)
        if member is not None and member.key != key and not self._is_revoked(member.ticket):
            left_h = (member.not_after - now) / 3600
            text = f"the peer id {peer_id} belongs to another key, whose certificate is valid for {left_h:.1f} h more"
            raise Refused(
                "duplicate-peer", text, remedy="use the state directory that joined first, or another --state"
            )
        if member is None and len(self._valid(now)) >= MAX_MEMBERS:
            raise Refused("full", f"{MAX_MEMBERS} peers have a certificate", remedy="revoke tickets that leaked")
        return ticket

    def judge_certificate(self, ticket_id: str, peer_id: str) -> None:
        """Raise ``Refused`` where a certificate that is valid in itself is no longer honoured."""
        if self.ticket(ticket_id).revoked:
            raise _revoked(ticket_id)
        self._judge_peer(peer_id)

    def ticket(self, ticket_id: str) -> TicketRecord:
        """Raise ``Refused`` where there is none, or no more."""
        found = self.tickets.get(ticket_id)
        if found is None:
            text = f"this seed knows no ticket {ticket_id[:40]!r}: it was removed, or belongs to another cluster"
            raise Refused("ticket-unknown", text, remedy=_NEW)
        return found

    def _judge_open(self, ticket: TicketRecord, now: float, *, again: bool) -> None:
        match ticket.state(now):
            case "revoked":
                raise _revoked(ticket.id)
            case "rotated":
                raise Refused("ticket-revoked", f"ticket {ticket.id} was replaced by a newer one", remedy=_NEW)
            case "expired":
                raise Refused("ticket-expired", f"ticket {ticket.id} has expired", remedy=_NEW)
            case "used" if not again:
                text = f"ticket {ticket.id} was for {ticket.uses} and is used up"
                raise Refused("ticket-used", text, remedy=_NEW)

    def _judge_peer(self, peer_id: str) -> None:
        if peer_id in self.evicted:
            text = f"the peer {self.evicted[peer_id]} ({peer_id}) was evicted from this cluster"
            raise Refused("evicted", text, remedy="ask whoever runs the seed; another --state is another peer")

    def _is_revoked(self, ticket_id: str) -> bool:
        return ticket_id not in self.tickets or self.tickets[ticket_id].revoked

    def _member(self, peer_id: str, now: float) -> Member | None:
        return self._valid(now).get(peer_id)

    def _valid(self, now: float) -> dict[str, Member]:
        """Those whose certificate a machine with a fast clock accepts, too; with the others nobody gets anywhere."""
        return {peer_id: member for peer_id, member in self.members.items() if now < member.not_after - SKEW_S}

    def of_kind(self, kind: Kind, role: Role, now: float) -> TicketRecord | None:
        """The newest open ticket of a kind."""
        found = [item for item in self.tickets.values() if (item.kind, item.role) == (kind, role)]
        return next((item for item in reversed(found) if item.state(now) == "open"), None)

    # ---------------------------------------------------------------------------------------------------------- changes

    def with_ticket(self, ticket: TicketRecord, now: float) -> Book:
        """Add one. Raises ``Refused`` where there are too many."""
        kept = self.pruned(now)
        if len(kept.tickets) >= MAX_TICKETS:
            kept = self.pruned(now, told_s=0.0)
        if len(kept.tickets) >= MAX_TICKETS:
            remedy = "revoke some; those that are over leave when the certificates that came from them have lapsed"
            raise Refused("full", f"{len(kept.tickets)} tickets are kept", remedy=remedy)
        return replace(kept, tickets={**kept.tickets, ticket.id: ticket})

    def with_member(self, ticket_id: str, peer_id: str, key: str, not_after: float, now: float) -> Book:
        """A certificate is issued, for the first time or again."""
        old, kept = self._member(peer_id, now), self.pruned(now)
        ticket = self.ticket(ticket_id)
        new = old is None or old.ticket != ticket_id
        lapses_at = max(ticket.lapses_at, not_after)
        ticket = replace(ticket, used=min(ticket.used + new, MAX_USES), lapses_at=lapses_at)
        member = Member(ticket_id, key, not_after)
        return replace(kept, tickets={**kept.tickets, ticket_id: ticket}, members={**kept.members, peer_id: member})

    def without_ticket(self, ticket_id: str, now: float) -> Book:
        """Revoke it: nobody enrols with it, and what came from it is refused."""
        ticket = replace(self.ticket(ticket_id), closed_at=now, revoked=True)
        return replace(self, tickets={**self.tickets, ticket_id: ticket})

    def rotated(self, now: float) -> Book:
        """Close every open ticket; members stay."""
        closed = {
            key: replace(item, closed_at=now) if item.state(now) == "open" else item
            for key, item in self.tickets.items()
        }
        return replace(self, tickets=closed)

    def with_evicted(self, peer_id: str, name: str) -> Book:
        """Raises ``Refused`` where too many are evicted to be remembered."""
        if peer_id not in self.evicted and len(self.evicted) >= MAX_EVICTED:
            text = f"{MAX_EVICTED} peers are evicted already"
            raise Refused("full", text, remedy="revoke the tickets that they come with")
        return replace(self, evicted={**self.evicted, peer_id: name})

    def pruned(self, now: float, *, told_s: float = TOLD_S) -> Book:
        """Without what decides nothing any more: lapsed certificates, and tickets that are over and have none.

        Args:
            told_s: for so long whoever comes with one that is over is still told why.
        """
        tickets = {key: item for key, item in self.tickets.items() if now < item.kept_until(now, told_s)}
        return replace(self, tickets=tickets, members=self._valid(now))

    # -------------------------------------------------------------------------------------------------------- disk

    def to_json(self) -> bytes:
        tickets = [asdict(item) | {"secret": base64.b64encode(item.secret).decode()} for item in self.tickets.values()]
        members = {peer_id: asdict(member) for peer_id, member in self.members.items()}
        document = {"version": _VERSION, "tickets": tickets, "members": members, "evicted": dict(self.evicted)}
        return json.dumps(document, indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Book:
        """Raises ``StorageError`` where it is no book, or one of another release."""
        try:
            document = json.loads(data)
            if document["version"] != _VERSION:
                raise StorageError(f"it was written by another release (version {document['version']})")
            tickets = [
                TicketRecord(**item | {"secret": base64.b64decode(item["secret"], validate=True)})
                for item in document["tickets"]
            ]
            members = {peer_id: Member(**item) for peer_id, item in document["members"].items()}
            evicted = {str(peer_id): str(name) for peer_id, name in document["evicted"].items()}
        except (ValueError, KeyError, TypeError, AttributeError, binascii.Error) as error:
            raise StorageError(f"it is damaged: {type(error).__name__}") from error
        if any(item.role not in ROLES or len(item.secret) != SECRET_BYTES for item in tickets):
            raise StorageError("it is damaged: a ticket that is none")
        if not all(map(is_id, members)):
            raise StorageError("it is damaged: a peer id that is none")
        return cls({item.id: item for item in tickets}, members, evicted)


def _revoked(ticket_id: str) -> Refused:
    text = f"ticket {ticket_id} was revoked, and the certificates that came from it with it"
    return Refused("ticket-revoked", text, remedy=_NEW)
