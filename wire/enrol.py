"""How a newcomer gets a certificate with a ticket, or a ticket with a code; and how a member renews a certificate.

::

    newcomer                                          seed
      TLS with any certificate; Hello(enrol) ───────▶
      ◀────────────────────────── EnrolOffer(ca, nonce)
      SHA-256(ca) must be the ticket's pin; if not, a third party may intercept: Refuse(wrong-pin), end
      TLS again, verified under that CA, as a seed; Hello(enrol) ─▶
      ◀────────────────────────── EnrolOffer(ca, nonce)
      EnrolRequest(ticket, certificate request, HMAC(secret; nonce, request)) ─▶
      ◀─────────────── EnrolGranted(certificate) | Refuse

The newcomer sends nothing secret before it knows the CA, and never sends the ticket's secret. The proof covers the
request, so a relay cannot have another key signed. It covers the nonce, so it is valid once.

A newcomer that has a code of six digits instead (``wire.join_code``) cannot compare the CA before it is under way. It
takes the CA that is offered, verifies the second connection under it, and makes its hash a part of the key::

      CodeShare ────────────────────────────────────▶  a code is open
      ◀──────────────────────────────────── CodeShare
      CodeProof ────────────────────────────────────▶  right or wrong, the code is spent
      ◀─────────────────────────── CodeProof | Refuse  both know a ticket for one use
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from p2ptrain.core.disk import Disk
from p2ptrain.core.errors import ConnectionLost, DeadlineExceeded, NetworkError, PeerError, ProtocolError, Refused
from p2ptrain.core.world import Clock, Network
from wire.address import Ticket, format_address, proof
from wire.connection import Connection
from wire.credentials import (
    CERTIFICATE_LIFETIME_S,
    Credentials,
    authority_context,
    certificate_of_untrusted,
    granted_untrusted,
    new_key_and_request,
    pem_of,
    unverified_context,
)
from wire.handshake import ENROL, dial, local_hello
from wire.messages import (
    CodeProof,
    CodeShare,
    EnrolGranted,
    EnrolOffer,
    EnrolRequest,
    RefusalCode,
    Refuse,
)
from wire.tls import TlsDialler, TlsNetwork
from wire.transport import Address, no_answer

RENEW = "credentials.renew"
"""Method of a member's ``Request``: {"csr": base64} → {"certificate": base64}, both DER."""

Ask = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]
"""Sends a request to the seed: method and parameters → result."""


async def enrol(
    network: Network, ticket: Ticket, *, peer_id: str, directory: Path, disk: Disk, timeout_s: float
) -> Credentials:
    """Use ``ticket`` to get credentials of ``peer_id`` under the run's CA, and save them in ``directory``.

    Args:
        network: plain; this function adds TLS.
        timeout_s: for everything.

    Raises:
        Refused: "wrong-pin" (a third party intercepts, or the seed was set up anew), or the seed's reason.
        Unreachable, ConnectionLost, DeadlineExceeded, ProtocolError: no correct seed answers there.
        StorageError: the credentials cannot be saved.
    """
    key_pem, csr_der = new_key_and_request(peer_id)
    place = ticket.host, ticket.port
    async with verified_seed(network, place, ticket.role, peer_id, timeout_s, ticket.pin) as (seed, offer, left_s):
        seed.send(EnrolRequest(ticket.id, csr_der, proof(ticket.secret, offer.nonce, csr_der)))
        certificate_der = (await seed.expect(EnrolGranted, timeout_s=left_s())).certificate_der
    granted = granted_untrusted(
        certificate_der,
        peer_id=peer_id,
        roles=(ticket.role,),
        key_pem=key_pem,
        ca_pem=pem_of(offer.ca_der),
        directory=directory,
    )
    granted.save(disk)  # may block: a newcomer sends no heartbeats yet
    return granted


def _certificate_untrusted(result: dict[str, Any]) -> bytes:
    try:
        return base64.b64decode(result["certificate"], validate=True)
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise ProtocolError("the seed answered a renewal without a certificate") from error


async def ticket_for_code(
    network: Network, place: Address, code: str, *, role: str, peer_id: str, timeout_s: float
) -> Ticket:
    """Get a ticket for one peer with the code that the seed at ``place`` shows. Raises as ``enrol``.

    Once the proof is sent, every failure is ``CODE_WRONG``: the code is spent, and a stranger in the seed's place must
    not get another guess at it from a newcomer that tries again.
    """
    from wire.join_code import CodeAgreement  # 30 ms, for which those who have a ticket need not wait

    spent = False
    try:
        async with verified_seed(network, place, role, peer_id, timeout_s) as (seed, offer, left_s):
            pin = hashlib.sha256(offer.ca_der).digest()
            agreement = CodeAgreement(code, pin, newcomer=True)
            seed.send(CodeShare(agreement.share))
            agreement.finish_untrusted((await seed.expect(CodeShare, timeout_s=left_s())).share)
            seed.send(CodeProof(agreement.newcomer_proof))
            spent = True
            answer = await seed.expect(CodeProof, timeout_s=left_s())
            if not hmac.compare_digest(answer.proof, agreement.seed_proof):
                raise ProtocolError("it does not know the code itself")
    except (NetworkError, PeerError) as error:
        if not spent:
            raise
        text = f"{format_address(*place)} gave no ticket for the code: {error.message}"
        remedy = "make a new code; if it was typed correctly, another machine may intercept the connection"
        raise Refused(RefusalCode.CODE_WRONG, text, remedy=remedy) from error
    return Ticket(*place, role, agreement.ticket_id, agreement.secret, pin)


