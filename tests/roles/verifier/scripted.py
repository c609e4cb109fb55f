"""A text service that writes what a test says, when it says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

from p2ptrain.compute.text import Turn
from p2ptrain.core.serving import TokenLogprob
from roles.serving.texts import TextPiece, TextRequest

MODEL = "org/tiny-model"


class ScriptedWriting:
    """Pieces of a text, each with one token for each of its letters: its code point.

    Args:
        held_at: before this piece it calls ``on_hold`` and waits until ``go`` is set.
        fails: raised where the text would end.

    Attributes:
        waits: it has come to ``held_at``.
        closed: by whoever asked for it.
    """

    def __init__(
        self,
        pieces: Sequence[str] = ("Hello", ", ", "world"),
        *,
        ends: str = "end",
        prompt_tokens: int = 3,
        left_out: int = 0,
        held_at: int | None = None,
        on_hold: Callable[[], None] = lambda: None,
        fails: Exception | None = None,
        stop_reason: str | int | None = None,
    ) -> None:
        self.prompt_tokens, self.left_out, self.ended = prompt_tokens, left_out, ""
        self.prompt_ids: tuple[int, ...] = ()
        self.prompt_logprobs: list[TokenLogprob | None] = []
        self.stop_reason = stop_reason
        self.wish = TextRequest()
        self._pieces, self._ends, self._fails = pieces, ends, fails
        self._held_at, self._on_hold = held_at, on_hold
        self.go, self.waits, self.closed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.given = 0

    async def __aiter__(self) -> AsyncIterator[TextPiece]:
        for index, text in enumerate([*self._pieces, None]):
            if index == self._held_at:
                self.waits.set()
                self._on_hold()
                await self.go.wait()
            if text is not None:
                tokens = tuple(map(ord, text))
                yield TextPiece(text, tokens, self.scored(tokens))
                self.given += 1
        if self._fails is not None:
            raise self._fails
        self.ended = self._ends

    def begin(self, wish: TextRequest) -> None:
        self.wish = wish
        self.prompt_ids = wish.ids or tuple(map(ord, wish.prompt))
        if wish.prompt_logprobs:
            self.prompt_logprobs = [None, *self.scored(self.prompt_ids[1:])]

    def scored(self, tokens: Sequence[int]) -> tuple[TokenLogprob, ...]:
        """The log-probability of a token is minus its number, and the next numbers are the likeliest tokens."""
        if self.wish.logprobs is None:
            return ()
        count = self.wish.logprobs
        return tuple(TokenLogprob(each, -each, tuple((each + n, -each - n) for n in range(count))) for each in tokens)

    def stats(self) -> dict[str, Any]:
        return {"token_ms": 2.0, "rest_ms": 2.0}

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.closed.set()


Script = Callable[[TextRequest], ScriptedWriting]


class ScriptedService:
    """Remembers what it was asked for, and what it began to write.

    Attributes:
        script: what is written to whom; it may raise instead.
        full: while it is clear, who asks waits.
    """

    created = 1_700_000_000
    tool_format, has_tools = "hermes", True

    def __init__(self, model: str = MODEL) -> None:
        self.model, self.context = model, 100
        self.room = asyncio.Event()
        self.asks = asyncio.Event()
        self.gave_up = asyncio.Event()
        self.begin_anew()

    def begin_anew(self) -> None:
        self.wishes: list[TextRequest] = []
        self.writings: list[ScriptedWriting] = []
        self.script: Script = lambda wish: ScriptedWriting()
        self.tool_format, self.has_tools = "hermes", True
        self.counted: list[tuple[tuple[Turn, ...], str]] = []
        self.room.set()
        self.asks.clear()
        self.gave_up.clear()

    @property
    def form(self) -> Any:
        return SimpleNamespace(tool_format=self.tool_format if self.has_tools else "json", has_tools=self.has_tools)

    async def write(self, wish: TextRequest) -> ScriptedWriting:
        self.wishes.append(wish)
        self.asks.set()
        try:
            await self.room.wait()
        except asyncio.CancelledError:
            self.gave_up.set()
            raise
        writing = self.script(wish)
        writing.begin(wish)
        self.writings.append(writing)
        return writing

    async def tokenize(self, text: str, *, add_special: bool) -> list[int]:
        return [1] * add_special + list(map(ord, text))

    async def tokenize_turns(self, turns: Sequence[Turn], tools: str = "") -> list[int]:
        self.counted.append((tuple(turns), tools))
        return [ord(letter) for turn in turns for letter in turn.text]

    async def detokenize(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    def token_bytes(self, token: int) -> bytes:
        return chr(token).encode("utf-8", "surrogatepass")
