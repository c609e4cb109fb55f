"""The code of six digits with which a newcomer gets a ticket (``wire.enrol``: the protocol).

One code is open at a time, for one role, for ten minutes, in memory only. The first proof ends it, right or wrong. An
exchange that ends earlier has told the caller nothing, and the code stays open.
"""

from __future__ import annotations

import hmac
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from p2ptrain.core.errors import Refused
from p2ptrain.core.world import World
from roles.seed.authority import Authority, Role, TicketRecord
from wire.address import CODE_DIGITS
from wire.connection import Connection
from wire.handshake import HANDSHAKE_TIMEOUT_S
from wire.join_code import CodeAgreement
from wire.messages import CodeProof, CodeShare, Hello, RefusalCode

CODE_LIFETIME_S = 600.0
MAX_ATTEMPTS = 10
"""Exchanges in a minute, of all callers together. Each takes the seed 40 ms of computing."""


@dataclass(frozen=True, slots=True, eq=False)
class JoinCode:
    digits: str = field(repr=False)
    role: Role
    expires_at: float  # of the monotonic clock


class JoinCodes:
    """The open code, and the exchanges about it. ``note``: as of ``EnrolmentPolicy``."""

    def __init__(self, world: World, note: Callable[[str, str, str], None]) -> None:
        self._world, self._note = world, note
        self.open: JoinCode | None = None
        self._attempts: deque[float] = deque(maxlen=MAX_ATTEMPTS)  # when the newest exchanges began

    def new(self, role: Role) -> str:
        """Open a code in place of the one before, and return its digits."""
        digits = f"{int.from_bytes(self._world.entropy(16)) % 10**CODE_DIGITS:0{CODE_DIGITS}}"
        self.open = JoinCode(digits, role, self._world.clock.now() + CODE_LIFETIME_S)
        self._note("info", "code", f"an operator made a code, with which one {role} can join")
        return digits

    async def exchange(
        self, authority: Authority, host: str, connection: Connection, hello: Hello, first: CodeShare
    ) -> None:
        """Make a ticket for a newcomer that proves the code. ``host``: as of tickets. Raises ``P2PTrainError``."""
        code, caller = self._begin(hello), f"{hello.peer_id[:64]} at {connection.ends.remote[0]}"
        agreement = CodeAgreement(code.digits, authority.pin, newcomer=False)
        agreement.finish_untrusted(first.share)
        connection.send(CodeShare(agreement.share))
        proof = (await connection.expect(CodeProof, timeout_s=HANDSHAKE_TIMEOUT_S)).proof
        if self.open is not code:
            raise _no_code()  # another caller's proof ended it meanwhile
        self.open = None
        if not hmac.compare_digest(proof, agreement.newcomer_proof):
            self._note("warning", "code", f"the code is spent: {caller} typed a wrong one, or is intercepted")
            raise Refused(RefusalCode.CODE_WRONG, "the code is wrong, and spent now", remedy="make a new code")
        now = self._world.clock.wall()
        end, ticket_id = now + CODE_LIFETIME_S, agreement.ticket_id
        ticket = TicketRecord(ticket_id, code.role, agreement.secret, host, now, end, uses=1)
        await authority.change(lambda records: records.with_ticket(ticket, now))
        self._note("info", "code", f"{caller} used the code, and has ticket {ticket_id}")
        connection.send(CodeProof(agreement.seed_proof))

    def _begin(self, hello: Hello) -> JoinCode:
        now, code = self._world.clock.now(), self.open
        if code is None or now >= code.expires_at:
            raise _no_code()
        if hello.roles != [code.role]:
            remedy = f"join with --role {code.role}, or make a code of the other role: p2ptrain ticket code --role ROLE"
            raise Refused(RefusalCode.CODE_UNKNOWN, f"the code is for a {code.role}", remedy=remedy)
        if len(self._attempts) == MAX_ATTEMPTS and now - self._attempts[0] < 60.0:
            text = f"{MAX_ATTEMPTS} callers tried a code within a minute"
            raise Refused(RefusalCode.BUSY, text, remedy="try again in a minute")
        self._attempts.append(now)
        return code


def _no_code() -> Refused:
    text = "no code is open: it was used or guessed at, or its ten minutes are over"
    return Refused(RefusalCode.CODE_UNKNOWN, text, remedy="make a new one there: p2ptrain ticket code")
