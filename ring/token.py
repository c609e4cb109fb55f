"""What members tell one another of a reduced step before anyone applies it, and what follows from it. Pure.

- ``Token``: what one member says. ``next_lineage``: what a commit extends.
- ``Guard``: before the vote each member looks at two squared norms, that of its own contribution and that of its part
  of the reduced bytes. What is not finite is refused, and so is what is more than ``outlier_factor`` times as long as
  the gradient usually was: the median over the steps that this member saw committed.
- ``verdict``: after the vote all look at the same tokens, and so come to the same verdict. No sum is longer than its
  summands laid end to end (the triangle inequality): where it is, it was spoiled on its way.
- ``Shares``: who computes how many micro-batches of the next step, by the members' measured speed. Integers only, so
  every member comes to the same shares. Units are microseconds a micro-batch; a step's *makespan* is the time of its
  slowest share, max over ranks of count x unit.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntFlag
from statistics import median

from p2ptrain.core.errors import ProtocolError

_LINEAGE = re.compile(r"[0-9a-f]{32}")
# generation, step, flags, unit, part, own, sent, received, digest of the reduced bytes, lineage before the step
_TOKEN = struct.Struct("!QQIIddQQ16s16s")
_SUM = struct.Struct("!I")
TOKEN_BYTES = _TOKEN.size + _SUM.size


class Flag(IntFlag):
    """Ring-wide wishes, or-ed over all tokens of a step."""

    HOLD = 1
    SAVE = 2
    LEAVE = 4
    SNAPSHOT = 8  # sources were asked for a copy of the state after this step
    REJECT = 16  # this member refuses the step: nobody applies it


_KNOWN = int(~Flag(0))


@dataclass(frozen=True, slots=True)
class Token:
    """What a member says of a reduced step before anyone applies it. 92 bytes on the wire.

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

    def encode(self) -> bytes:
        body = _TOKEN.pack(
            self.generation,
            self.step,
            self.flags,
            min(self.unit_us, 2**32 - 1),
            self.part,
            self.own,
            self.sent,
            self.received,
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


# ------------------------------------------------------------------------------------------------------------- refusals


LEAST_STEPS = 8
"""A member that saw fewer commits refuses only what is not finite."""


class Guard:
    """Remembers how long the gradient usually is.

    Args:
        outlier_factor: norms so many times the usual one are refused; 0: never.
    """

    def __init__(self, outlier_factor: float) -> None:
        self._factor = outlier_factor
        self._seen: deque[float] = deque(maxlen=64)

    def committed(self, square_sum: float) -> None:
        self._seen.append(square_sum)

    def forget(self) -> None:
        self._seen.clear()

    def refuses(self, own: float, part: float, *, lenient: bool) -> bool:
        if not (math.isfinite(own) and math.isfinite(part)):
            return True
        usual = median(self._seen) if len(self._seen) >= LEAST_STEPS else 0.0
        return not lenient and self._factor > 0 and usual > 0 and max(own, part) / usual > self._factor**2


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a step cannot be committed.

    Attributes:
        cause: as ``Report.cause``.
        suspect, beside: ranks; None where the tokens do not tell.
        what: for people, to follow the suspect's name, or alone.
    """

    cause: str
    suspect: int | None
    beside: int | None
    what: str


def verdict(tokens: Sequence[Token]) -> Fault | None:
    for rank, token in enumerate(tokens):
        right = (rank + 1) % len(tokens)
        if token.sent != tokens[right].received:
            return Fault("hop", rank, right, f"sent other bytes than arrived at rank {right}")
    most = Counter(_identity(token) for token in tokens).most_common(1)[0][0]  # the lowest rank's, of equals
    usual = next(token for token in tokens if _identity(token) == most)
    for rank, token in enumerate(tokens):
        if what := difference(usual, token):
            return Fault("digest" if token.digest != usual.digest else "", rank, None, f"has another {what}")
    if any(Flag.REJECT in token.flags for token in tokens):
        suspect, what = _blamed(tokens)
        return Fault("contribution", suspect, None, what)
    return None


def odd_ones_out(digests: Sequence[bytes], stages: int = 1) -> set[int]:
    """Ranks whose digest is not that of the most members that hold the same of ``stages`` parts of the model; where two
    are as frequent, that of the lowest rank counts."""
    odd = set()
    for stage in range(stages):
        alike = digests[stage::stages]
        most = Counter(alike).most_common(1)[0][0]
        odd |= {stages * replica + stage for replica, digest in enumerate(alike) if digest != most}
    return odd


def _identity(token: Token) -> tuple[int, int, bytes, bytes]:
    return token.generation, token.step, token.lineage, token.digest


def _blamed(tokens: Sequence[Token]) -> tuple[int | None, str]:
    for rank, token in enumerate(tokens):
        if not math.isfinite(token.own):
            return rank, "contributed what is not finite"
    total, summands = math.fsum(token.part for token in tokens), math.fsum(math.sqrt(token.own) for token in tokens)
    if not total <= (2 * summands) ** 2:  # rounding and a codec's feedback make it a little longer
        return None, "the sum is not that of what the members contributed: it was spoiled on its way"
    rank = max(range(len(tokens)), key=lambda rank: tokens[rank].own)
    return rank, f"contributed a gradient of norm {math.sqrt(tokens[rank].own):.3g}, absurdly large"


# --------------------------------------------------------------------------------------------------------------- shares


GAIN_PERCENT = 5
"""Shares stay as they are unless the makespan falls by more: measured times scatter by about as much. So much of a
ring's time may also go into asking whether a member without work has become faster."""


class Shares:
    """Who computes what in one step of a view: runs of micro-batches in rank order. Immutable.

    Args:
        counts: of micro-batches, by rank.
        idle_steps: for how many steps in a row each member has had nothing to do.
    """

    def __init__(self, counts: Iterable[int], idle_steps: Iterable[int] | None = None) -> None:
        self.counts = tuple(counts)
        self._idle_steps = tuple(idle_steps) if idle_steps is not None else (0,) * len(self.counts)

    def of(self, rank: int) -> tuple[int, int]:
        return sum(self.counts[:rank]), self.counts[rank]

    def packed(self) -> bytes:
        return struct.pack(f"!{len(self.counts)}I", *self.counts)

    def after(self, unit_us: Sequence[int]) -> Shares:
        idle = [0 if count else steps + 1 for count, steps in zip(self.counts, self._idle_steps, strict=True)]
        return Shares(probed(balanced(sum(self.counts), unit_us, self.counts), unit_us, idle), idle)


def balanced(micro_batches: int, unit_us: Sequence[int], before: Sequence[int] = ()) -> list[int]:
    """Counts in rank order that sum to ``micro_batches``, with the least makespan that whole micro-batches allow.

    Args:
        unit_us: microseconds a micro-batch takes at each member; 0 where it is not known, which counts as the median of
            the known ones.
        before: the counts until now. They are kept where nothing better than ``GAIN_PERCENT`` is to be had, unless they
            are others' (their number or their sum differs).

    Raises:
        ValueError: no member, or a number that cannot be.
    """
    if not unit_us or min(unit_us) < 0 or micro_batches < 0:
        raise ValueError(f"shares of {micro_batches} micro-batches for units {list(unit_us)}")
    units = _known(unit_us)
    best = _fastest(micro_batches, units)
    if len(before) == len(units) and sum(before) == micro_batches and min(before) >= 0:
        now = _makespan(before, units)
        if 100 * _makespan(best, units) >= (100 - GAIN_PERCENT) * now:
            return list(before)
    return best


def probed(counts: Sequence[int], unit_us: Sequence[int], idle_steps: Sequence[int]) -> list[int]:
    """``counts``, or, where it is time to look whether a member without work became faster, with one for it.

    It takes the micro-batch from whoever is busy longest, and is asked so rarely that the waiting for it, if it is as
    slow as it was, costs at most ``GAIN_PERCENT`` of the time. One member is asked at a time, the lowest rank first.

    Args:
        idle_steps: for how many steps in a row each member has had nothing to do.
    """
    units = _known(unit_us)
    span = max(1, _makespan(counts, units))
    for rank, (count, idle) in enumerate(zip(counts, idle_steps, strict=True)):
        wait = max(0, units[rank] - span)
        if count == 0 and idle > 0 and GAIN_PERCENT * idle * span >= 100 * wait:
            busiest = max(range(len(counts)), key=lambda other: (counts[other] * units[other], -other))
            if counts[busiest] > 1:
                return [value + (other == rank) - (other == busiest) for other, value in enumerate(counts)]
    return list(counts)


def _known(unit_us: Sequence[int]) -> list[int]:
    known = sorted(unit for unit in unit_us if unit)
    usual = known[len(known) // 2] if known else 1
    return [unit or usual for unit in unit_us]


def _makespan(counts: Sequence[int], units: Sequence[int]) -> int:
    return max(count * unit for count, unit in zip(counts, units, strict=True))


def _fastest(micro_batches: int, units: Sequence[int]) -> list[int]:
    """The least time in which so many can be done, by bisection; then everyone does what fits into it.

    What fits may be more than is wanted, by less than the number of members that are done just in time: of those, the
    highest ranks do one less.
    """
    low, high = -1, micro_batches * min(units)  # the fastest alone
    while high - low > 1:
        middle = (low + high) // 2
        if sum(middle // unit for unit in units) >= micro_batches:
            high = middle
        else:
            low = middle
    counts = [high // unit for unit in units]
    surplus = sum(counts) - micro_batches
    for rank in reversed(range(len(units))):
        if surplus and counts[rank] and counts[rank] * units[rank] == high:
            counts[rank] -= 1
            surplus -= 1
    return counts
