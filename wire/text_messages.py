"""Messages that carry text between a client and a verifier, and drafts between a verifier and its drafters.

A client asks a verifier to continue a prompt or a chat with an HttpRequest (``wire.http_messages``), whose body is a
``roles.serving.texts.TextRequest`` in msgpack. Each HttpPart of the answer is a TextNews in msgpack.

A drafter guesses the next tokens of a verifier's session::

    verifier → drafter   (purpose ``draft``)   DraftOpen, then one bulk frame (the session's token ids)
    drafter → verifier   DraftReady, then Drafts; StreamRefused if it cannot draft, or cannot go on
    verifier → drafter   Verdict: which drafts were right, and the tokens after them. StreamClose

    seed → verifier      DrafterList
    seed → worker        DraftOrder
    verifier, drafter → seed   Serving

On every idle connection both sides send KeepAlive. The ``stream`` in a frame's header is the number of the session,
given by the verifier, so several may be open at once. The ``generation`` in the header of Drafts is the epoch, and in
that of a Verdict its number. Token ids of drafts are int32, little-endian.
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any

from p2ptrain.core.errors import (
    ConfigError,
    JobFailed,
    NetworkError,
    P2PTrainError,
    ProtocolError,
    Refused,
    ResourceError,
    StorageError,
    UserError,
)
from p2ptrain.core.serving import Sampling
from p2ptrain.core.texts import printable, shortened
from wire.chain_messages import MAX_POSITIONS, Positions
from wire.messages import Message, Silence
from wire.schema import Amount, Bound, ContentIdOrNone, Count, Declared, Figure, Host, Id, Port, Record, Share


class StreamRefused(Message, kind=71):
    """The request is not answered, or not to its end, or the session is not drafted for. Fields as in ``Refuse``.

    Attributes:
        retry_after_s: time after which another attempt may succeed; 0: unknown.
    """

    code: str
    reason: str
    remedy: str = ""
    retry_after_s: Annotated[int, Bound(0, 86400)] = 0


_CODES: dict[str, type[P2PTrainError]] = {
    "bad-request": UserError,
    "wrong-settings": ConfigError,
    "no-memory": ResourceError,
    "damaged": StorageError,
    "lost-a-stage": NetworkError,
    "failed": JobFailed,
    "protocol-error": ProtocolError,
}
"""Code → class. If an error has several of these classes, the last one counts, so subclasses come last."""


def encode_refusal(error: P2PTrainError) -> StreamRefused:
    code = error.code
    for name, kind in _CODES.items():
        if isinstance(error, kind):
            code = name
    return StreamRefused(shortened(code, 64), shortened(error.message), shortened(error.remedy), error.retry_after_s)


def error_untrusted(message: StreamRefused) -> P2PTrainError:
    """A refusal as an error for people. Never raises."""
    text, remedy = printable(message.reason), printable(message.remedy)
    kind = _CODES.get(message.code)
    if kind is None or kind is ProtocolError:
        return Refused(printable(message.code, 64), text, remedy=remedy, retry_after_s=message.retry_after_s)
    return kind(text, remedy=remedy)


class StreamClose(Message, kind=74):
    """The sender wants no more of this session's drafts."""


MOST_PRIORITY = 1 << 31
MOST_TURNS = 1024
MOST_STOPS, STOP_CHARS = 16, 1024
MOST_MODELS, MODEL_CHARS = 16, 255
"""Most models of one verifier, and letters of a model's name."""


class TextNews(Record):
    """The next part of a text.

    Attributes:
        prompt_tokens, left_out: of the first part: length of the prompt, and turns that did not fit.
        text, tokens: new text in whole characters, and the tokens since the last part.
        ended, stats: of the last part: how the text ended, and figures by name.
    """

    prompt_tokens: Count = 0
    left_out: Count = 0
    text: str = ""
    tokens: tuple[Annotated[int, Bound(0, 2**31 - 1)], ...] = ()
    ended: Annotated[str, Bound(pattern="(stop|end|length|cancelled)?")] = ""
    stats: dict[str, Any] = field(default_factory=dict)


# ---------------------------------------------------------------------------------------------------------- speculation


MAX_DRAFTERS = 64
"""Most drafters that a verifier is told about and uses: with long names they fill a frame."""
MAX_DEPTH = 256
"""Most drafts ahead of the verified text: more than a fast drafter makes during a round trip around the world."""
Depth = Annotated[int, Bound(0, MAX_DEPTH)]
StatName = Annotated[str, Bound(pattern="[a-z][a-z0-9_]{0,39}")]


