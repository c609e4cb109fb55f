"""A model that writes: the interface of its sessions and their passes, and the core that decodes one text. Pure.

``local_model.LocalModel`` computes in this process, ``chain.StageChain`` on a chain of workers.

The text is the model's alone. Each pass takes the last token and any drafts after it, and samples after each of them.
The first sample is right whatever the drafts are. A later sample is right if all drafts before it equal the samples
before it. So the text is that of plain decoding, whatever is drafted; drafts decide only how much of it a pass gives.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol

from p2ptrain.core.serving import Sampling
from wire.chain_messages import MAX_REQUEST_POSITIONS


@dataclass(frozen=True, slots=True)
class PassRequest:
    """Cut a session's history to its first ``keep`` positions, append ``ids``, and sample at the last ``samples``.

    ``targets``: token ids whose log-probabilities are wanted, one after each of the last positions."""

    keep: int
    ids: tuple[int, ...]
    samples: int = 0
    targets: tuple[int, ...] = ()

    @property
    def stop(self) -> int:
        return self.keep + len(self.ids)

    def sample_index(self, sample_from: int) -> int:
        """Index of the first sample, which numbers its random draw; the token at ``sample_from`` has index 0."""
        return self.stop - self.samples + 1 - sample_from if self.samples else 0


@dataclass(frozen=True, slots=True)
class PassResult:
    """The samples of a pass, and the scores of its targets.

    Attributes:
        took_s: duration of computing it; for a chain the time since it was sent.
        spent_us: of a chain: compute time of each stage. mended: the chain was mended meanwhile.
    """

    tokens: tuple[int, ...]
    took_s: float
    spent_us: tuple[int, ...] = ()
    mended: bool = False
    scores: bytes = b""


class ModelSession(Protocol):
    """One history of tokens, with its cache.

    Attributes:
        sample_from: position of the first new token, which is the length of the prompt. A session that is used again
            gets another one.
    """

    sample_from: int

    @property
    def lost(self) -> bool:
        """The session has failed, in use or not, and can only be closed."""

    async def append(self, request: PassRequest) -> PassResult:
        """Compute a pass of up to ``MAX_REQUEST_POSITIONS`` token ids. It may be called again before the answer, for a
        pass that continues or cuts the history that the first one leaves. Answers come in the order of the calls.

        After a cancelled or failed pass the session can only be closed.

        Raises:
            P2PTrainError: the pass failed.
        """

    async def close(self) -> None:
        """Release the session. Never raises."""


class ServedModel(Protocol):
    """A model to write with.

    Attributes:
        vocab_size: token ids are below it. context: most positions; None: unknown.
        dtype: in which it computes.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def context(self) -> int | None: ...
    @property
    def dtype(self) -> str: ...

    async def open(self, *, positions: int, sampling: Sampling, sample_from: int) -> ModelSession:
        """Open a session of at most ``positions`` positions. ``sample_from``: as of ``ModelSession``.

        Raises:
            UserError: more positions than the model's context, or than fit the memory for caches.
            Refused: too many sessions are open, or their caches leave too little memory.
            ResourceError: there is too little memory.
            NetworkError: a stage is lost without a spare; it may come back.
        """

    async def close(self) -> None:
        """Release the model. Never raises."""


SHARED_CHUNK = 256
"""Positions of prompts in one pass while other texts wait for their next token."""
PLACES = 16
"""Places in a pass that have counters of their own."""


@dataclass(slots=True)
class DecodingStats:
    """Sums over one text, or over many.

    Attributes:
        passes: passes after the prompt. self_steps: passes without drafts.
        tokens: new tokens of the text. verified: drafts in passes. accepted: right drafts in passes.
        drafted: drafts received. wasted: drafts that were wrong or based on a wrong one.
        tried_at, accepted_at: by place in the pass: drafts whose predecessors were right, and the right ones of these.
        verify_s: time in passes after the prompt. wait_s: time of waits for drafts between passes.
    """

    passes: int = 0
    self_steps: int = 0
    tokens: int = 0
    verified: int = 0
    accepted: int = 0
    drafted: int = 0
    wasted: int = 0
    tried_at: list[int] = field(default_factory=lambda: [0] * PLACES)
    accepted_at: list[int] = field(default_factory=lambda: [0] * PLACES)
    verify_s: float = 0.0
    wait_s: float = 0.0

    def add(self, other: DecodingStats) -> None:
        for item in fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            both = [a + b for a, b in zip(mine, theirs, strict=True)] if isinstance(mine, list) else mine + theirs
            setattr(self, item.name, both)


