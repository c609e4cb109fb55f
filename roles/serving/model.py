"""A model that writes: the interface of its sessions and their passes, and the core that decodes one text. Pure.

``local_model.LocalModel`` computes in this process, ``chain.StageChain`` on a chain of workers.

The text is the model's alone. Each pass takes the last token and any drafts after it, and samples after each of them.
The first sample is right whatever the drafts are. A later sample is right if all drafts before it equal the samples
before it. So the text is that of plain decoding, whatever is drafted; drafts decide only how much of it a pass gives.

Where several passes may be under way, a pass may begin before the one before it is answered. It has the drafts after
those of that pass: its first draft stands for that pass's last sample. When a pass is answered and the text does not
continue as the next one assumes, all passes under way are *stale*: their samples are dropped as they come, and the
next pass cuts the history off where the text ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from p2ptrain.core.serving import Sampling
from roles.pass_queue import SHARED_CHUNK
from wire.chain_messages import MAX_REQUEST_POSITIONS


@dataclass(frozen=True, slots=True)
class PassRequest:
    """Cut a session's history to its first ``keep`` positions, append ``ids``, and sample at the last ``samples``.

    ``targets``: token ids whose log-probabilities are wanted, one after each of the last positions. ``tops``,
    ``masks``: as of ``p2ptrain.core.serving.Pass``."""

    keep: int
    ids: tuple[int, ...]
    samples: int = 0
    targets: tuple[int, ...] = ()
    tops: int | None = None
    masks: bytes = b""

    @property
    def stop(self) -> int:
        return self.keep + len(self.ids)

    def sample_index(self, sample_from: int) -> int:
        """Index of the first sample, which numbers its random draw; the token at ``sample_from`` has index 0."""
        return self.stop - self.samples + 1 - sample_from if self.samples else 0


@dataclass(frozen=True, slots=True)
class PassResult:
    """The samples of a pass, and ``scores`` and ``tops`` as of ``p2ptrain.core.serving.Ran``.

    Attributes:
        took_s: duration of computing it; for a chain the time since it was sent.
        spent_us: of a chain: compute time of each stage. mended: the chain was mended meanwhile.
    """

    tokens: tuple[int, ...]
    took_s: float
    spent_us: tuple[int, ...] = ()
    mended: bool = False
    scores: bytes = b""
    tops: bytes = b""

    @property
    def busy_s(self) -> float:
        """Time of its slowest stage: so soon after it another pass is answered, if it was sent as soon."""
        return max(self.spent_us) / 1e6 if self.spent_us else self.took_s


class ModelSession(Protocol):
    """One history of tokens, with its cache.

    Attributes:
        most_passes: passes that may be under way at a time; 1 if a second one would only wait for the first.
        cached: positions that it had when it was opened, because other sessions had computed them.
        sample_from: position of the first new token, which is the length of the prompt.
    """

    sample_from: int

    @property
    def most_passes(self) -> int: ...
    @property
    def cached(self) -> int: ...

    async def append(self, request: PassRequest) -> PassResult:
        """Compute a pass of 1 to ``MAX_REQUEST_POSITIONS`` token ids. It may be called again before the answer, up to
        ``most_passes`` times, for a pass that continues or cuts the history that the first one leaves. Answers come in
        the order of the calls.

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
        preemptions: how often a session lost its memory to older ones, and was computed again.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def context(self) -> int | None: ...
    @property
    def dtype(self) -> str: ...
    @property
    def preemptions(self) -> int: ...

    async def open(
        self, *, positions: int, sampling: Sampling, sample_from: int, ids: Sequence[int] = (), priority: int = 0
    ) -> ModelSession:
        """Open a session of at most ``positions`` positions.

        Args:
            sample_from: as of ``ModelSession``.
            ids: the prompt. What other sessions computed of its beginning is not computed again. Their texts and this
                one do not change by that.
            priority: a model of this process computes prompts of sessions with a lower one first.

        Raises:
            UserError: more positions than the model's context, or than fit the memory for caches.
            Refused: too many sessions are open, or their caches leave too little memory.
            ResourceError: there is too little memory.
            NetworkError: a stage is lost without a spare; it may come back.
        """

    async def close(self) -> None:
        """Release the model. Never raises."""


MOST_PASSES = 8
"""Most passes of a session that may be under way at a time."""


@dataclass(slots=True)
class DecodingStats:
    """Sums over one text.

    Attributes:
        passes: passes after the prompt. self_steps: passes without drafts.
        tokens: new tokens of the text. verified: drafts in passes. accepted: right drafts in passes.
        drafted: drafts received. wasted: drafts that were wrong or based on a wrong one.
        judged, right: drafts whose predecessors in the pass were right, and the right ones of these.
        verify_s: time in passes after the prompt. draft_s: time of waits for drafts between passes.
    """

    passes: int = 0
    self_steps: int = 0
    tokens: int = 0
    verified: int = 0
    accepted: int = 0
    drafted: int = 0
    wasted: int = 0
    judged: int = 0
    right: int = 0
    verify_s: float = 0.0
    draft_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PassOutcome:
    """What a pass gave.

    Attributes:
        tokens: new tokens of the text. rows: positions in the pass. drafts: of these. accepted: right drafts, from the
            first on; 0 if the pass was stale.
        took_s, busy_s: as of ``PassResult``. since_s: time since the previous result.
        prefill: the pass computed positions of the prompt. scored: those of its tokens that it scored.
    """

    tokens: tuple[int, ...]
    took_s: float
    busy_s: float
    since_s: float
    rows: int
    drafts: int = 0
    accepted: int = 0
    prefill: bool = False
    scored: tuple[int, ...] = ()


