"""One session on one stage, as far as it can be known without computing: what is taken, what is kept, what is replayed.

A pure core. Theory of operation: a ``Work`` is *checked* before a byte of its payload is allocated, *admitted* when the
payload is there, and *done* when it was computed. A session has an attempt; what is of an older one is read off the
wire and forgotten. Between ``resume`` calls the attempt is fixed, and where the chain broke nothing more is admitted.

What a stage gave on is kept as it was sent, so that a replay is the same bytes in fewer, longer works.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from p2ptrain.core.activations import ENCODINGS, IDS, activation_bytes
from p2ptrain.core.errors import ProtocolError, Refused
from wire.chain_messages import Work

WORK_POSITIONS = 2048
"""In one ``Work`` at most: longer prompts come in several, which flow through the chain one behind the other."""
MOST_QUEUED = 256
"""Works of a session that wait on its first stage: ids are small, and a client's requests must not wait behind them."""
QUEUED_FROM_STAGE, QUEUED_BYTES = 4, 32 << 20
"""Works, and bytes, of a session that a stage before may have sent ahead of their turn; more stay with the sender."""
STALE = "stale-attempt"


@dataclass(frozen=True, slots=True)
class Kept:
    """What was given on at positions [start, start + count)."""

    start: int
    count: int
    encoding: str
    payload: memoryview


