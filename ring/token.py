"""What members tell one another of a reduced step before anyone applies it, and the lineage that a commit extends."""

from __future__ import annotations

import hashlib
import re
import struct
import zlib
from dataclasses import dataclass
from enum import IntFlag

from p2ptrain.core.errors import ProtocolError

_LINEAGE = re.compile(r"[0-9a-f]{32}")
# generation, step, flags, unit, part, own, sent and received, those of the stage's ring, digest of the reduced bytes,
# lineage before the step
_TOKEN = struct.Struct("!QQIIddQQQQ16s16s")
_SUM = struct.Struct("!I")
TOKEN_BYTES = _TOKEN.size + _SUM.size
MAX_UNIT_US = 2**32 - 1
"""An hour and eleven minutes for a micro-batch; who takes longer says this."""


class Flag(IntFlag):
    """Ring-wide wishes, or-ed over all tokens of a step."""

    HOLD = 1
    SAVE = 2
    LEAVE = 4
    SNAPSHOT = 8  # donors were asked for a copy of the state after this step
    REJECT = 16  # this member refuses the step: nobody applies it


_KNOWN = int(~Flag(0))


@dataclass(frozen=True, slots=True)
class Token:
    """What a member says of a reduced step before anyone applies it. 108 bytes on the wire.

    The last four are a CRC-32 of the others: a token goes over all hops, and one whose ``part`` was spoiled on its way
    to some members would have them clip, and so apply, differently.

    Attributes:
        step: steps applied before this one.
        part: of the squared gradient norm, this member's; all parts in rank order give the whole.
        digest, lineage: of the reduced bytes, and of the state before the step; 16 bytes each.
        unit_us: microseconds that a micro-batch takes at this member, averaged; 0: not known.
        own: squared norm of what this member contributed to the sum. May be NaN.
        sent, received: xxh3-64 of the step's bytes that this member sent to the right and received from the left, where
            they are audited; else 0.
        stage_sent, stage_received: of a split model, the same of the ring of those who hold this member's stage.
    """

    generation: int
    step: int
    flags: Flag
    part: float
    digest: bytes
    lineage: bytes
    unit_us: int = 0
    own: float = 0.0
    sent: int = 0
    received: int = 0
    stage_sent: int = 0
    stage_received: int = 0

    def encode(self) -> bytes:
        body = _TOKEN.pack(
            self.generation,
            self.step,
            self.flags,
            min(self.unit_us, MAX_UNIT_US),
            self.part,
            self.own,
            self.sent,
            self.received,
            self.stage_sent,
            self.stage_received,
            self.digest,
            self.lineage,
        )
        return body + _SUM.pack(zlib.crc32(body))

    @classmethod
    def decode_untrusted(cls, data: bytes) -> Token:
        """Raises ``ProtocolError``."""
        if len(data) != TOKEN_BYTES:
            raise ProtocolError(f"a step token of {len(data)} bytes")
        body = data[: _TOKEN.size]
        if _SUM.pack(zlib.crc32(body)) != data[_TOKEN.size :]:
            raise ProtocolError("a step token was damaged on its way")
        generation, step, flags, unit_us, part, own, *sums, digest, lineage = _TOKEN.unpack(body)
        if flags & ~_KNOWN:
            raise ProtocolError(f"a step token with unknown flags {flags:#x}")
        return cls(generation, step, Flag(flags), part, digest, lineage, unit_us, own, *sums)


def is_lineage(text: str) -> bool:
    """Whether ``text`` may be a lineage: 16 bytes in hex. What comes from a peer or a file is asked first."""
    return _LINEAGE.fullmatch(text) is not None


def first_lineage(spec: str, digest: bytes = b"") -> str:
    """Lineage of the untouched model: the job's spec, and the digest of the state's bytes. Hex, 16 bytes.

    The digest is what makes "equal lineage, equal bits" true from the start: another version of torch may draw other
    initial weights from the same seed, and such a member must be healed, not believed.
    """
    return hashlib.blake2b(spec.encode() + digest, digest_size=16).hexdigest()


def joined_digest(digests: bytes) -> bytes:
    """The digest of a step of a split model, given those of its stages' reduced bytes, one after the other, 16 bytes
    each: so there is one lineage for the whole model, and every stage's bytes decide it. 16 bytes."""
    return hashlib.blake2b(digests, digest_size=16).digest()


def next_lineage(lineage: str, digest: bytes) -> str:
    """Lineage after a step whose reduced bytes have ``digest`` was applied to a state of ``lineage``."""
    return hashlib.blake2b(bytes.fromhex(lineage) + digest, digest_size=16).hexdigest()


def difference(mine: Token, other: Token) -> str:
    """What tells two tokens of one vote apart, in words; empty where nothing does."""
    for name in ("generation", "step", "lineage", "digest"):
        if getattr(mine, name) != getattr(other, name):
            return f"{name} of step {mine.step + 1}"
    return ""
