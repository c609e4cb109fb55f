"""What members tell each other about a reduced step before any of them applies it, and what follows. Pure.

- ``Token``: the message of one member. ``next_lineage``: the lineage after a commit.
- ``judge_tokens``: after the vote, all members judge the same tokens, so they reach the same verdict. No member can
  refuse a step: the figures in the tokens decide. What several members know, each tells: one that is alone with a
  figure is the suspect. A norm must be finite, and at most ``outlier_factor`` times the usual gradient norm. The norm
  of a sum is at most the sum of the norms (the triangle inequality): a longer sum was corrupted, or a member lied.
- ``NormGuard``: the usual gradient norm, the median over the steps that a member saw committed.
- ``Shares``: how many micro-batches of the next step each member computes, by measured speed, or by a ``ShareRule``.
  Integers only, so every member computes the same shares. Units are microseconds per micro-batch. A step's *makespan*
  is the time of its slowest share: the maximum of count x unit over ranks.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from enum import IntFlag
from functools import reduce
from operator import and_, attrgetter, or_
from statistics import median

from p2ptrain.core.errors import ProtocolError

_LINEAGE = re.compile(r"[0-9a-f]{32}")
_TOKEN = struct.Struct("!QQId16s16sIdd")  # the fields of ``Token``, in their order
_SUM = struct.Struct("!I")
_IDENTITY = ("generation", "step", "lineage", "digest")  # fields that are equal in all tokens of a good vote
_identity = attrgetter(*_IDENTITY)
TOKEN_BYTES = _TOKEN.size + _SUM.size


class Flag(IntFlag):
    """Requests to the whole ring: the union of the flags in all tokens of a step, but a stop needs all members."""

    HOLD = 1
    SAVE = 2
    LEAVE = 4
    SNAPSHOT = 8  # sources were asked for a copy of the state after this step
    STOP = 16  # the step is the job's last; all members of a view know alike whether it is


_KNOWN = int(~Flag(0))


@dataclass(frozen=True, slots=True)
class Token:
    """A member's message about a reduced step before any member applies it. 84 bytes on the wire.

    The last four bytes are a CRC-32 of the others. A token passes all hops. If its ``part`` were damaged for some
    members, they would clip, and so apply, the step differently.

    Attributes:
        step: steps applied before this one.
        part: squared norm of the reduced bytes, of which the members of the same part of the model hold the same. The
            squared gradient norm is the sum over the parts of the model.
        digest, lineage: of the reduced bytes, and of the state before the step; 16 bytes each.
        unit_us: mean microseconds per micro-batch at this member; 0: not known.
        own: squared norm of this member's contribution to the sum. May be NaN.
        usual: the usual squared gradient norm; 0: not known.
    """

    generation: int
    step: int
    flags: Flag
    part: float
    digest: bytes
    lineage: bytes
    unit_us: int = 0
    own: float = 0.0
    usual: float = 0.0

    def encode(self) -> bytes:
        body = _TOKEN.pack(*astuple(replace(self, unit_us=min(self.unit_us, 2**32 - 1))))
        return body + _SUM.pack(zlib.crc32(body))

    @classmethod
    def decode_untrusted(cls, data: bytes) -> Token:
        """Raises ``ProtocolError``."""
        if len(data) != TOKEN_BYTES:
            raise ProtocolError(f"a step token has {len(data)} bytes, expected {TOKEN_BYTES}")
        body = data[: _TOKEN.size]
        if _SUM.pack(zlib.crc32(body)) != data[_TOKEN.size :]:
            raise ProtocolError("a step token was corrupted in transit")
        generation, step, flags, *figures = _TOKEN.unpack(body)
        if flags & ~_KNOWN:
            raise ProtocolError(f"a step token with unknown flags {flags:#x}")
        return cls(generation, step, Flag(flags), *figures)


def check_untrusted(data: bytes, mine: Token) -> None:
    """Raise ``ProtocolError`` unless ``data`` is a token of the same vote as ``mine``."""
    token = Token.decode_untrusted(data)
    if (token.generation, token.step) != (mine.generation, mine.step):
        raise ProtocolError(f"a step token of step {token.step + 1} in the vote of step {mine.step + 1}")


def is_lineage(text: str) -> bool:
    """Whether ``text`` has the form of a lineage: 16 bytes in hex. Check text from a peer or a file with it."""
    return _LINEAGE.fullmatch(text) is not None


def first_lineage(spec: str, digest: bytes = b"") -> str:
    """Lineage of the initial model: a hash of the job's spec and of the digest of the state's bytes, as another version
    of torch may make other weights from the same seed. Hex, 16 bytes."""
    return hashlib.blake2b(spec.encode() + digest, digest_size=16).hexdigest()


def joined_digest(digests: bytes) -> bytes:
    """The digest of a split model's step, from its stages' digests in order; 16 bytes each."""
    return hashlib.blake2b(digests, digest_size=16).digest()


def next_lineage(lineage: str, digest: bytes) -> str:
    """Lineage after a step whose reduced bytes have ``digest`` was applied to a state of ``lineage``."""
    return hashlib.blake2b(bytes.fromhex(lineage) + digest, digest_size=16).hexdigest()


def difference(mine: Token, other: Token) -> str:
    """In words, the first difference between two tokens of one vote; empty if there is none."""
    names = (name for name in _IDENTITY if getattr(mine, name) != getattr(other, name))
    return next((f"{name} of step {mine.step + 1}" for name in names), "")


# ------------------------------------------------------------------------------------------------------------- refusals


LEAST_STEPS = 8
"""A member that saw fewer commits does not know the usual norm."""
SAME = 1e-6
"""How far two members' figures of the same bytes may differ, relative: they may sum the squares in another order."""