class DraftOpen(Message, kind=59):
    """Verifier to drafter: open a session. The bulk frame that follows has its ids so far (int32, little-endian).

    Attributes:
        count, prompt: ids in the bulk frame, and of the prompt; the token at ``prompt`` has sample index 0.
        positions: most positions that the session may have.
        vocab_size, tokenizer: of the verifier's model, as ids must mean the same; ``tokenizer`` is a digest.
        depth: most positions to draft beyond the verified ones.
        silence_s: after this long without a message each side closes; each sends at least four times as often.
        sampling: a ``p2ptrain.core.serving.Sampling``.
    """

    count: Positions
    prompt: Annotated[int, Bound(1, MAX_POSITIONS)]
    positions: Positions
    vocab_size: Annotated[int, Bound(1, 1 << 31)]
    tokenizer: Annotated[str, Bound(0, 128)]
    depth: Depth
    silence_s: Silence
    sampling: Sampling

    def check(self) -> None:
        if not self.prompt <= self.count <= self.positions:
            counts = f"{self.count} ids ({self.prompt} in the prompt), {self.positions} positions"
            raise ProtocolError(f"invalid session: {counts}")


class DraftReady(Message, kind=60):
    """The ids are processed, and drafts follow."""


class Drafts(Message, kind=62):
    """Drafter to verifier: drafted ``tokens``, from ``position`` of the session on."""

    position: Positions
    tokens: Annotated[bytes, Bound(1, 4 * MAX_DEPTH)]


class Verdict(Message, kind=63):
    """Verifier to drafter: newly verified are the next ``right`` drafts of this drafter, then ``tokens``.

    Attributes:
        depth: as in ``DraftOpen``, from now on; 0 pauses drafting.
    """

    right: Positions
    depth: Depth
    tokens: bytes


class DrafterAddress(Message, kind=66):
    """A drafter and its address. ``model`` is for display; ``tokenizer`` is a digest. ``role``: of its certificate, as
    workers draft, too."""

    peer_id: Id
    name: str
    host: Host
    port: Port
    model: str
    tokenizer: str
    role: Annotated[str, Bound(pattern="drafter|worker")] = "drafter"


class DraftOrder(Message, kind=65):
    """Seed to worker: draft for verifiers with your draft model; ``model`` is the served one. Empty: no longer."""

    model: Annotated[str, Bound(0, MODEL_CHARS)]


class DrafterList(Message, kind=67):
    """Seed to verifier: all drafters that are connected now."""

    drafters: Annotated[list[DrafterAddress], Bound(0, MAX_DRAFTERS)]

    def check(self) -> None:
        if len({item.peer_id for item in self.drafters}) < len(self.drafters):
            raise ProtocolError("the list of drafters names one twice")


class DrafterFigures(Declared):
    """A connected drafter of a verifier: its acceptance, None if it is unknown, and one-way latency."""

    peer: Id
    alpha: Share | None = None
    latency_ms: Amount = 0.0


class ServingFacts(Declared):
    """One model that a verifier or a drafter serves.

    Attributes:
        model, tokenizer: the model's name, and a digest of its tokenizer.
        context: most positions; 0 if unknown.
        http: address of the HTTP endpoint; empty without one.
        sessions: number of open sessions.
        stats: figures of the last seconds, and totals, by name (tokens_per_s, alpha, accepted_length, ...).
        drafters: of a verifier.
        weights: tells models of the same name apart (``TensorTable.fingerprint``).
        loaded: share of the model that is loaded; below 1 it writes no text yet.
        upstream: an existing HTTP server writes the text, and the verifier passes requests on to it.
    """

    model: Annotated[str, Bound(1, MODEL_CHARS)]
    vocab_size: Annotated[int, Bound(0, 1 << 31)] = 0
    context: Count = 0
    tokenizer: ContentIdOrNone = ""
    http: str = ""
    sessions: Count = 0
    stats: Annotated[dict[StatName, Figure], Bound(0, 64)] = field(default_factory=dict)
    drafters: Annotated[list[DrafterFigures], Bound(0, MAX_DRAFTERS)] = field(default_factory=list)
    weights: ContentIdOrNone = ""
    loaded: Share = 1.0
    upstream: bool = False

    @property
    def is_ready(self) -> bool:
        return self.loaded >= 1

    @property
    def state(self) -> str:
        """For people; empty: as usual."""
        if self.upstream:
            return "upstream" if self.is_ready else "upstream, away"
        return "" if self.is_ready else f"loading, {self.loaded:.0%}"

    @property
    def label(self) -> str:
        return f"{self.model} ({self.state})" if self.state else self.model


class Serving(ServingFacts, Message, kind=68):
    """Verifier or drafter to seed: one model that it serves; sent when that changes, and once a second while it
    works."""
