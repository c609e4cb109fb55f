"""How a text looks to OpenAI's clients: whole, and as a stream of events."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from p2ptrain import __version__
from roles.verifier.asking import TextService
from roles.verifier.http_problems import json_bytes

DONE = b"data: [DONE]\n\n"
_ENDED = {"stop": "stop", "end": "stop", "length": "length"}
"""Why a text ended, in OpenAI's words: it knows no difference between a stop string and the model's own end."""


def event(said: dict[str, Any]) -> bytes:
    """``said`` as a server-sent event."""
    return b"data: " + json_bytes(said) + b"\n\n"


def finish_reason(ended: str) -> str | None:
    """None: it did not end by itself."""
    return _ENDED.get(ended)


def fingerprint(service: TextService) -> str:
    """Changes with what may change the text: the model's files, and this program."""
    said = f"{__version__}\n{service.model}\n{service.created}"
    return "fp_" + hashlib.blake2b(said.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()


def model_card(service: TextService) -> dict[str, Any]:
    """The model, as ``GET /v1/models`` tells of it; ``context_length`` is an extra."""
    card = {"id": service.model, "object": "model", "created": service.created, "owned_by": "p2ptrain"}
    return card | {"context_length": service.context}


@dataclass(slots=True)
class Usage:
    """Tokens of all texts of a request."""

    prompt: int = 0
    new: int = 0

    def as_json(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.new,
            "total_tokens": self.prompt + self.new,
        }


@dataclass(frozen=True, slots=True)
class Answer:
    """What is the same in all that is said about one request.

    Attributes:
        created: Unix seconds of the request.
        usage_in_stream: each event has a ``usage``, which only the last one's fills.
    """

    ident: str
    created: int
    model: str
    fingerprint: str
    chat: bool
    usage_in_stream: bool

    def whole(self, texts: list[tuple[str, str]], usage: Usage) -> dict[str, Any]:
        """All texts, each with why it ended."""
        choices: list[dict[str, Any]] = []
        for index, (text, reason) in enumerate(texts):
            said = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
            choices.append({"index": index, **said, "logprobs": None, "finish_reason": reason})
        return self._frame("chat.completion") | {"choices": choices, "usage": usage.as_json()}

    def first(self, index: int) -> bytes:
        """What begins a text, where something does."""
        return self._event(index, {"role": "assistant", "content": ""}, None) if self.chat else b""

    def piece(self, index: int, text: str) -> bytes:
        return self._event(index, {"content": text} if self.chat else text, None)

    def last(self, index: int, reason: str) -> bytes:
        return self._event(index, {} if self.chat else "", reason)

    def usage(self, usage: Usage) -> bytes:
        """The last event of a stream whose client wants it."""
        return event(self._frame("chat.completion.chunk") | {"choices": [], "usage": usage.as_json()})

    def _event(self, index: int, said: str | dict[str, str], reason: str | None) -> bytes:
        choice = {"index": index, "delta" if self.chat else "text": said, "logprobs": None, "finish_reason": reason}
        usage = {"usage": None} if self.usage_in_stream else {}
        return event(self._frame("chat.completion.chunk") | {"choices": [choice]} | usage)

    def _frame(self, chat_kind: str) -> dict[str, Any]:
        return {
            "id": self.ident,
            "object": chat_kind if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }
