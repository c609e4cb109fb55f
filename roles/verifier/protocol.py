"""Encoding of questions and refusals between a client and a verifier (``wire.text_messages``)."""

from __future__ import annotations

from collections.abc import Iterator

from p2ptrain.compute.text import Turn
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
from p2ptrain.core.serving import SamplingOptions
from p2ptrain.core.texts import printable, shortened
from roles.serving.texts import TextRequest
from wire import text_messages as wire
from wire.text_messages import MOST_BYTES, MOST_STOPS, MOST_TURNS, STOP_CHARS

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


def question(request: TextRequest) -> tuple[wire.TextQuestion, bytes]:
    """Encode a request. Raises ``UserError``: it exceeds the limits."""
    texts = [turn.text.encode() for turn in request.turns] or [request.prompt.encode()]
    if (size_bytes := sum(map(len, texts))) > MOST_BYTES or len(texts) > MOST_TURNS:
        raise UserError(
            f"the question has {size_bytes} bytes in {len(texts)} parts",
            remedy=f"shorten it: at most {MOST_BYTES >> 20} MiB in {MOST_TURNS} parts",
        )
    if len(request.stop) > MOST_STOPS or any(len(text) > STOP_CHARS for text in request.stop):
        raise UserError(f"more than {MOST_STOPS} stop strings, or over {STOP_CHARS} characters", remedy="give fewer")
    wanted = request.sampling
    ask = wire.TextQuestion(
        sizes=[len(text) for text in texts],
        roles=[turn.role for turn in request.turns],
        max_new_tokens=request.max_new_tokens or 0,
        temperature=wanted.temperature,
        top_k=wanted.top_k,
        top_p=wanted.top_p,
        seed=wanted.seed,
        stop=list(request.stop),
        speculate=request.speculate,
    )
    return ask, b"".join(texts)


def request_untrusted(ask: wire.TextQuestion, data: bytes | bytearray) -> TextRequest:
    """Decode a question. ``data`` has ``ask.size_bytes`` bytes. Raises ``ProtocolError``: no client sends it."""
    try:
        sampling = SamplingOptions(ask.temperature, ask.top_k, ask.top_p, ask.seed)
        texts = list(_cut(data, ask.sizes))
    except (UserError, UnicodeDecodeError) as error:
        raise ProtocolError(f"invalid question: {shortened(str(error), 200)}") from error
    turns = tuple(Turn(role[:40], text) for role, text in zip(ask.roles, texts, strict=False))
    return TextRequest(
        prompt="" if turns else texts[0],
        turns=turns,
        max_new_tokens=ask.max_new_tokens or None,
        sampling=sampling,
        stop=tuple(ask.stop),
        speculate=ask.speculate,
    )


def _cut(data: bytes | bytearray, sizes: list[int]) -> Iterator[str]:
    start = 0
    for size_bytes in sizes:
        yield data[start : start + size_bytes].decode()
        start += size_bytes


def refused(error: P2PTrainError) -> wire.StreamRefused:
    code = error.code if isinstance(error, Refused) else "failed"
    for name, kind in _CODES.items():
        if isinstance(error, kind):
            code = name
    return wire.StreamRefused(shortened(code, 64), shortened(error.message), shortened(error.remedy))


def error_untrusted(message: wire.StreamRefused, who: str, more: str = "") -> P2PTrainError:
    """A verifier's refusal as an error for people. ``more``: text to add. Never raises."""
    text, remedy = f"{who}: {printable(message.reason)}{more}", printable(message.remedy)
    kind = _CODES.get(message.code)
    if kind is None or kind is ProtocolError:
        return Refused(printable(message.code, 64), text, remedy=remedy)
    return kind(text, remedy=remedy)
