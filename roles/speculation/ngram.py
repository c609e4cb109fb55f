"""Prompt look-up: what followed the last time that these tokens came is what follows now, as a guess.

A. Saxena's prompt lookup decoding, as in transformers' ``prompt_lookup_num_tokens``: of the longest suffix of the
history that came before, its most recent occurrence counts. It costs no model, and it guesses well where text repeats
itself: code, summaries, a conversation about a document.

The index grows and is cut with the history. With each position it keeps, for each length, where the tokens that end
there ended before: that is the answer to a look-up, and what cutting the position off has to put back.
"""

from __future__ import annotations

from collections.abc import Iterable

from p2ptrain.core.activations import ID_BYTES, IDS, decode_ids
from p2ptrain.core.errors import ProtocolError, UserError
from p2ptrain.core.serving import PartSpec, Ran, Sampling

LONGEST = 4
AHEAD = 8
"""Guesses at a time: they cost next to nothing, and to ask for each by itself would."""
SHORTEST = 2
"""A single token that came before says little of what follows: such guesses are mostly wrong, and cost a check each."""


class NgramIndex:
    """The history of one session, and where its tokens came before.

    ``push`` and ``guess`` take the same time however long the history is; ``cut`` is as long as what is cut off.

    Args:
        longest, shortest: lengths, in tokens, of the suffixes that are looked for, 1 <= shortest <= longest.

    Attributes:
        ids: the history.
    """

    def __init__(self, ids: Iterable[int] = (), *, longest: int = LONGEST, shortest: int = SHORTEST) -> None:
        assert 1 <= shortest <= longest
        self.ids: list[int] = []
        self._lengths = range(shortest, longest + 1)
        self._last: dict[tuple[int, ...], int] = {}  # tokens → the last position at which they end
        self._before: list[tuple[int, ...]] = []  # of each position, by length: the same of before it was there; or -1
        self.extend(ids)

    def __len__(self) -> int:
        return len(self.ids)

    def push(self, token: int) -> None:
        """One more token."""
        self.ids.append(token)
        end = len(self.ids)
        before = []
        for length in self._lengths:
            if length > end:
                break
            key = tuple(self.ids[end - length :])
            before.append(self._last.get(key, -1))
            self._last[key] = end - 1
        self._before.append(tuple(before))

    def extend(self, ids: Iterable[int]) -> None:
        """More tokens."""
        for token in ids:
            self.push(token)

    def cut(self, keep: int) -> None:
        """Forget all but the first ``keep`` positions."""
        while len(self.ids) > keep:
            end = len(self.ids)
            for length, before in zip(self._lengths, self._before.pop(), strict=False):
                key = tuple(self.ids[end - length :])
                if before < 0:
                    del self._last[key]
                else:
                    self._last[key] = before
            self.ids.pop()

    def guess(self) -> int | None:
        """What may follow; None where no suffix came before."""
        if not self.ids:
            return None
        for before in reversed(self._before[-1]):
            if before >= 0:
                return self.ids[before + 1]
        return None

    def guesses(self, most: int) -> tuple[int, ...]:
        """What may follow, one after the other, up to where nothing is known."""
        size = len(self.ids)
        while len(self.ids) < size + most and (token := self.guess()) is not None:
            self.push(token)
        made = tuple(self.ids[size:])
        self.cut(size)
        return made

    def validate(self) -> None:
        """Invariants, for tests."""
        assert len(self._before) == len(self.ids)
        fresh = NgramIndex(self.ids, longest=self._lengths[-1], shortest=self._lengths[0])
        assert (fresh._last, fresh._before) == (self._last, self._before)


class NgramEngine:
    """A ``roles.stage_engine.StageEngine`` that looks up what other engines compute. It may be called on any thread.

    Where one token is to be picked ``run`` gives ``ahead`` of them, one after the other; fewer where it knows no more.

    Args:
        vocab_size: token ids are below it.
    """

    def __init__(
        self, vocab_size: int, *, longest: int = LONGEST, shortest: int = SHORTEST, ahead: int = AHEAD
    ) -> None:
        self.spec = PartSpec("", 0, 1, 1)
        self.width = 0
        self.vocab_size = vocab_size
        self.encoding = IDS
        self.weights_bytes = 0
        self.cache_position_bytes = 512 * (longest + 1 - shortest)  # tuples and entries of dicts: by a rough count
        self.device = "look-up"
        self._lengths = (longest, shortest)
        self._ahead = ahead
        self._sessions: dict[str, tuple[int, NgramIndex]] = {}
        self._guessed: dict[str, tuple[int, ...]] = {}  # by session, in its last run

    def open(self, session: str, *, positions: int, sampling: Sampling) -> None:
        """As of ``StageEngine``. How tokens are picked does not matter."""
        if session in self._sessions:
            raise UserError(f"there is a session {session!r} already", remedy="close it first")
        longest, shortest = self._lengths
        self._sessions[session] = positions, NgramIndex(longest=longest, shortest=shortest)

    def run(
        self,
        session: str,
        *,
        keep: int,
        payload: memoryview,
        count: int,
        encoding: str,
        out_encoding: str,
        picks: int,
        draw: int,
    ) -> Ran:
        """As of ``StageEngine``, but that it may give none or several for the pick, of which there is one at most."""
        positions, index = self._sessions[session]
        if not 0 <= picks <= min(count, 1):
            raise ProtocolError(f"{picks} tokens are to be looked up of {count} positions, and one is the most")
        if not 0 <= keep <= len(index):
            raise ProtocolError(f"{keep} positions are to be kept, and there are {len(index)}")
        if keep + count > positions:
            raise ProtocolError(f"{keep + count} positions, and the session is for {positions}")
        if encoding != IDS or payload.nbytes != count * ID_BYTES:
            raise ProtocolError(f"{payload.nbytes} bytes are no {count} token ids")
        ids = decode_ids(bytes(payload))
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise ProtocolError(f"a token id is none of the {self.vocab_size} that there are")
        index.cut(keep)
        index.extend(ids)
        self._guessed[session] = index.guesses(self._ahead) if picks else ()
        return Ran(memoryview(b""), self._guessed[session])

    def close(self, session: str) -> None:
        """As of ``StageEngine``."""
        self._sessions.pop(session, None)
        self._guessed.pop(session, None)