class NormGuard:
    """Remembers the usual gradient norm.

    Args:
        outlier_factor: norms above this multiple of the usual one are outliers; 0: none are.
    """

    def __init__(self, outlier_factor: float) -> None:
        self._factor = outlier_factor
        self._norms: deque[float] = deque(maxlen=64)

    def committed(self, square_sum: float) -> None:
        self._norms.append(square_sum)

    def forget(self) -> None:
        self._norms.clear()

    @property
    def usual(self) -> float:
        return median(self._norms) if len(self._norms) >= LEAST_STEPS else 0.0

    def limit(self, usual: float, *, lenient: bool) -> float:
        """The largest squared norm that is no outlier. ``usual``: 0 if it is not known."""
        return self._factor**2 * usual if self._factor > 0 and usual > 0 and not lenient else math.inf

    def refuses(self, own: float, *, lenient: bool) -> bool:
        return not (math.isfinite(own) and own <= self.limit(self.usual, lenient=lenient))


@dataclass(frozen=True, slots=True)
class TokenFault:
    """Why a step cannot be committed.

    Attributes:
        cause: as ``Report.cause``.
        suspect: its rank; None if the tokens do not tell.
        what: text for people. It follows the suspect's name, or stands alone.
    """

    cause: str
    suspect: int | None
    what: str


