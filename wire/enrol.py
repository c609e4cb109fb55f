"""How a newcomer with a ticket becomes a member with a certificate, and how a member renews it.

::

    newcomer                                          seed
      TLS, anybody's certificate; Hello(enrol) ─────▶
      ◀────────────────────────── EnrolOffer(ca, nonce)
      SHA-256(ca) is the ticket's pin, or somebody is in between: Refuse(wrong-pin), the end
      TLS again, verified under that CA, as a seed; Hello(enrol) ─▶
      ◀────────────────────────── EnrolOffer(ca, nonce)
      EnrolRequest(ticket, certificate request, HMAC(secret; nonce, request)) ─▶
      ◀─────────────── EnrolGranted(certificate) | Refuse

Nothing secret is said before the CA is known, and the secret never is. The proof covers the request, so nobody who
relays it gets another key signed; and the nonce, so it serves once.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from ssl import SSLContext
from typing import Any

from p2ptrain.core.disk import Disk
from p2ptrain.core.errors import ConnectionLost, DeadlineExceeded, ProtocolError, Refused
from p2ptrain.core.world import Clock, Network
from wire.address import Ticket, proof
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
from wire.handshake import ENROL, RefusalCode, dial, local_hello
from wire.messages import EnrolGranted, EnrolOffer, EnrolRequest, Refuse
from wire.tls import TlsDialler, TlsNetwork

RENEW = "credentials.renew"
"""Method of a member's ``Request``: {"csr": base64} → {"certificate": base64}, both DER."""

Ask = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]
"""Method and parameters of a request to the seed → its result."""


async def enrol(
    network: Network, ticket: Ticket, *, peer_id: str, directory: Path, disk: Disk, timeout_s: float
) -> Credentials:
    """Spend ``ticket``: credentials of ``peer_id`` under the run's CA, saved in ``directory``.

    Args:
        network: plain; TLS is put over it.
        timeout_s: for all of it.

    Raises:
        Refused: "wrong-pin" (somebody is in between, or the seed was set up anew), or the seed's reason.
        Unreachable, ConnectionLost, DeadlineExceeded, ProtocolError: no correct seed answers there.
        StorageError: the credentials cannot be kept.
    """
    try:
        async with asyncio.timeout(timeout_s):
            ca_der = await _fetch_ca(network, ticket, peer_id, timeout_s)
            key_pem, csr_der = new_key_and_request(peer_id)
            connection = await _call(network, ticket, peer_id, timeout_s, authority_context(pem_of(ca_der)), "seed")
            try:
                nonce = (await connection.expect(EnrolOffer, timeout_s=timeout_s)).nonce
                connection.send(EnrolRequest(ticket.id, csr_der, proof(ticket.secret, nonce, csr_der)))
                certificate_der = (await connection.expect(EnrolGranted, timeout_s=timeout_s)).certificate_der
            finally:
                await connection.close()
    except TimeoutError:
        text = f"the seed at {ticket.host}:{ticket.port} did not enrol this peer within {timeout_s:g} s"
        raise DeadlineExceeded(text, remedy="it may be overloaded; try again") from None
    granted = granted_untrusted(
        certificate_der,
        peer_id=peer_id,
        roles=(ticket.role,),
        key_pem=key_pem,
        ca_pem=pem_of(ca_der),
        directory=directory,
    )
    granted.save(disk)  # of a newcomer nobody expects a sign of life yet
    return granted


async def renew(credentials: Credentials, ask: Ask, *, disk: Disk) -> Credentials:
    """The next credentials of the same peer, with a new key, saved in the place of ``credentials``.

    Args:
        ask: sends a request over a connection that the present certificate opened.

    Raises:
        P2PTrainError: what ``ask`` raises. ProtocolError: the answer is no certificate for us.
        StorageError: it cannot be kept.
    """
    identity = credentials.identity
    key_pem, csr_der = new_key_and_request(identity.peer_id)
    result = await ask(RENEW, {"csr": base64.b64encode(csr_der).decode()})
    granted = granted_untrusted(
        _certificate_untrusted(result),
        peer_id=identity.peer_id,
        roles=identity.roles,
        key_pem=key_pem,
        ca_pem=credentials.ca_pem,
        directory=credentials.directory,
    )
    await asyncio.to_thread(granted.save, disk)  # a slow disk may not keep a member's heartbeats waiting
    return granted


def _certificate_untrusted(result: dict[str, Any]) -> bytes:
    try:
        return base64.b64decode(result["certificate"], validate=True)
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise ProtocolError("the seed answered a renewal without a certificate") from error


async def _call(
    network: Network, ticket: Ticket, peer_id: str, timeout_s: float, context: SSLContext, role: str
) -> Connection:
    hello = local_hello(peer_id=peer_id, name=peer_id, roles=[ticket.role], purpose=ENROL)
    dialler = TlsDialler(network, context)
    return (await dial(dialler, ticket.host, ticket.port, hello, timeout_s=timeout_s, expect_role=role))[0]


async def _fetch_ca(network: Network, ticket: Ticket, peer_id: str, timeout_s: float) -> bytes:
    """The run's CA (DER), which is that of the ticket. Raises as ``enrol``."""
    connection = await _call(network, ticket, peer_id, timeout_s, unverified_context(), "")
    try:
        ca_der = (await connection.expect(EnrolOffer, timeout_s=timeout_s)).ca_der
        if hmac.compare_digest(hashlib.sha256(ca_der).digest(), ticket.pin):
            certificate_of_untrusted(ca_der)
            return ca_der
        with suppress(ConnectionLost):
            text = "the CA that was offered is not the one that the ticket pins"
            connection.send(Refuse(RefusalCode.WRONG_PIN, text))
    finally:
        await connection.close()
    text = f"{ticket.host}:{ticket.port} is not the seed that made this ticket: its CA is another"
    remedy = "get a new ticket if the seed was set up anew; else somebody is in between: do not go on"
    raise Refused(RefusalCode.WRONG_PIN, text, remedy=remedy)


# -------------------------------------------------------------------------------------------------------------- renewal


HALF_LIFE_S = CERTIFICATE_LIFETIME_S / 2
LOOK_S = HALF_LIFE_S / 144
"""Between two looks at the wall clock, five minutes: a loop's own clock stands still while a machine sleeps."""


async def until_half_life(issued_at: float, clock: Clock) -> None:
    """Wait until a certificate has lived half its life. ``issued_at``: Unix seconds of this machine."""
    while (left_s := issued_at + HALF_LIFE_S - clock.wall()) > 0:  # noqa: ASYNC110 - a clock is waited for
        await asyncio.sleep(min(left_s, LOOK_S))


class Member:
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
        """Fetch the next certificate from the seed, keep it, and present it from the next connection on.

        Raises:
            P2PTrainError: what ``ask`` raises; or the seed answered with something else; or it could not be kept.
        """
        self.credentials = await renew(self.credentials, ask, disk=self._disk)
        self.network.use(self.credentials)

    async def keep_fresh(self, ask: Ask) -> None:
        """Renew at every half life, until cancelled. Raises as ``renew``."""
        while True:
            await until_half_life(self._issued_at, self._clock)
            await self.renew(ask)
