"""The interface of a model that writes: sessions, and the passes that compute them.

``local_model.LocalModel`` computes in this process, ``chain.StageChain`` on a chain of workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from p2ptrain.core.serving import Sampling


@dataclass(frozen=True, slots=True)
class PassRequest:
    """Cut a session's history to its first ``keep`` positions, append ``ids``, and sample at the last ``samples``."""

    keep: int
    ids: tuple[int, ...]
    samples: int = 0

    @property
    def stop(self) -> int:
        return self.keep + len(self.ids)

    def sample_index(self, sample_from: int) -> int:
        """Index of the first sample, which numbers its random draw; the token at ``sample_from`` has index 0."""
        return self.stop - self.samples + 1 - sample_from if self.samples else 0


@dataclass(frozen=True, slots=True)
class PassResult:
    """The samples of a pass.

    Attributes:
        took_s: duration of computing it; for a chain the time since it was sent.
        spent_us: of a chain: compute time of each stage. mended: the chain was mended meanwhile.
    """

    tokens: tuple[int, ...]
    took_s: float
    spent_us: tuple[int, ...] = ()
    mended: bool = False


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
        """Compute a pass of up to ``CHUNK`` token ids of the model. Passes are answered in the order of the calls.

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