class Decoding:
    """One text.

    Args:
        ids: the prompt.
        max_new_tokens, stop_ids: the text ends after so many tokens, or after one of these.
        cached: positions of the prompt that the session has already; the last position is always computed.
        tops: as of ``PassRequest``.
        scores_prompt: the passes of the prompt score its tokens, too. Then ``max_new_tokens`` may be 0.
    Attributes:
        most_passes: as of ``ModelSession``.
        ids: the prompt and the new tokens. prompt_tokens: length of the prompt.
        ended: why the text ended: ``length`` or ``stop``; empty while it goes on.
        result_at: time of the last result.
    """

    def __init__(
        self,
        ids: Sequence[int],
        *,
        max_new_tokens: int,
        stop_ids: Collection[int] = (),
        cached: int = 0,
        most_passes: int = 1,
        tops: int | None = None,
        scores_prompt: bool = False,
    ) -> None:
        self.ids = list(ids)
        self.prompt_tokens = len(ids)
        self.ended = ""
        self.stats = DecodingStats()
        self.result_at = 0.0
        self._tops, self._scores_prompt = tops, scores_prompt
        self._stop = len(ids) + max_new_tokens
        self._stop_ids = frozenset(stop_ids)
        self._cached = min(cached, len(ids) - 1)
        self._end_prompt()
        self.most_passes = most_passes
        self._passes: deque[tuple[PassRequest, int]] = deque()  # under way, each with its number of drafts
        self._stale = 0  # so many of these are, the first ones

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(self.ids[self.prompt_tokens :])

    @property
    def in_prompt(self) -> bool:
        return len(self.ids) == self.prompt_tokens

    @property
    def assumed(self) -> list[int]:
        """The drafts after the text in passes under way that are not stale: the next pass continues them."""
        positions = [token for request, _ in list(self._passes)[self._stale :] for token in request.ids]
        return [] if self.in_prompt else positions[1:]

    @property
    def _next(self) -> int:
        """Position at which the next pass begins."""
        if len(self._passes) > self._stale:
            return self._passes[-1][0].stop
        return self._cached if self.in_prompt else len(self.ids) - 1

    @property
    def may_begin(self) -> bool:
        """Another pass may begin: too few are under way, and in the prompt positions are left."""
        most = min(self.prompt_tokens, self._stop - 1)  # without new tokens the last position only has its score
        return len(self._passes) < self.most_passes and not (self.in_prompt and self._next == most)

    @property
    def needs_drafts(self) -> bool:
        """The next pass consists of drafts: the text is not known so far."""
        return self._next >= len(self.ids)

    @property
    def draft_room(self) -> int:
        """Most drafts that the next pass can use: its last sample is the last token of the text."""
        return self._stop - 1 - max(self._next, len(self.ids))

    def next_pass(self, drafts: Sequence[int] = (), *, chunk: int = MAX_REQUEST_POSITIONS) -> PassRequest:
        """The next pass: at most ``chunk`` positions of the prompt; later the last token and drafts, or only these."""
        start = self._next
        stop = start + chunk if self.in_prompt else len(self.ids)
        scores = self.in_prompt and self._scores_prompt and start < self.prompt_tokens - 1
        if scores:
            # A score takes the memory of a row of logits. What follows the last position is sampled.
            stop = min(stop, start + SHARED_CHUNK, self.prompt_tokens - 1)
        ids = (*self.ids[start:stop], *drafts)
        samples = len(ids) if not self.in_prompt else int(start + len(ids) == self.prompt_tokens)
        targets = tuple(self.ids[start + 1 : stop + 1]) if scores else ()
        request = PassRequest(start, ids, samples, targets, self._tops if samples or scores else None)
        self._passes.append((request, len(drafts)))
        return request

    def take_samples(self, samples: Sequence[int], took_s: float, now: float, busy_s: float = 0.0) -> PassOutcome:
        """Take the samples of the oldest pass under way. ``busy_s``: 0: all of the time."""
        busy_s = busy_s or took_s
        asked, drafts = self._passes.popleft()
        rows = len(asked.ids)
        since_s, self.result_at = now - self.result_at, now
        if self.in_prompt:
            self._cached = asked.stop
            self._end_prompt()
            return PassOutcome(self._grow(samples), took_s, busy_s, since_s, rows, prefill=True, scored=asked.targets)
        tokens: tuple[int, ...] = ()
        accepted = 0
        if is_stale := self._stale > 0:
            self._stale -= 1
        else:
            right = next((at for at, token in enumerate(asked.ids[1:]) if token != samples[at]), rows - 1)
            tokens = self._grow(samples[: right + 1])
            accepted = right + drafts - (rows - 1)  # if the first position is a draft, it was right
            if self._passes and not self._continues(self._passes[0][0]):
                self._stale = len(self._passes)
        # The first draft of a stale pass was judged if all drafts before it were right.
        self._count(drafts, accepted, min(took_s, since_s), judged=not is_stale or asked.keep == len(self.ids) - 1)
        return PassOutcome(tokens, took_s, busy_s, since_s, rows, drafts, accepted)

    def _end_prompt(self) -> None:
        if self._stop == self.prompt_tokens and self._cached == self.prompt_tokens - 1:
            self.ended = "length"

    def _continues(self, request: PassRequest) -> bool:
        return request.keep == len(self.ids) - 1 and request.ids[0] == self.ids[-1]

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

    def _count(self, tried: int, accepted: int, took_s: float, *, judged: bool) -> None:
        stats = self.stats
        stats.passes += 1
        stats.self_steps += not tried
        stats.verified += tried
        stats.accepted += accepted
        stats.verify_s += took_s
        if judged:
            stats.judged += min(accepted + 1, tried)
            stats.right += accepted
