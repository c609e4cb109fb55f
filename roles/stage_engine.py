"""What a worker needs of whatever computes a stage of a split model.

``compute.served_part`` is the real one; tests bring one without torch (``roles.stage_stand_in``). The interface is the
seam between the chain (bytes) and the model (tensors).

All methods block and are called on one dedicated compute thread (``roles.compute_thread``), never on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from p2ptrain.core.serving import PartSpec, Ran, Sampling

__all__ = ["BuildPart", "PartBuilder", "PartSpec", "Ran", "Sampling", "StageEngine"]


class StageEngine(Protocol):
    """A part of a model, loaded, with the caches of its sessions.

    Attributes:
        width: elements of the hidden state of one position.
        vocab_size: token ids are below it.
        encoding: that of hidden states on the wire when nobody asks for another: what the model computes in.
        weights_bytes: of the part.
        cache_position_bytes: of keys and values that one position takes.
        device: for people.
    """

    spec: PartSpec
    width: int
    vocab_size: int
    encoding: str
    weights_bytes: int
    cache_position_bytes: int
    device: str

    def open(self, session: str, *, positions: int, sampling: Sampling) -> None:
        """Begin a session of at most ``positions`` positions. Raises ``UserError`` where the model knows fewer."""
        ...

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
        """Cut the history to its first ``keep`` positions, then take ``count`` more.

        Args:
            payload: on the first stage ``count`` token ids, int32 little-endian; else hidden states in ``encoding``.
            picks: for so many of the last positions a token is picked; only on the last stage.
            draw: number of the first pick's draw: 0 for the first new token of the session.

        Raises:
            ProtocolError: ``keep`` is beyond the history, a token id is none of the vocabulary's, the session would
                be longer than it was opened for, or the payload is not what it should be.
        """
        ...

    def close(self, session: str) -> None:
        """Forget a session, its cache included; none of that name is fine."""
        ...


class PartBuilder(Protocol):
    """A part on its way: its tensors come one at a time, in any order, so that no more than it is ever in memory.

    Attributes:
        wanted: every tensor that the part owns, by its name in the model's files, with its shape.
        weights_bytes: of the part, as it computes with them: no less than the engine's will be.
        cache_position_bytes: as the engine's.
    """

    wanted: Mapping[str, tuple[int, ...]]
    weights_bytes: int
    cache_position_bytes: int

    def place(self, name: str, dtype: str, data: memoryview) -> None:
        """Take a tensor over: ``data`` are its bytes in safetensors' ``dtype`` (``F32``, ``BF16``, ...), copied before
        this returns. Raises ``ConfigError`` where the dtype cannot be used."""
        ...

    def finish(self) -> StageEngine:
        """The part, ready. Raises ``ConfigError`` where a tensor is missing, or where the architecture is none that
        splits (``compute.split.check_splits``)."""
        ...


BuildPart = Callable[[PartSpec, tuple[str, ...]], PartBuilder]
"""From what is wanted, and the names of all tensors in the model's files. Raises ``ConfigError`` (an architecture that
does not split), ``ResourceError`` (too little memory)."""
