"""Requests of a split model's client to a worker, parsed from the wire."""

from __future__ import annotations

import os
from typing import Annotated, Any

from p2ptrain.core import texts
from p2ptrain.core.activations import ENCODINGS
from p2ptrain.core.errors import ProtocolError, Refused
from p2ptrain.core.serving import QUANTIZED, PartSpec, Sampling
from p2ptrain.core.tensor_files import config_untrusted
from wire.chain_messages import MAX_OPEN_HASHES, MAX_POSITIONS, Positions
from wire.job_messages import MAX_STAGES
from wire.messages import Silence
from wire.schema import Amount, Bound, Declared, Host, Id, Port, instance_untrusted

MAX_LAYERS = 4096
BlockHashes = Annotated[str, Bound(0, 32 * MAX_OPEN_HASHES, pattern="([0-9a-f]{32})*")]
Path = Annotated[str, Bound(0, 4096)]
Epoch = Annotated[int, Bound(0, 1 << 31)]
Index = Annotated[int, Bound(0, MAX_STAGES - 1)]
Layer = Annotated[int, Bound(0, MAX_LAYERS)]
Encoding = Annotated[str, Bound(pattern="|".join(ENCODINGS))]
Config = Annotated[str, Bound(0, 48 << 10)]
Dtype = Annotated[str, Bound(pattern="(fp32|bf16|fp16)?")]
Weights = Annotated[str, Bound(pattern=f"({'|'.join(QUANTIZED)})?")]


class PeerAddress(Declared):
    """Address of a peer, as the seed knows it."""

    peer: Id
    host: Host
    port: Port


class LoadRequest(Declared):
    """Request ``part.load``.

    Attributes:
        weights: as in ``PartSpec``.
        positions: number for which memory is reserved, of all sessions together.
        path: this worker's own copy of the model; empty if it has none.
        sender: the worker that sends the model; None: the caller does.
    """

    model: Id
    name: Path
    config: Config
    start: Layer
    stop: Layer
    layers: Layer
    dtype: Dtype
    weights: Weights
    positions: Positions
    path: Path
    sender: PeerAddress | None

    def check(self) -> None:
        if not self.start < self.stop <= self.layers:
            raise ProtocolError(f"invalid layers [{self.start}, {self.stop}) of {self.layers}")
        config_untrusted(self.config)
        if self.path:
            _check_path(self.path)

    @property
    def title(self) -> str:
        return printable(self.name)

    def spec(self, device: str) -> PartSpec:
        return PartSpec(self.config, self.start, self.stop, self.layers, self.dtype, device, self.weights)


class MeasureRequest(Declared):
    """``model.measure``: the bytes of a model's layers and caches; ``dtype`` and ``weights`` as in ``PartSpec``."""

    config: Config
    dtype: Dtype
    weights: Weights

    def check(self) -> None:
        config_untrusted(self.config)


class FreeRequest(Declared):
    part: Id


class ModelRequest(Declared):
    """``model.open``. ``path``: a directory on this machine."""

    path: Path

    def check(self) -> None:
        _check_path(self.path)


class OpenRequest(Declared):
    """Request ``session.open``.

    Attributes:
        index: of this stage, of ``stages``.
        next: address of the next stage; None on the last one.
        encoding, prefill_encoding: of the outputs; the second for requests that the client marks as prefill.
        priority: requests of sessions with a lower one are computed first.
        order: the client's time at which it opened the session: one that is later loses its memory first. Equal at all
            stages, so that of two sessions the same one goes on everywhere. At least the time at which it connected.
        block_hashes: of the first blocks of the text (``p2ptrain.core.serving.hash_blocks``), in hexadecimal: what the
            stage has of them is not computed again.
    """

    session: Id
    part: Id
    index: Index
    stages: Annotated[int, Bound(1, MAX_STAGES)]
    positions: Annotated[int, Bound(1, MAX_POSITIONS)]
    epoch: Epoch
    next: PeerAddress | None
    encoding: Encoding
    prefill_encoding: Encoding
    sampling: Sampling
    silence_s: Silence
    priority: Annotated[int, Bound(-(1 << 31), 1 << 31)] = 0
    order: Amount = 0.0
    block_hashes: BlockHashes = ""

    def check(self) -> None:
        if self.index >= self.stages or (self.next is None) != (self.index == self.stages - 1):
            raise ProtocolError("every stage but the last must have a next stage")


class ResumeRequest(Declared):
    """``session.resume``. ``index``: of the addressed stage."""

    session: Id
    index: Index
    epoch: Epoch
    keep: Positions
    next: PeerAddress | None


class CloseRequest(Declared):
    session: Id
    index: Index


StageRequest = LoadRequest | MeasureRequest | FreeRequest | ModelRequest | OpenRequest | ResumeRequest | CloseRequest
_REQUESTS: dict[str, type[StageRequest]] = {
    "part.load": LoadRequest,
    "model.measure": MeasureRequest,
    "part.free": FreeRequest,
    "model.open": ModelRequest,
    "session.open": OpenRequest,
    "session.resume": ResumeRequest,
    "session.close": CloseRequest,
}


def request_untrusted(method: str, params: dict[str, Any]) -> StageRequest:
    """Parse a client's request. Raises ``ProtocolError``: wrong parameters; ``Refused``: unknown method."""
    kind = _REQUESTS.get(method)
    if kind is None:
        raise Refused("unknown-method", f"a stage does not support the request {method[:80]!r}")
    return instance_untrusted(kind, params, lenient=True)


def _check_path(path: str) -> None:
    if not os.path.isabs(path) or "\0" in path:
        raise ProtocolError("the path must be absolute, without null characters")


def printable(text: str) -> str:
    return texts.printable(text, 200)