@asynccontextmanager
async def verified_seed(
    network: Network, place: Address, role: str, peer_id: str, timeout_s: float, pin: bytes = b""
) -> AsyncIterator[tuple[Connection, EnrolOffer, Callable[[], float]]]:
    """A connection to a seed, verified under the CA that it offers; its offer; and the seconds that are left.

    ``pin``: the ticket's, which the CA must match; empty: any CA. Raises as ``enrol``, also for the block.
    """
    now = asyncio.get_running_loop().time
    deadline = now() + timeout_s

    def left_s() -> float:
        return max(0.0, deadline - now())

    hello = local_hello(peer_id=peer_id, name=peer_id, roles=[role], purpose=ENROL)
    try:
        connection, _ = await dial(TlsDialler(network, unverified_context()), *place, hello, timeout_s=left_s())
        try:
            ca_der = (await connection.expect(EnrolOffer, timeout_s=left_s())).ca_der
            if pin and not hmac.compare_digest(hashlib.sha256(ca_der).digest(), pin):
                with suppress(ConnectionLost):
                    text = "the offered CA does not match the ticket's pin"
                    connection.send(Refuse(RefusalCode.WRONG_PIN, text))
                text = f"{format_address(*place)} is not the seed that made this ticket: it has another authority"
                remedy = "if the seed was set up anew, get a new ticket; else the connection may be intercepted: stop"
                raise Refused(RefusalCode.WRONG_PIN, text, remedy=remedy)
        finally:
            await connection.close()
        certificate_of_untrusted(ca_der)
        dialler = TlsDialler(network, authority_context(pem_of(ca_der)))
        connection, _ = await dial(dialler, *place, hello, timeout_s=left_s(), expect_role="seed")
        try:
            offer = await connection.expect(EnrolOffer, timeout_s=left_s())
            yield connection, replace(offer, ca_der=ca_der), left_s
        finally:
            await connection.close()
    except DeadlineExceeded:  # of an accepted connection: else it is ``Unreachable``
        raise no_answer(*place, timeout_s) from None


# -------------------------------------------------------------------------------------------------------------- renewal


HALF_LIFE_S = CERTIFICATE_LIFETIME_S / 2
LOOK_S = HALF_LIFE_S / 144
"""Seconds between two checks of the wall clock (five minutes): a loop's clock stops while a machine sleeps."""


async def until_half_life(issued_at: float, clock: Clock) -> None:
    """Wait until half of a certificate's lifetime has passed. ``issued_at``: Unix seconds of this machine."""
    while (left_s := issued_at + HALF_LIFE_S - clock.wall()) > 0:  # noqa: ASYNC110 - waits for a clock
        await asyncio.sleep(min(left_s, LOOK_S))


class RunMembership:
    """A peer of an encrypted cluster: its credentials, and the network that presents them."""

    def __init__(self, base: Network, credentials: Credentials, disk: Disk, clock: Clock) -> None:
        self.credentials = credentials
        self.network = TlsNetwork(base, credentials, require_client_certificate=True)
        self._disk, self._clock = disk, clock

    @property
    def peer_id(self) -> str:
        return self.credentials.identity.peer_id

    @property
    def _issued_at(self) -> float:
        return self.credentials.identity.not_after - CERTIFICATE_LIFETIME_S

    @property
    def due(self) -> bool:
        return self._clock.wall() >= self._issued_at + HALF_LIFE_S

    async def renew(self, ask: Ask) -> None:
        """Get the next certificate, with a new key. Save it, and present it on new connections.

        ``ask`` sends a request over a connection that the present certificate opened.

        Raises:
            P2PTrainError: what ``ask`` raises.
            ProtocolError: the answer is no certificate for this peer.
            StorageError: the credentials cannot be saved.
        """
        identity = self.credentials.identity
        key_pem, csr_der = new_key_and_request(identity.peer_id)
        result = await ask(RENEW, {"csr": base64.b64encode(csr_der).decode()})
        granted = granted_untrusted(
            _certificate_untrusted(result),
            peer_id=identity.peer_id,
            roles=identity.roles,
            key_pem=key_pem,
            ca_pem=self.credentials.ca_pem,
            directory=self.credentials.directory,
        )
        await asyncio.to_thread(granted.save, self._disk)  # a slow disk must not delay heartbeats
        self.credentials = granted
        self.network.present(granted)

    async def keep_fresh(self, ask: Ask) -> None:
        """Renew at every half-life until cancelled. Raises as ``renew``."""
        while True:
            await until_half_life(self._issued_at, self._clock)
            await self.renew(ask)
