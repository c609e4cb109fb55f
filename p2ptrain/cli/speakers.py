"""Who answers in a conversation: a model whose tokens come here, or a verifier that sends its text."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any, Protocol

from p2ptrain.cli.sources import TokenSource
from p2ptrain.compute.text import ChatFormat, Conversation
from p2ptrain.core.errors import UserError
from p2ptrain.core.serving import Sampling


class Speaking(Protocol):
    """An answer under way.

    Attributes:
        dropped: turns that the model is given no more since the last answer; known with the first piece.
        tokens: that came. full: it could not be longer, for the context is full.
        ended: as of ``sources.Answer``; empty while it goes on.
    """

    dropped: int
    tokens: int
    full: bool
    ended: str

    def pieces(self) -> Generator[str, None, None]:
        """The text as it comes, the white space that it begins with included. Closing the iterator, or Ctrl+C in it,
        cancels the answer.

        Raises:
            P2PTrainError: as the model behind it. Leaving: see ``sources``.
        """
        ...


class Speaker(Protocol):
    """Who answers.

    Attributes:
        label: who it is, for people. about: what else they may want to know of it.
        context: positions that a prompt and its answer may have; None: nobody knows.
    """

    label: str
    about: str
    context: int | None

    def speak(self, conversation: Conversation) -> Speaking:
        """Answer the last question. Raises ``UserError`` where that cannot be."""
        ...

    def facts(self) -> dict[str, Any]:
        """What is known of where and how answers come about, for programs."""
        ...

    def show_stats(self) -> None:
        """The same for people. Raises ``UserError`` where there is nothing to show."""
        ...

    def close(self) -> None: ...


class ModelSpeaker:
    """A ``Speaker`` whose prompts are made, and whose tokens become text, here.

    Args:
        max_new_tokens: of an answer. stop: ends an answer, beside what the chat's form says.
    """

    def __init__(
        self, source: TokenSource, form: ChatFormat, *, max_new_tokens: int, sampling: Sampling, stop: Sequence[str]
    ) -> None:
        self.label, self.context = source.label, source.context
        turns = "no chat template: plain turns" if form.is_plain else "its own chat template"
        self.about = turns + ("" if source.context is None else f", {source.context} tokens of context")
        self._source, self._form = source, form
        self._max_new_tokens, self._sampling = max_new_tokens, sampling
        self._stop = (*form.stop, *stop)
        self._end_tokens = source.text.end_tokens | form.end_tokens

    def speak(self, conversation: Conversation) -> ModelSpeaking:
        ids, most, dropped = conversation.fit(self._form, self.context, self._max_new_tokens)
        return ModelSpeaking(self, ids, most, dropped)

    def facts(self) -> dict[str, Any]:
        return self._source.facts()

    def show_stats(self) -> None:
        from p2ptrain.cli.split_stats import print_split_facts

        if (facts := self._source.facts().get("split")) is None:
            raise UserError("the whole model is on this machine", remedy="/stats is for chat --split, or of a verifier")
        print_split_facts(facts)

    def close(self) -> None:
        self._source.close()


class ModelSpeaking:
    """See ``Speaking``."""

    def __init__(self, speaker: ModelSpeaker, ids: list[int], most: int, dropped: int) -> None:
        self.dropped, self.tokens, self.ended = dropped, 0, ""
        self.full = most < speaker._max_new_tokens
        self._speaker, self._ids, self._most = speaker, ids, most
        self._writer = speaker._source.text.writer(ids, stop=speaker._stop, end_tokens=speaker._end_tokens)

    def pieces(self) -> Generator[str, None, None]:
        speaker, writer = self._speaker, self._writer
        tokens = speaker._source.tokens(
            self._ids, max_new_tokens=self._most, sampling=speaker._sampling, end_tokens=writer.end_tokens
        )
        with closing(tokens):
            for token in tokens:
                piece = writer.take(token)
                self.tokens = writer.tokens
                yield piece
                if writer.ended:
                    break
        yield writer.finish()
        self.ended = writer.ended