def judge_tokens(
    tokens: Sequence[Token],
    guard: NormGuard,
    *,
    last: float = 0.0,
    stages: int = 1,
    lenient: bool = False,
    robust: bool = False,
) -> TokenFault | None:
    """Why the step of ``tokens`` cannot be committed; usually None.

    Args:
        last: squared gradient norm of the last step, which all members know.
        stages: parts of the model. lenient: of the view.
        robust: a rule withstands wrong contributions, and most members' norm counts: nobody is accused of either.
    """
    usual_identity = Counter(_identity(token) for token in tokens).most_common(1)[0][0]  # on a tie, the lowest rank's
    usual = next(token for token in tokens if _identity(token) == usual_identity)
    for rank, token in enumerate(tokens):
        if what := difference(usual, token):
            return TokenFault("digest" if token.digest != usual.digest else "", rank, f"has another {what}")
    if not robust and (fault := _false_figure(tokens, last, stages)):
        return fault
    known = sorted(token.usual for token in tokens if 0 < token.usual < math.inf)
    # Below the last norm it would be the word of few members: newcomers do not know the usual one.
    usual_norm = max(known[len(known) // 2], last) if known and last > 0 else 0.0
    limit = guard.limit(usual_norm, lenient=lenient)
    owns = [0.0 if robust else token.own for token in tokens]
    return _not_plausible(owns, [token.part for token in tokens], square_sum(tokens, last, stages), limit, stages)


def granted(tokens: Sequence[Token]) -> Flag:
    """The requests that the whole ring follows: those of any member, but a stop only if all know that it is due."""
    return reduce(or_, (token.flags for token in tokens)) & (
        ~Flag.STOP | reduce(and_, (token.flags for token in tokens))
    )


def square_sum(tokens: Sequence[Token], last: float, stages: int = 1) -> float:
    """The squared gradient norm. All members get the same bits from the same tokens; NaN or infinite: it is neither."""
    return sum((_agreed([token.part for token in tokens[stage::stages]], last) for stage in range(stages)), start=0.0)


def is_same(figure: float, claim: float) -> bool:
    """Whether two figures may be of the same bytes. All that are not finite are alike."""
    finite = math.isfinite(figure), math.isfinite(claim)
    return math.isclose(figure, claim, rel_tol=SAME) if all(finite) else not any(finite)


def _agreed(norms: Sequence[float], last: float) -> float:
    """The figure in the middle of those that several members tell of the same. If two are, the one that is nearer to
    ``last``."""
    ordered = sorted(figure if 0 <= figure < math.inf else math.inf for figure in norms)
    middle = ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]
    return min(middle, key=lambda norm: abs(math.log(norm) - math.log(last)) if min(norm, last) > 0 else math.inf)


def _false_figure(tokens: Sequence[Token], last: float, stages: int) -> TokenFault | None:
    """A figure that its sender's own bytes, or the other members, contradict."""
    for rank, token in enumerate(tokens):
        known = _agreed([peer.part for peer in tokens[rank % stages :: stages]], last)
        if token.own < 0:
            return TokenFault("figure", rank, f"told a squared norm of {token.own:.3g} of its contribution")
        if not is_same(token.part, known):
            return TokenFault("figure", rank, f"told a squared norm of {token.part:.3g}, the others {known:.3g}")
    ends = [Flag.STOP in token.flags for token in tokens]
    if 2 * sum(ends) not in (0, len(ends), 2 * len(ends)):
        rank = ends.index(2 * sum(ends) < len(ends))
        what = "ends" if ends[rank] else "goes on"
        return TokenFault("figure", rank, f"is alone in saying that the job {what} after this step")
    return None


def _not_plausible(
    owns: Sequence[float], parts: Sequence[float], total: float, limit: float, stages: int
) -> TokenFault | None:
    """A squared norm that is not finite or beyond ``limit``. ``owns``: of the contributions; ``total``: of the sum."""
    for rank, own in enumerate(owns):
        if not math.isfinite(own):
            return TokenFault("contribution", rank, "contributed a gradient that is not finite")
    if max([*owns, total]) <= limit and math.isfinite(total):
        return None
    rank = owns.index(max(owns))
    # The factor allows for rounding and a codec's feedback.
    if owns[rank] > limit or len(owns) == 1 or math.sqrt(total) <= 2 * math.fsum(map(math.sqrt, owns)):
        what = f"contributed a gradient of norm {math.sqrt(owns[rank]):.3g}, an outlier"
        return TokenFault("contribution", rank, what)
    if len(owns) == stages:  # nobody else holds the same sum
        rank = max(range(stages), key=lambda rank: parts[rank] if parts[rank] >= 0 else math.inf)
        return TokenFault("figure", rank, f"told a squared norm of {parts[rank]:.3g}, more than was contributed")
    what = f"the sum has a norm of {math.sqrt(total):.3g}, which does not match the members' contributions"
    return TokenFault("contribution", None, what)


def odd_ones_out(digests: Sequence[bytes], stages: int = 1) -> set[int]:
    """Ranks whose digest differs from the most frequent one among the members that hold the same of ``stages`` parts.
    On a tie the lowest rank's digest counts."""
    odd = set()
    for stage in range(stages):
        same_part = digests[stage::stages]
        usual = Counter(same_part).most_common(1)[0][0]
        odd |= {stages * replica + stage for replica, digest in enumerate(same_part) if digest != usual}
    return odd


# --------------------------------------------------------------------------------------------------------------- shares


PROBE_PERCENT = 5
"""How much of a ring's time probing whether an idle member became faster may cost."""


class Shares:
    """Each member's micro-batches in one step of a view: consecutive ranges in rank order. Immutable.

    Args:
        counts: micro-batches by rank.
        idle_steps: for each rank, the number of consecutive steps without a micro-batch.
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
        return Shares(add_probe(balance_counts(sum(self.counts), unit_us), unit_us, idle), idle)


@dataclass(frozen=True, slots=True)
class ShareRule:
    """How the members share the micro-batches of a step.

    Attributes:
        by_size: in proportion to the members' data (``by_size``), whatever their speed. False: by measured speed.
        equal: equal counts, or one more for some, whatever the members' speed. Then ``by_size`` is False.
        most: the largest share of a step for one member.
        sample: members that take part in a step, drawn anew for each; 0: all.
        seed: of the draw.
    """

    by_size: bool = False
    most: float = 1.0
    sample: int = 0
    seed: int = 0
    equal: bool = False

    def of_step(self, counts: Sequence[int], step: int) -> Shares:
        """The shares of a step that do not depend on the one before. ``counts``: those of the view, in rank order."""
        if not 0 < self.sample < len(counts):
            return Shares(counts)
        drawn = sorted(range(len(counts)), key=lambda rank: self._draw(step, rank))[: self.sample]
        return Shares(by_size(sum(counts), [count * (rank in drawn) for rank, count in enumerate(counts)], self.most))

    def _draw(self, step: int, rank: int) -> bytes:
        return hashlib.blake2b(struct.pack("!qqq", self.seed, step, rank), digest_size=8).digest()


def by_size(micro_batches: int, sizes: Sequence[int], most: float = 1.0) -> list[int]:
    """Counts in rank order that sum to ``micro_batches``, in proportion to ``sizes``, and at least 1 for a size above
    0. At least one size is above 0. ``most``: see ``ShareRule``."""
    limit = max(int(_limit(sizes, most)), 1)
    capped = [min(size, limit) for size in sizes]
    total = sum(capped)
    counts = [micro_batches * size // total for size in capped]
    rest = sorted(range(len(sizes)), key=lambda rank: (-(micro_batches * capped[rank] % total), rank))
    for rank in rest[: micro_batches - sum(counts)]:
        counts[rank] += 1
    for rank, size in enumerate(sizes):
        if size and not counts[rank]:
            counts[counts.index(max(counts))] -= 1
            counts[rank] = 1
    return counts


def _limit(sizes: Sequence[int], most: float) -> float:
    """The size that larger ones count as, so that none is more than the share ``most`` of all."""
    largest, limit = sorted(sizes, reverse=True), float(max(sizes))
    for number, size in enumerate(largest):
        others, left = sum(largest[number:]), 1 - number * most
        if left <= 0 or not size:
            return min(size for size in sizes if size)
        if size * left <= most * others:
            break
        limit = most * (others - size) / (left - most) if left > most else float(size)
    return limit


def balance_counts(micro_batches: int, unit_us: Sequence[int]) -> list[int]:
    """Counts in rank order that sum to ``micro_batches``, with the least makespan. ``unit_us``: microseconds per
    micro-batch at each member; 0: not known, which counts as the median of the known.

    The makespan is found by bisection, and each member gets what fits into it. Of the members that need exactly the
    makespan, the highest ranks do one less.
    """
    units = _known(unit_us)
    low, high = -1, micro_batches * min(units)  # the makespan of the fastest member alone
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


def add_probe(counts: Sequence[int], unit_us: Sequence[int], idle_steps: Sequence[int]) -> list[int]:
    """``counts``, or, if it is time to probe whether an idle member became faster, the same with a micro-batch for it
    from the busiest member. Probes cost at most ``PROBE_PERCENT`` of the time if the idle member is still slow.
    ``idle_steps``: for each rank, the number of consecutive steps without a micro-batch."""
    units = _known(unit_us)
    span = max(1, *(count * unit for count, unit in zip(counts, units, strict=True)))
    for rank, (count, idle) in enumerate(zip(counts, idle_steps, strict=True)):
        wait = max(0, units[rank] - span)
        if count == 0 and idle > 0 and PROBE_PERCENT * idle * span >= 100 * wait:
            busiest = max(range(len(counts)), key=lambda other: (counts[other] * units[other], -other))
            if counts[busiest] > 1:
                return [value + (other == rank) - (other == busiest) for other, value in enumerate(counts)]
    return list(counts)


def _known(unit_us: Sequence[int]) -> list[int]:
    known = sorted(unit for unit in unit_us if unit)
    usual = known[len(known) // 2] if known else 1
    return [unit or usual for unit in unit_us]