class History:
    """What a stage gave on, position by position."""

    def __init__(self) -> None:
        self._kept: list[Kept] = []

    @property
    def positions(self) -> int:
        return self._kept[-1].start + self._kept[-1].count if self._kept else 0

    def cut(self, keep: int) -> None:
        """Forget all but the first ``keep`` positions."""
        while self._kept and self._kept[-1].start >= keep:
            self._kept.pop()
        if self._kept and self.positions > keep:
            cut = self._kept.pop()
            self._kept.append(self._part(cut, keep - cut.start))

    def append(self, encoding: str, count: int, payload: memoryview) -> None:
        """``payload`` is what was sent for the next ``count`` positions; it stays unchanged."""
        self._kept.append(Kept(self.positions, count, encoding, payload))

    def runs(self, stop: int, most: int = WORK_POSITIONS) -> Iterator[Kept]:
        """The first ``stop`` positions, in runs of at most ``most`` of one encoding, in order."""
        gathered: list[Kept] = []
        count = 0
        for kept in self._kept:
            if kept.start >= stop:
                break
            piece = kept if kept.start + kept.count <= stop else self._part(kept, stop - kept.start)
            if gathered and (gathered[-1].encoding != piece.encoding or count + piece.count > most):
                yield self._joined(gathered, count)
                gathered, count = [], 0
            gathered.append(piece)
            count += piece.count
        if gathered:
            yield self._joined(gathered, count)

    def _part(self, kept: Kept, count: int) -> Kept:
        pieces = _planes(kept)
        shares = (piece[: count * piece.nbytes // kept.count] for piece in pieces)
        return Kept(kept.start, count, kept.encoding, memoryview(b"".join(shares)))

    def _joined(self, pieces: list[Kept], count: int) -> Kept:
        if len(pieces) == 1:
            return pieces[0]
        planes = zip(*(_planes(piece) for piece in pieces), strict=True)
        data = b"".join(part for plane in planes for part in plane)
        return Kept(pieces[0].start, count, pieces[0].encoding, memoryview(data))


def _planes(kept: Kept) -> tuple[memoryview, memoryview]:
    """What each position has beside its elements, and the elements: they lie apart (``core.activations``)."""
    beside = ENCODINGS[kept.encoding][1] * kept.count
    return kept.payload[:beside], kept.payload[beside:]


@dataclass(frozen=True, slots=True)
class Terms:
    """What a session was opened for, on one stage of it.

    Attributes:
        index: of the stage, of ``stages``.
        width: elements of the hidden state of a position.
        encoding, prefill_encoding: of what is given on; the second where the client says that a work is of a prompt.
    """

    session: str
    index: int
    stages: int
    positions: int
    width: int
    encoding: str
    prefill_encoding: str

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.stages - 1

    @property
    def kept_position_bytes(self) -> int:
        """Of what is kept for a replay (``History``), of one position at most."""
        given_on = {self.encoding, self.prefill_encoding}
        return 0 if self.last else max(activation_bytes(each, 1, self.width) for each in given_on)

    def payload_bytes_untrusted(self, work: Work) -> int:
        """Bytes of the payload that comes behind ``work``.

        Raises:
            ProtocolError: no correct client or stage sends such a work to this stage. Nothing was allocated for it.
        """
        if not 0 < work.count <= WORK_POSITIONS:
            raise ProtocolError(f"a work of {work.count} positions; 1 to {WORK_POSITIONS} are allowed")
        if not 0 <= work.keep <= self.positions - work.count:
            text = f"a work of {work.count} positions after {work.keep}, and the session is for {self.positions}"
            raise ProtocolError(text)
        if not self.index <= work.last < self.stages:
            raise ProtocolError(f"stage {self.index} of {self.stages} is given a work that ends at {work.last}")
        if not 0 <= work.picks <= (work.count if work.last == self.stages - 1 else 0):
            raise ProtocolError(f"{work.picks} tokens to pick of a work of {work.count} that ends at {work.last}")
        if not (0 <= work.draw < 1 << 31 and 0 <= work.number < 1 << 53):
            raise ProtocolError("a work or a draw with an impossible number")
        if len(work.spent_us) != self.index or any(not 0 <= each < 1 << 53 for each in work.spent_us):
            raise ProtocolError(f"stage {self.index} is told what {len(work.spent_us)} stages before it took")
        if self.first and work.encoding != IDS:
            raise ProtocolError(f"the first stage takes token ids, not {work.encoding[:40]!r}")
        if not self.first and work.encoding != self.out_encoding(work):
            raise ProtocolError(f"hidden states in {work.encoding[:40]!r}, and the session has others")
        return activation_bytes(work.encoding, work.count, self.width)

    def out_encoding(self, work: Work) -> str:
        """Of the hidden states that this work is, or becomes."""
        return self.prefill_encoding if work.prefill else self.encoding


@dataclass(slots=True, eq=False)
class StageSession:
    """See the module's docstring.

    Attributes:
        position: how much history the next work may keep.
        broken: nothing more is admitted until the client raises the attempt.
        queue: admitted works and their payloads, in order.
    """

    terms: Terms
    attempt: int
    position: int = 0
    broken: bool = False
    closed: bool = False
    queue: deque[tuple[Work, bytearray]] = field(default_factory=deque)
    history: History = field(default_factory=History)

    @property
    def crowded(self) -> bool:
        """Whether the stage before is to be held back."""
        queued_bytes = sum(len(payload) for _, payload in self.queue)
        return len(self.queue) >= QUEUED_FROM_STAGE or queued_bytes >= QUEUED_BYTES

    def admit(self, work: Work, payload: bytearray) -> bool:
        """Take a checked work in; False where it is forgotten.

        Raises:
            ProtocolError: it is of an attempt that the client has not told of, or more than may wait.
        """
        if work.attempt > self.attempt:
            raise ProtocolError(f"a work of attempt {work.attempt}, and the client told of {self.attempt}")
        if work.attempt < self.attempt or self.broken or self.closed:
            return False
        if len(self.queue) >= MOST_QUEUED:
            raise ProtocolError(f"more than {MOST_QUEUED} works wait: the client sends more than it may")
        self.queue.append((work, payload))
        return True

    def current(self, work: Work) -> bool:
        """Whether what comes of ``work`` still counts."""
        return work.attempt == self.attempt and not self.broken and not self.closed

    def begin(self, work: Work) -> None:
        """Raises ``ProtocolError`` where its history is not here."""
        if work.keep > self.position:
            raise ProtocolError(f"{work.keep} positions are to be kept, and there are {self.position}")

    def done(self, work: Work, payload: memoryview) -> None:
        """``work`` was computed, and ``payload`` came of it."""
        self.history.cut(work.keep)
        self.position = work.keep + work.count
        if not self.terms.last:
            self.history.append(self.terms.out_encoding(work), work.count, payload)

    def fail(self) -> None:
        """It goes no further in this attempt."""
        self.broken = True
        self.queue.clear()

    def close(self) -> None:
        self.closed = True
        self.queue.clear()

    def raise_attempt(self, attempt: int) -> None:
        """What is of an older attempt is forgotten. Raises ``Refused``: it is not newer."""
        if attempt <= self.attempt:
            raise Refused(STALE, f"attempt {attempt} is not newer than attempt {self.attempt}")
        self.attempt, self.broken = attempt, False
        self.queue.clear()

    def cut(self, keep: int) -> int:
        """Keep at most so much history; the position now."""
        self.position = min(self.position, keep)
        self.history.cut(self.position)
        return self.position

    def replay(self, *, number: int, stop: int, last: int) -> Iterator[tuple[Work, memoryview]]:
        """The works that bring the next stage to position ``stop``, from the first one on, ending at stage ``last``.

        Raises:
            Refused: this stage does not have them.
        """
        if self.terms.last or not self.terms.index < last < self.terms.stages or stop > self.history.positions:
            have = 0 if self.terms.last else self.history.positions
            raise Refused(
                "no-history", f"stage {self.terms.index} has {have} positions to replay, not {stop} to {last}"
            )
        spent = [0] * (self.terms.index + 1)
        for run in self.history.runs(stop):
            work = Work(
                self.terms.session,
                self.attempt,
                number,
                run.start,
                run.count,
                run.encoding,
                last,
                picks=0,
                draw=0,
                spent_us=spent,
                prefill=run.encoding != self.terms.encoding,
            )
            yield work, run.payload
