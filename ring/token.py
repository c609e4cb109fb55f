"""What members tell one another of a reduced step before anyone applies it, and the lineage that a commit extends."""

from __future__ import annotations

import hashlib
import re
import struct
from dataclasses import dataclass, replace
from enum import IntFlag

from p2ptrain.core.errors import ProtocolError

_LINEAGE = re.compile(r"[0-9a-f]{32}")
# generation, step, flags, padding, partial square sum, digest of the reduced bytes, lineage before the step
_TOKEN = struct.Struct("!QQIId16s16s")
TOKEN_BYTES = _TOKEN.size


class Flag(IntFlag):
    """Ring-wide wishes, or-ed over all tokens of a step."""

    HOLD = 1
    SAVE = 2
    LEAVE = 4


@dataclass(frozen=True, slots=True)
class Token:
    """What a member says of a reduced step before anyone applies it. 64 bytes on the wire."""

    generation: int
    step: int
    flags: Flag
    part: float
    digest: bytes
    lineage: bytes

    def encode(self) -> bytes:
        return _TOKEN.pack(self.generation, self.step, self.flags, 0, self.part, self.digest, self.lineage)

    @classmethod
    def decode_untrusted(cls, data: bytes) -> Token:
        """Raises ``ProtocolError``."""
        if len(data) != TOKEN_BYTES:
            raise ProtocolError(f"a step token of {len(data)} bytes")
        generation, step, flags, padding, part, digest, lineage = _TOKEN.unpack(data)
        if padding or flags & ~int(Flag.HOLD | Flag.SAVE | Flag.LEAVE):
            raise ProtocolError(f"a step token with unknown flags {flags:#x}")
        return cls(generation, step, Flag(flags), part, digest, lineage)


def is_lineage(text: str) -> bool:
    """Whether ``text`` may be a lineage: 16 bytes in hex. What comes from a peer or a file is asked first."""
    return _LINEAGE.fullmatch(text) is not None


def first_lineage(spec: str, digest: bytes = b"") -> str:
    """Lineage of the untouched model: the job's spec, and the digest of the state's bytes. Hex, 16 bytes.

    The digest is what makes "equal lineage, equal bits" true from the start: another version of torch may draw other
    initial weights from the same seed, and such a member must be healed, not believed.
    """
    return hashlib.blake2b(spec.encode() + digest, digest_size=16).hexdigest()


def next_lineage(lineage: str, digest: bytes) -> str:
    """Lineage after a step whose reduced bytes have ``digest`` was applied to a state of ``lineage``."""
    return hashlib.blake2b(bytes.fromhex(lineage) + digest, digest_size=16).hexdigest()


def difference(mine: Token, other: Token) -> str:
    """What tells two tokens of one vote apart, in words; empty where nothing does."""
    blank = replace(mine, flags=Flag(0), part=0.0)
    if replace(other, flags=Flag(0), part=0.0) == blank:
        return ""
    for name in ("generation", "step", "lineage", "digest"):
        if getattr(mine, name) != getattr(other, name):
            return f"{name} of step {mine.step + 1}"
    return "token"
