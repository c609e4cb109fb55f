"""A conversation with a model: its turns, what the model is given of them, and how they are written out.

A tokenizer that brings a chat template says how turns are written (a Jinja template, run in a sandbox as transformers
does it; no code of the directory is run). For any other model, such as one that was trained here from nothing, they are
written plainly::

    the text of --system

    User: hello
    Assistant: good morning
    User: and now?
    Assistant:

and an answer ends before the next ``User:``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2ptrain.compute.text import ModelText
from p2ptrain.core.errors import ConfigError, TooLong, UserError

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
_PLAIN_NAMES = {USER: "User:", ASSISTANT: "Assistant:"}
_TEMPLATE_FILE, _TOKENIZER_FILE = "chat_template.jinja", "tokenizer_config.json"


@dataclass(frozen=True, slots=True)
class Turn:
    """What one side said. ``role``: ``system``, ``user`` or ``assistant``."""

    role: str
    text: str


class ChatFormat:
    """How turns become the ids that a model goes on from.

    Attributes:
        is_plain: there is no chat template.
        stop: strings that end an answer, beside the end tokens.
        end_tokens: ids that end an answer, beside the model's: the one that its tokenizer names.

    Raises:
        ConfigError: the directory's tokenizer cannot be read.
    """

    def __init__(self, text: ModelText) -> None:
        self._text = text
        self._fast: Any = _templated(text.directory)
        self.is_plain = self._fast is None
        self.stop = (f"\n{_PLAIN_NAMES[USER]}",) if self.is_plain else ()
        end = None if self.is_plain else self._fast.eos_token_id
        self.end_tokens = frozenset(() if end is None else (int(end),))

    def ids(self, turns: Sequence[Turn]) -> list[int]:
        """The ids after which the model's next answer comes. Raises ``UserError`` where the template refuses."""
        if self.is_plain:
            return self._text.prompt_ids(written(turns) + f"\n{_PLAIN_NAMES[ASSISTANT]}")
        from jinja2 import TemplateError

        messages = [{"role": turn.role, "content": turn.text} for turn in turns]
        try:
            prompt = self._fast.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except (TemplateError, TypeError, ValueError) as error:
            raise UserError(
                f"the chat template of {self._text.directory} refuses: {str(error) or type(error).__name__}",
                remedy="some know no system text: leave --system out",
            ) from error
        return self._text.plain_ids(prompt)


def written(turns: Sequence[Turn]) -> str:
    """Turns in the plain form."""
    parts = [f"{_PLAIN_NAMES[turn.role]} {turn.text}" if turn.role != SYSTEM else f"{turn.text}\n" for turn in turns]
    return "\n".join(parts)


class Conversation:
    """Turns so far, and the part of them that the model is still given.

    Attributes:
        turns: all of them, the system's first where there is one.
    """

    def __init__(self, system: str = "") -> None:
        self.turns: list[Turn] = []
        self._system = system
        self._first = 0  # of the turns that the model is given, beside the system's
        self.reset()

    def reset(self) -> None:
        """Begin anew, with the same system text."""
        self.turns = [Turn(SYSTEM, self._system)] if self._system else []
        self._first = len(self.turns)

    def ask(self, text: str) -> None:
        self.turns.append(Turn(USER, text))

    def answer(self, text: str) -> None:
        self.turns.append(Turn(ASSISTANT, text))

    def take_back(self) -> None:
        """Forget the question that is not answered."""
        assert self.turns[-1].role == USER
        self.turns.pop()

    def fit(self, form: ChatFormat, context: int | None, answer_tokens: int) -> tuple[list[int], int, int]:
        """The ids to go on from, how many tokens the answer may have, and how many turns were dropped for that.

        The oldest questions are dropped, each with its answer, until there is room for an answer of ``answer_tokens``,
        or of a quarter of the context where that is less. What was dropped stays so.

        Raises:
            UserError: the last question alone is too long; or as ``ChatFormat.ids``.
        """
        system = self.turns[: self._first_spoken]

        def ids_from(first: int) -> list[int]:
            return form.ids([*system, *self.turns[first:]])

        ids = ids_from(self._first)
        if context is None:
            return ids, answer_tokens, 0
        room, dropped = min(answer_tokens, max(1, context // 4)), 0
        if len(ids) + room > context:
            # Halved, not one by one: somebody may send thousands of turns, and all of them are made into ids each time.
            firsts = [at for at in range(self._first + 1, len(self.turns) - 1) if self.turns[at].role == USER]
            firsts.append(len(self.turns) - 1)
            found = bisect_left(firsts, True, key=lambda first: len(ids_from(first)) + room <= context)
            first = firsts[min(found, len(firsts) - 1)]
            ids = ids_from(first)
            if len(ids) + room > context:
                raise TooLong(
                    f"the question has {len(ids)} tokens, the model's context is {context}, and {room} are kept for "
                    "the answer",
                    remedy="ask a shorter one",
                )
            dropped, self._first = first - self._first, first
        return ids, min(answer_tokens, context - len(ids)), dropped

    @property
    def _first_spoken(self) -> int:
        return 1 if self._system else 0


def _templated(directory: Path) -> Any:
    """The tokenizer that writes chats, or None where the directory brings no template. Raises ``ConfigError``."""
    brings = (directory / _TEMPLATE_FILE).is_file()
    settings = directory / _TOKENIZER_FILE
    try:
        brings = brings or (settings.is_file() and b'"chat_template"' in settings.read_bytes())
        if not brings:
            return None
        from transformers import PreTrainedTokenizerFast  # what AutoTokenizer would make, without torch

        fast: Any = PreTrainedTokenizerFast  # its annotations are partial
        made = fast.from_pretrained(directory, local_files_only=True)
        return made if made.chat_template else None
    except Exception as error:  # each tokenizer's files fail in their own way
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(f"cannot read the chat template of {directory}: {lines[0][:300]}") from error
