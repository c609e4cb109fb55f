"""Messages between a newcomer and a seed (purpose ``enrol``), as those of ``wire.messages``.

They belong to the handshake: 4 KiB, 5 s.

::

    newcomer → seed    CaRequest → CaOffer
    newcomer → seed    EnrolRequest → EnrolChallenge, EnrolProof → EnrolGranted

How they make a member of it is in ``wire.enrol``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from wire.messages import Message


@dataclass(frozen=True, slots=True)
class CaRequest(Message):
    """Newcomer to seed: show me the run's CA; I know its hash from my ticket."""

    KIND: ClassVar[int] = 4


@dataclass(frozen=True, slots=True)
class CaOffer(Message):
    """The run's CA certificate, in DER."""

    KIND: ClassVar[int] = 5
    ca_der: bytes


@dataclass(frozen=True, slots=True)
class EnrolRequest(Message):
    """Newcomer to seed, over TLS under the run's CA: sign this, on the strength of this ticket.

    Attributes:
        ticket_id: which ticket; its secret does not travel.
        csr_der: the certificate request (PKCS #10), which names the peer id.
    """

    KIND: ClassVar[int] = 6
    ticket_id: str
    csr_der: bytes


@dataclass(frozen=True, slots=True)
class EnrolChallenge(Message):
    """Prove the secret over this nonce (32 random bytes, for this connection only)."""

    KIND: ClassVar[int] = 7
    nonce: bytes


@dataclass(frozen=True, slots=True)
class EnrolProof(Message):
    """``wire.ticket.proof`` of the ticket's secret, the nonce and the request."""

    KIND: ClassVar[int] = 8
    mac: bytes


@dataclass(frozen=True, slots=True)
class EnrolGranted(Message):
    """The certificate asked for, in DER. The connection ends here; the newcomer comes again with it."""

    KIND: ClassVar[int] = 9
    certificate_der: bytes
