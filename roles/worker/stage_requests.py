"""What a client of a split model asks of a worker, as it comes off the wire: the parameters of the chain's requests."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from p2ptrain.core import texts
from p2ptrain.core.activations import ENCODINGS
from p2ptrain.core.errors import ProtocolError, UserError
from p2ptrain.core.ids import is_id
from p2ptrain.core.model_config import config_untrusted
from p2ptrain.core.serving import PartSpec, Sampling, check_sampling
from ring.view import MAX_STAGES
from roles.line import LONGEST_SILENCE_S, SHORTEST_SILENCE_S

MAX_POSITIONS = 1 << 20
MAX_LAYERS = 4096
MAX_PATH_CHARS = 4096
DTYPES = ("", "fp32", "bf16", "fp16")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a peer is dialled. An empty ``host`` is the seed's."""

    peer: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """``part.load``.

    Attributes:
        positions: that there must be memory for besides the weights, of all sessions together.
        activation_bytes: of one position, as it will travel to the next stage.
        path: empty where this worker has no copy.
        giver: None where the client gives.
    """

    model: str
    name: str
    spec: PartSpec
    positions: int
    activation_bytes: int
    path: str
    giver: Place | None

    def sessions_bytes(self, cache_position_bytes: int) -> int:
        """Of the sessions to come: their caches, and what they keep of what they gave on. As placement counts it."""
        kept_bytes = self.activation_bytes if self.spec.stop < self.spec.layers else 0
        return self.positions * (cache_position_bytes + kept_bytes)


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """``session.open``. ``next``: None on the last stage."""

    session: str
    part: str
    index: int
    stages: int
    positions: int
    attempt: int
    next: Place | None
    encoding: str
    prefill_encoding: str
    sampling: Sampling
    silence_s: float


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """Which session of a client is meant. ``index``: of the stage, where one worker has several; -1: the only one."""

    session: str
    index: int


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """``session.resume``."""

    which: SessionRequest
    attempt: int
    keep: int
    next: Place | None


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """``session.replay``."""

    which: SessionRequest
    attempt: int
    number: int
    stop: int
    last: int


Params = Mapping[str, Any]


def load_untrusted(params: Params, *, device: str) -> LoadRequest:
    """Raises ``ProtocolError``."""
    layers = _number(params, "layers", 1, MAX_LAYERS)
    start, stop = _number(params, "start", 0, layers - 1), _number(params, "stop", 1, layers)
    config, dtype, giver = _text(params, "config", (48 << 10)), _text(params, "dtype", 8), params.get("giver")
    if start >= stop:
        raise ProtocolError(f"layers [{start}, {stop}) are none")
    if dtype not in DTYPES:
        raise ProtocolError(f"{dtype!r} is no dtype of a model; there are {', '.join(DTYPES[1:])}")
    if giver not in ("caller", "peer"):
        raise ProtocolError("a part's giver is 'caller' or 'peer'")
    config_untrusted(config)
    place = None
    if giver == "peer":
        asked = {"peer": params.get("giver_peer"), "host": params.get("giver_host"), "port": params.get("giver_port")}
        place = place_untrusted(asked)
    path = _text(params, "path", MAX_PATH_CHARS)
    if path and not _is_place(path):
        raise ProtocolError("a part's path is empty, or that of a directory, from the root on")
    return LoadRequest(
        model=_id(params, "model"),
        name=printable(_text(params, "name", MAX_PATH_CHARS)),
        spec=PartSpec(config, start, stop, layers, dtype, device),
        positions=_number(params, "positions", 0, MAX_POSITIONS),
        # Of one position: more than the widest that ``config_untrusted`` takes has in fp32.
        activation_bytes=_number(params, "activation_bytes", 0, (1 << 26)),
        path=path,
        giver=place,
    )


