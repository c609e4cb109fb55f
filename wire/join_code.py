"""A ticket from the six digits that a person carries from the seed to a newcomer: SPAKE2 (RFC 9382), over Ed25519.

Each side makes a random share with the code, and a key from the other's share. The keys are equal if the codes are. A
listener learns nothing from the shares. A stranger in the place of either side commits itself to one guess with its
share, and learns from the newcomer's proof whether it was right; it cannot try others for itself.

The hash of the run's CA is a part of the key: on the newcomer's side, of the CA under which it verified the seed's TLS
certificate. So nobody can pass the messages on between two connections with a certificate of their own.
"""

from __future__ import annotations

import hmac

from spake2 import SPAKE2_A, SPAKE2_B, SPAKEError
from spake2.ed25519_basic import NotOnCurve

from p2ptrain.core.errors import ProtocolError
from wire.address import ID_BYTES, SECRET_BYTES


class CodeAgreement:
    """One side of one exchange. ``code``: as ``wire.address.read_code`` returns it. ``pin``: SHA-256 of the run's CA.

    Attributes:
        share: what it sends, 33 bytes.
        newcomer_proof, seed_proof: what shows that a side has the key, 32 bytes; the newcomer shows its own first.
        ticket_id, secret: of the ticket that the seed makes then. So its secret is never sent, as that of any ticket.
    """

    def __init__(self, code: str, pin: bytes, *, newcomer: bool) -> None:
        side = SPAKE2_A if newcomer else SPAKE2_B
        self._side = side(code.encode(), idA=b"p2ptrain newcomer", idB=b"p2ptrain seed " + pin)
        self.share: bytes = self._side.start()

    def finish_untrusted(self, share: bytes) -> None:
        """Make the key from the other side's share, once. Raises ``ProtocolError`` if it is no share."""
        try:
            key = self._side.finish(share)
        except (SPAKEError, NotOnCurve, ValueError) as error:
            raise ProtocolError("the share of a join code is not valid") from error
        self.newcomer_proof = hmac.digest(key, b"newcomer", "sha256")
        self.seed_proof = hmac.digest(key, b"seed", "sha256")
        self.ticket_id = hmac.digest(key, b"ticket id", "sha256")[:ID_BYTES].hex()
        self.secret = hmac.digest(key, b"ticket secret", "sha256")[:SECRET_BYTES]
