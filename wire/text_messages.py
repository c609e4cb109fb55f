"""Messages of text and of speculation, as those of ``wire.messages``. Between a client and a verifier::

    client → verifier    Ask, then one bulk frame (UTF-8: the prompt, or what the turns say) → Asked | StreamRefused
    verifier → client    Piece, as text comes; in the end Written, or StreamRefused
    client → verifier    StreamClose: no more is wanted
    both ways when idle  StillHere

The ``stream`` of a frame's header is the client's number of its question, so several may be under way.

Between a verifier and its drafters, and of both to the seed::

    verifier → drafter   (purpose ``draft``)   DraftOpen, then one bulk frame → DraftReady | StreamRefused
    drafter → verifier   Drafts, its header's generation the epoch
    verifier → drafter   Verdict, its header's generation the verdict's number; StreamClose
    drafter → verifier   StreamRefused, also when a session cannot go on
    both ways when idle  StillHere
    seed → verifier      DraftersHere
    either → seed        Serving

A session is the ``stream`` of its frames' headers: the verifier numbers them from 1 on each connection. So a token
costs little more than its id: ``Drafts`` and ``Verdict`` are bare values, the tokens last, as many as there are. A
token is two bytes (little-endian) where the vocabulary's size allows it, else three.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from p2ptrain.core.errors import ProtocolError
from wire.messages import Message
from wire.schema import Bound, Count, Figure, Id, TokenOrNone


@dataclass(frozen=True, slots=True)
class StreamRefused(Message):
    """To a client: its text is not written, or no further. To a verifier: its session is not, or no longer, drafted
    for. ``code``, ``reason``, ``remedy``: as of ``Refuse``."""

    KIND: ClassVar[int] = 71
    code: str
    reason: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class StreamClose(Message):
    """No more of this text, or of this session's drafts, is wanted."""

    KIND: ClassVar[int] = 74


@dataclass(frozen=True, slots=True)
class Ask(Message):
    """Go on from the prompt in the bulk frame behind it.

    Attributes:
        sizes: bytes of each text in that frame. roles: whose turn each of them is; empty: there is one, a prompt.
        max_new_tokens: 0: as many as the model's context has room for.
        temperature, top_k, top_p: None: what the model says.
        stop: the text ends before the first of these.
        speculate: whether drafters may help.
    """

    KIND: ClassVar[int] = 69
    sizes: list[int]
    roles: list[str]
    max_new_tokens: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int
    stop: list[str]
    speculate: bool


@dataclass(frozen=True, slots=True)
class QuestionAccepted(Message):
    """It will be written. ``prompt_tokens``: of the prompt; ``left_out``: turns that did not fit."""

    KIND: ClassVar[int] = 70
    prompt_tokens: int
    left_out: int


@dataclass(frozen=True, slots=True)
class Piece(Message):
    """New text, whole characters only, and the tokens (int32, little-endian) that came since the last piece."""

    KIND: ClassVar[int] = 72
    text: str
    tokens: bytes


@dataclass(frozen=True, slots=True)
class Written(Message):
    """The text is whole. ``ended``: ``stop``, ``end``, ``length``, ``cancelled``; ``stats``: how it came about."""

    KIND: ClassVar[int] = 73
    ended: str
    stats: dict[str, Any] = field(default_factory=dict)


# ---------------------------------------------------------------------------------------------------------- speculation


MAX_DRAFTERS = 64
"""That a verifier is told of, and that it uses: with long names they fill a frame."""
StatName = Annotated[str, Bound(pattern="[a-z][a-z0-9_]{0,39}")]


