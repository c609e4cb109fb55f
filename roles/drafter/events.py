"""Events into the cores of speculative decoding, and the instructions that come out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

from roles.verifier.cost_model import DrafterModel


class Signal(Enum):
    """An event without content, into ``verifying.Verifying``; ``BEGAN`` also into ``drafting.Drafting``."""

    BEGAN = auto()  # the session begins; the first ``Run`` follows
    CANCEL = auto()  # no more tokens are wanted
    LOST = auto()  # the drafter is gone, or refuses to continue
    TICK = auto()  # ``next_deadline`` has passed


# ---------------------------------------------------------------------------------------- into ``verifying.Verifying``


@dataclass(frozen=True, slots=True)
class PassDone:
    """The requested ``Run`` is done. ``tokens``: its samples. ``took_s``: time that the target computed."""

    tokens: tuple[int, ...]
    took_s: float


@dataclass(frozen=True, slots=True)
class DrafterReady:
    """A drafter has processed the first ``known`` ids of ``Verifying.history``, with which its session was opened. The
    drafter before it, if there was one, is lost.

    ``model``: averages of this drafter; its link writes the latency there.
    """

    known: int
    model: DrafterModel


@dataclass(frozen=True, slots=True)
class Drafted:
    """Unchecked tokens from the drafter, of the line that began with verdict ``epoch``."""

    epoch: int
    position: int
    tokens: tuple[int, ...]


# ------------------------------------------------------------------------------------------ into ``drafting.Drafting``


@dataclass(frozen=True, slots=True)
class VerdictReceived:
    """A verdict with its number. ``start``: position of its first token. See ``wire.text_messages.Verdict``."""

    number: int
    start: int
    tokens: tuple[int, ...]
    depth: int


@dataclass(frozen=True, slots=True)
class RunDone:
    """The sample of the requested ``Run``. Empty: none was requested, or it is not a token of the verifier."""

    samples: tuple[int, ...]


# ------------------------------------------------------------------------------------------------------- out of either


@dataclass(frozen=True, slots=True)
class Run:
    """Cut the model's history to ``keep`` positions, append ``ids``, and sample at the last ``samples`` of them.

    One run at a time. ``sample_index``: index of the first sample.
    """

    keep: int
    ids: tuple[int, ...]
    samples: int
    sample_index: int
    prefill: bool = False


@dataclass(frozen=True, slots=True)
class SendVerdict:
    """Verifying: a verdict to the drafter. ``right``: drafts accepted before ``start``, since the last verdict."""

    number: int
    start: int
    tokens: tuple[int, ...]
    depth: int
    right: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Verifying: the drafter sent what no correct drafter sends. The core forgets it; its session is to be closed."""

    reason: str


@dataclass(frozen=True, slots=True)
class Give:
    """Verifying: new tokens of the text, in order."""

    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """Verifying: the text ends. Reason: ``length``, ``stop`` or ``cancelled``."""

    reason: str


@dataclass(frozen=True, slots=True)
class Send:
    """Drafting: drafts to the verifier."""

    epoch: int
    position: int
    tokens: tuple[int, ...]


VerifierEvent: TypeAlias = "Signal | PassDone | DrafterReady | Drafted"
VerifierInstruction: TypeAlias = "Run | SendVerdict | Drop | Give | Finished"
