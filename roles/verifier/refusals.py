"""Failures as they travel from a verifier to its client, and whose fault they are there."""

from __future__ import annotations

import asyncio

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
from p2ptrain.core.texts import printable, shortened
from wire.generate_messages import AskRefused

_CODES: dict[str, type[P2PTrainError]] = {
    "wrong-wish": UserError,
    "wrong-settings": ConfigError,
    "no-memory": ResourceError,
    "damaged": StorageError,
    "lost-a-stage": NetworkError,
    "failed": JobFailed,
    "protocol-error": ProtocolError,
}
"""The most particular class comes last of those that an error is one of."""
_CODE_CHARS = 64


def refused(error: P2PTrainError) -> AskRefused:
    """What the client is told of ``error``."""
    code = error.code if isinstance(error, Refused) else "failed"
    for name, kind in _CODES.items():
        if isinstance(error, kind):
            code = name
    return AskRefused(shortened(code, _CODE_CHARS), shortened(error.message), shortened(error.remedy))


def failed(mistake: Exception) -> JobFailed:
    """What is to be told of a mistake of this program, which the loop's exception handler hears of."""
    context = {"message": "a text failed", "exception": mistake}
    asyncio.get_running_loop().call_exception_handler(context)
    text = f"the verifier failed over this text: {type(mistake).__name__}: {mistake}"
    return JobFailed(text, remedy="this is a mistake in p2ptrain; the verifier's terminal tells more")


def error_untrusted(message: AskRefused, who: str, more: str = "") -> P2PTrainError:
    """What a verifier said, as the error that a person is shown. Never raises. ``more``: what is known beside it."""
    text, remedy = f"{who}: {printable(message.reason)}{more}", printable(message.remedy)
    kind = _CODES.get(message.code)
    if kind is None or kind is ProtocolError:
        return Refused(printable(message.code, _CODE_CHARS), text, remedy=remedy)
    return kind(text, remedy=remedy)