@dataclass(frozen=True, slots=True)
class PassOutcome:
    """What a pass gave.

    Attributes:
        tokens: new tokens of the text. drafts: in the pass. accepted: right ones, from the first on.
        since_s: time since the previous result. prefill: the pass computed positions of the prompt.
    """

    tokens: tuple[int, ...]
    took_s: float
    since_s: float
    drafts: int = 0
    accepted: int = 0
    prefill: bool = False


class Decoding:
    """One text.

    Args:
        ids: the prompt.
        max_new_tokens, stop_ids: the text ends after so many tokens, or after one of these.
        cached: positions of the prompt that the session has already; the last position is always computed.

    Attributes:
        ids: the prompt and the new tokens. prompt_tokens: length of the prompt.
        ended: why the text ended: ``length`` or ``stop``; empty while it goes on.
        result_at: time of the last result.
    """

    def __init__(
        self, ids: Sequence[int], *, max_new_tokens: int, stop_ids: Collection[int] = (), cached: int = 0
    ) -> None:
        if not ids or max_new_tokens < 1:
            raise ValueError("a generation needs a prompt and at least one new token")
        self.ids = list(ids)
        self.prompt_tokens = len(ids)
        self.ended = ""
        self.stats = DecodingStats()
        self.result_at = 0.0
        self._stop = len(ids) + max_new_tokens
        self._stop_ids = frozenset(stop_ids)
        self._cached = min(cached, len(ids) - 1)
        self._pass: PassRequest | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(self.ids[self.prompt_tokens :])

    @property
    def in_prompt(self) -> bool:
        return len(self.ids) == self.prompt_tokens

    @property
    def draft_room(self) -> int:
        """Most drafts that the next pass can use: it gives one token more than it has right drafts."""
        return self._stop - len(self.ids) - 1

    def next_pass(self, drafts: Sequence[int] = (), *, chunk: int = MAX_REQUEST_POSITIONS) -> PassRequest:
        """The next pass: ``chunk`` positions of the prompt at most; then the last token and ``drafts``."""
        if self.in_prompt:
            stop = min(self._cached + chunk, self.prompt_tokens)
            self._pass = PassRequest(
                self._cached, tuple(self.ids[self._cached : stop]), int(stop == self.prompt_tokens)
            )
        else:
            self._pass = PassRequest(len(self.ids) - 1, (self.ids[-1], *drafts), len(drafts) + 1)
        return self._pass

    def take_samples(self, samples: Sequence[int], took_s: float, now: float) -> PassOutcome:
        """Take the samples of the pass under way. Raises ``ValueError``: they are not as many as it has."""
        asked, self._pass = self._pass, None
        if asked is None or len(samples) != asked.samples:
            raise ValueError(f"unexpected result of a pass: {len(samples)} sampled tokens")
        since_s, self.result_at = now - self.result_at, now
        if self.in_prompt:
            self._cached = asked.stop
            return PassOutcome(self._grow(samples), took_s, since_s, prefill=True)
        drafts = asked.ids[1:]
        accepted = next((at for at, token in enumerate(drafts) if token != samples[at]), len(drafts))
        tokens = self._grow(samples[: accepted + 1])
        self._count(len(drafts), accepted, min(took_s, since_s))
        return PassOutcome(tokens, took_s, since_s, len(drafts), accepted)

    def _grow(self, samples: Sequence[int]) -> tuple[int, ...]:
        size = len(self.ids)
        for token in samples:
            self.ids.append(token)
            if token in self._stop_ids:
                self.ended = "stop"
                break
            if len(self.ids) == self._stop:
                self.ended = "length"
                break
        self.stats.tokens += len(self.ids) - size
        return tuple(self.ids[size:])

    def _count(self, tried: int, accepted: int, took_s: float) -> None:
        stats = self.stats
        stats.passes += 1
        stats.self_steps += not tried
        stats.verified += tried
        stats.accepted += accepted
        stats.verify_s += took_s
        for place in range(min(accepted + 1, tried, PLACES)):
            stats.tried_at[place] += 1
            stats.accepted_at[place] += place < accepted

    def validate(self) -> None:
        assert self.prompt_tokens <= len(self.ids) <= self._stop
        assert self.ended or len(self.ids) < self._stop