def open_untrusted(params: Params) -> OpenRequest:
    """Raises ``ProtocolError``."""
    stages = _number(params, "stages", 1, MAX_STAGES)
    index = _number(params, "index", 0, stages - 1)
    following = params.get("next")
    if (following is None) != (index == stages - 1):
        raise ProtocolError("the last stage has no next one, and every other has")
    sampling = Sampling(
        _real(params, "temperature", 0.0, 1e6),
        _number(params, "top_k", 0, 1 << 31),
        _real(params, "top_p", 0.0, 1.0),
        _number(params, "seed", -(1 << 63), (1 << 64) - 1),
    )
    try:
        check_sampling(sampling)
    except UserError as error:
        raise ProtocolError(error.message) from error
    return OpenRequest(
        session=_id(params, "session"),
        part=_id(params, "part"),
        index=index,
        stages=stages,
        positions=_number(params, "positions", 1, MAX_POSITIONS),
        attempt=_number(params, "attempt", 0, 1 << 31),
        next=None if following is None else place_untrusted(following),
        encoding=_encoding(params, "encoding"),
        prefill_encoding=_encoding(params, "prefill_encoding"),
        sampling=sampling,
        silence_s=_real(params, "silence_s", SHORTEST_SILENCE_S, LONGEST_SILENCE_S),
    )


def resume_untrusted(params: Params) -> ResumeRequest:
    """Raises ``ProtocolError``."""
    following = params.get("next")
    return ResumeRequest(
        which=session_untrusted(params),
        attempt=_number(params, "attempt", 0, 1 << 31),
        keep=_number(params, "keep", 0, MAX_POSITIONS),
        next=None if following is None else place_untrusted(following),
    )


def replay_untrusted(params: Params) -> ReplayRequest:
    """Raises ``ProtocolError``."""
    return ReplayRequest(
        which=session_untrusted(params),
        attempt=_number(params, "attempt", 0, 1 << 31),
        number=_number(params, "number", 0, 1 << 53),
        stop=_number(params, "stop", 0, MAX_POSITIONS),
        last=_number(params, "last", 0, MAX_STAGES - 1),
    )


def session_untrusted(params: Params) -> SessionRequest:
    """Raises ``ProtocolError``."""
    return SessionRequest(_id(params, "session"), _number({"index": -1, **params}, "index", -1, MAX_STAGES - 1))


def part_untrusted(params: Params) -> str:
    """Raises ``ProtocolError``."""
    return _id(params, "part")


def path_untrusted(params: Params) -> str:
    """An absolute path of this machine. Raises ``ProtocolError``."""
    path = _text(params, "path", MAX_PATH_CHARS)
    if not _is_place(path):
        raise ProtocolError("model.open needs the path of a directory, from the root on")
    return path


def place_untrusted(item: object) -> Place:
    """Raises ``ProtocolError``."""
    if isinstance(item, dict):
        peer, host, port = item.get("peer"), item.get("host"), item.get("port")
        texts = isinstance(peer, str) and is_id(peer) and isinstance(host, str) and len(host) <= 255
        if texts and type(port) is int and 0 < port < 65536:
            return Place(str(peer), str(host), port)
    raise ProtocolError("a peer to dial is {peer, host, port}")


def _is_place(path: str) -> bool:
    return os.path.isabs(path) and "\0" not in path


def printable(text: str) -> str:
    """What a peer calls something, for a terminal."""
    return texts.printable(text, 200)


# ---------------------------------------------------------------------------------------------------- single values


def _number(params: Params, name: str, least: int, most: int) -> int:
    value = params.get(name)
    if type(value) is not int or not least <= value <= most:
        raise ProtocolError(f"{name} must be a whole number from {least} to {most}")
    return value


def _real(params: Params, name: str, least: float, most: float) -> float:
    value = params.get(name)
    if type(value) not in (int, float) or not math.isfinite(value) or not least <= value <= most:  # type: ignore[arg-type, operator]
        raise ProtocolError(f"{name} must be a number from {least:g} to {most:g}")
    return float(value)  # type: ignore[arg-type]


def _text(params: Params, name: str, most: int) -> str:
    value = params.get(name)
    if not isinstance(value, str) or len(value) > most:
        raise ProtocolError(f"{name} must be text of at most {most} characters")
    return value


def _id(params: Params, name: str) -> str:
    value = params.get(name)
    if not isinstance(value, str) or not is_id(value):
        raise ProtocolError(f"{name} must be an id")
    return value


def _encoding(params: Params, name: str) -> str:
    value = params.get(name)
    if not isinstance(value, str) or value not in ENCODINGS:
        raise ProtocolError(f"{name} must be one of {', '.join(ENCODINGS)}")
    return value