@dataclass(frozen=True, slots=True)
class DraftOpen(Message):
    """Draft ahead of what follows; the bulk frame behind it has the ids so far (int32, little-endian).

    Attributes:
        count: ids in it. prompt: so many of them are the prompt's: the pick at position ``prompt`` has draw 0.
        positions: that the session may grow to.
        vocab_size, tokenizer: of the verifier's model: ids must mean the same. ``tokenizer`` is a digest.
        temperature, top_k, top_p, seed: as of ``p2ptrain.core.serving.Sampling``.
        depth: positions beyond what is verified that may be drafted.
        silence_s: after which each side gives the other up; each says something four times as often.
    """

    KIND: ClassVar[int] = 59
    count: int
    prompt: int
    positions: int
    vocab_size: int
    tokenizer: str
    temperature: float
    top_k: int
    top_p: float
    seed: int
    depth: int
    silence_s: float


@dataclass(frozen=True, slots=True)
class DraftReady(Message):
    """The ids so far are taken in, and drafts follow. ``step_ms``: that a draft takes; 0 where it is not known."""

    KIND: ClassVar[int] = 60
    step_ms: float


@dataclass(frozen=True, slots=True)
class Drafts(Message):
    """Drafted ``tokens`` from ``position`` of the session on.

    Attributes:
        position: 0: behind the drafts of the session that were sent last.
    """

    KIND: ClassVar[int] = 62
    KEYED: ClassVar[bool] = False
    position: int
    tokens: bytes


@dataclass(frozen=True, slots=True)
class Verdict(Message):
    """What is verified: of this drafter's drafts the next ``right``, then ``tokens``.

    Attributes:
        depth: as of ``DraftOpen``, from now on; 0: a pause.
    """

    KIND: ClassVar[int] = 63
    KEYED: ClassVar[bool] = False
    right: int
    depth: int
    tokens: bytes


@dataclass(frozen=True, slots=True)
class DrafterAt(Message):
    """A drafter and where it listens. ``model``: for people; ``tokenizer``: the digest."""

    KIND: ClassVar[int] = 66
    peer_id: str
    name: str
    host: str
    port: int
    model: str
    vocab_size: int
    tokenizer: str


@dataclass(frozen=True, slots=True)
class DrafterList(Message):
    """Seed to verifier: all drafters that are there now."""

    KIND: ClassVar[int] = 67
    drafters: list[DrafterAt]


@dataclass(frozen=True, slots=True)
class Served:
    """What a verifier or a drafter serves.

    Attributes:
        model: its name, for people. context: positions at most; 0: not known. tokenizer: a digest.
        http: address of the endpoint, where there is one.
        sessions: open now.
        stats: figures of the last seconds and totals, by name (tokens_per_s, alpha, accepted_length, ...).
        drafters: of a verifier: peer ids of those that it is connected to.
        drafter_alpha, drafter_latency_ms, drafter_share: of each of them: its acceptance, one way to it, and which part
            of the right drafts was its; below 0 where that is not known.
        weights: tells them from those of another model of that name (``TensorTable.fingerprint``).
    """

    model: str
    vocab_size: Annotated[int, Bound(0, 1 << 31)] = 0
    context: Count = 0
    tokenizer: TokenOrNone = ""
    http: str = ""
    sessions: Count = 0
    stats: Annotated[dict[StatName, Figure], Bound(0, 64)] = field(default_factory=dict)
    drafters: Annotated[list[Id], Bound(0, MAX_DRAFTERS)] = field(default_factory=list)
    drafter_alpha: list[Figure] = field(default_factory=list)
    drafter_latency_ms: list[Figure] = field(default_factory=list)
    drafter_share: list[Figure] = field(default_factory=list)
    weights: TokenOrNone = ""

    def check(self) -> None:
        for figures in (self.drafter_alpha, self.drafter_latency_ms, self.drafter_share):
            if len(figures) not in (0, len(self.drafters)):
                raise ProtocolError("drafters with more or fewer figures than drafters")


@dataclass(frozen=True, slots=True)
class Serving(Served, Message):
    """Verifier or drafter to seed: what it serves, when that changes, and once a second while it works."""

    KIND: ClassVar[int] = 68
