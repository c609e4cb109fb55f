"""The text side of generation: token ids of a prompt, text from generated ids, and conversations.

It reads only the small files of a model directory, and computes nothing. A client of peers that hold the weights of a
model trained here on bytes starts in a second. For other models transformers' ``AutoTokenizer`` imports torch.

A tokenizer's chat template defines the format of a conversation. It is a Jinja template, and runs in a sandbox as in
transformers, within limits (``compute.rendering``); no code of the directory is run. A model without a template, such
as one trained here from scratch, uses the plain format of ``compute.tokenizer.PLAIN_CHAT``, in which an answer ends
before the next ``User:``::

    the text of --system

    User: hello
    Assistant: good morning
    User: and now?
    Assistant:
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from p2ptrain.compute.rendering import TEMPLATES
from p2ptrain.compute.tokenizer import PLAIN_CHAT, Tokenizer, library_errors
from p2ptrain.core.adapters import file_of
from p2ptrain.core.errors import ConfigError, TooLong, UserError
from p2ptrain.core.serving import Sampling, SamplingOptions, StopStrings
from p2ptrain.core.texts import shortened

if TYPE_CHECKING:
    import tokenizers

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_CHATS_AT_ONCE = 8
_PROMPT_IDS = 8  # ids of the prompt to decode with the first new one
_UNSUPPORTED: dict[str, float | None] = {
    **dict.fromkeys(("encoder_repetition_penalty", "typical_p", "guidance_scale"), 1),
    **dict.fromkeys(("num_beams", "num_beam_groups"), 1),
    **dict.fromkeys(("no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff", "min_length"), 0),
    **dict.fromkeys(("min_new_tokens", "diversity_penalty", "penalty_alpha", "token_healing"), 0),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id")),
    **dict.fromkeys(("forced_eos_token_id", "sequence_bias", "exponential_decay_length_penalty", "top_h")),
    **dict.fromkeys(("dola_layers", "stop_strings", "watermarking_config")),
}
"""Unsupported settings of ``generation_config.json`` that would change sampling, with their neutral values (beside
None)."""


class ModelText:
    """The tokenizer, configuration and generation settings of a model directory, or of an adapter and its base.

    Attributes:
        context: the model's maximum number of positions; None if its configuration has no limit.
        end_tokens: ids that end a text.

    Raises:
        ConfigError: the configuration or the tokenizer is missing or not readable.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tokenizer = Tokenizer.of_directory(directory)
        self._config = _json_map(file_of(directory, "config.json"))
        own = file_of(directory, "generation_config.json")
        self._generation = _json_map(own) if own.is_file() else None
        self.context = self._context()
        ends = self._settings.get("eos_token_id")  # generation_config.json wins, as in transformers
        ids = ends if isinstance(ends, list) else [ends]
        self.end_tokens = frozenset(item for item in ids if isinstance(item, int))

    def prompt_ids(self, text: str) -> list[int]:
        """Token ids of a prompt, with the tokenizer's special tokens."""
        return list(self.tokenizer.encodings([text], add_special_tokens=True)[0].ids)

    def check_length(self, prompt_tokens: int, max_new_tokens: int) -> None:
        """Raise ``UserError`` if the prompt is empty, or does not fit into the context with the new tokens."""
        if not prompt_tokens:
            raise UserError("the prompt is empty", remedy="enter some text for the model to continue")
        if self.context is not None and prompt_tokens + max_new_tokens > self.context:
            room = self.context - prompt_tokens
            raise TooLong(
                f"{prompt_tokens} tokens of prompt and {max_new_tokens} new ones are more than the context of "
                f"{self.context}",
                remedy=(f"ask for at most {room} new tokens, or " if room > 0 else "") + "shorten the prompt",
            )

    def sampling(self, options: SamplingOptions) -> Sampling:
        """Sampling with the person's options, and the model's defaults for the rest. Raises ``ConfigError``."""
        return options.of(self._settings)

    def unused_settings(self) -> str:
        """A sentence about the unsupported settings in ``generation_config.json`` that are not neutral; empty if there
        are none."""
        settings = self._generation or {}
        unused = [
            f"{key} = {settings[key]}"
            for key, neutral in _UNSUPPORTED.items()
            if settings.get(key) not in (None, neutral)
        ]
        file = f"{self.directory.name}/generation_config.json"
        return shortened(f"{file} also says {', '.join(unused)}: not applied") if unused else ""

    @property
    def _settings(self) -> dict[str, Any]:
        return self._config if self._generation is None else self._generation

    def _context(self) -> int | None:
        nested = self._config.get("text_config")
        for table in (self._config, nested if isinstance(nested, dict) else {}):
            for key in _CONTEXT_KEYS:
                if isinstance(value := table.get(key), int) and value > 0:
                    return value
        return None


class TextWriter:
    """Turns token ids into text as they arrive. It returns only whole characters, and no part of a stop string.

    Attributes:
        end_tokens: ids that end the text, those of special tokens among the stop strings included.
        ended: why the text ended: ``"stop"`` (stop string), ``"end"`` (end token) or ``"length"`` (``finish`` was
            called). Empty before that.
        stop_reason: after ``"stop"``: the stop string, or the stop id.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        prompt: Sequence[int] = (),
        *,
        stop: Iterable[str] = (),
        end_tokens: frozenset[int] = frozenset(),
        stop_ids: Iterable[int] = (),
    ) -> None:
        self.ended = ""
        self.stop_reason: str | int | None = None
        self._backend = backend
        stops = tuple(stop)
        self._stops = StopStrings(stops)
        # A special token is no part of the text, so its id is compared.
        added = backend.get_added_tokens_decoder() if stops else {}
        self._stop_tokens: dict[int, str | int] = {token: token for token in stop_ids}
        self._stop_tokens |= {
            token: entry.content for token, entry in added.items() if entry.special and entry.content in stops
        }
        self.end_tokens = end_tokens | self._stop_tokens.keys()
        # Some decoders drop the space before the first word. So new ids are decoded after some ids of the prompt.
        self._ids = list(prompt[-_PROMPT_IDS:])
        while self._ids and backend.decode(self._ids, skip_special_tokens=True).startswith("\ufffd"):
            del self._ids[0]  # the text would start inside a character
        self._start, self._known = 0, len(self._ids)

    def take(self, token: int) -> str:
        """Take the next id. Returns the text that is now certain; empty after the end."""
        if self.ended:
            return ""
        if token in self.end_tokens:
            self.stop_reason = self._stop_tokens.get(token)
            return self._close("stop" if token in self._stop_tokens else "end")
        self._ids.append(token)
        return self._give(self._stops.feed(self._decode(whole_characters=True)))

    def finish(self) -> str:
        """End the text. Returns the held-back rest: an incomplete character, or the start of a stop string."""
        return "" if self.ended else self._close("length")

    def _close(self, why: str) -> str:
        rest = self._give(self._stops.feed(self._decode(whole_characters=False)))
        if not self.ended:
            self.ended = why
            rest += self._give(self._stops.finish())
        return rest

    def _give(self, piece: str) -> str:
        if self._stops.found is not None:
            self.ended, self.stop_reason = "stop", self._stops.found
        return piece

    def _decode(self, *, whole_characters: bool) -> str:
        """Text of the new ids; empty while the last character is incomplete. The previous piece's ids are decoded with
        them, because an id's text depends on the ids before it."""
        with library_errors("the tokenizer"):
            known = self._backend.decode(self._ids[self._start : self._known], skip_special_tokens=True)
            text = self._backend.decode(self._ids[self._start :], skip_special_tokens=True)
        if len(text) <= len(known) or (whole_characters and text.endswith("\ufffd")):
            return ""
        self._start, self._known = self._known, len(self._ids)
        return text[len(known) :]


def _json_map(path: Path) -> dict[str, Any]:
    remedy = "give a model directory that save_pretrained wrote"
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}", remedy=remedy) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object", remedy=remedy)
    return value


# ------------------------------------------------------------------------------------------------------- conversations

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
_PLAIN_STOP = "\nUser:"
_TOOL_MARKS = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3": '"parameters": '}
"""Format of calls → what a template has that writes it. Only Llama's template calls the arguments of a call parameters;
the small Llama 3.2 has no <|python_tag|>."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation.

    Attributes:
        role: ``system``, ``user``, ``assistant`` or ``tool``.
        tool_calls: of the assistant: JSON list as in OpenAI's interface, but with the arguments as objects, which is
            what templates expect.
        tool_call_id, name: of a tool: the call that it answers, and the tool's name.
    """

    role: str
    text: str
    tool_calls: str = ""
    tool_call_id: str = ""
    name: str = ""

    @property
    def message(self) -> dict[str, Any]:
        """As chat templates expect it."""
        more = {"tool_calls": json.loads(self.tool_calls)} if self.tool_calls else {}
        more |= {name: value for name in ("tool_call_id", "name") if (value := getattr(self, name))}
        return {"role": self.role, "content": self.text, **more}


class TrainingText(NamedTuple):
    """A text, and the bounds of the answers in it that are learned, in characters: start, stop, start, ..."""

    text: str
    bounds: list[int]


class ChatFormat:
    """Converts conversations to token ids, for a model's next answer and for training, with its chat template.

    Args:
        date: what a template that prints the date prints, as ``2026-11-28``; empty: today's, in UTC. So members of a
            job in different zones, and on different days, train on equal tokens.

    Attributes:
        is_plain: whether the model has no chat template of its own.
        stop: strings that end an answer.
        end_tokens: ids that end an answer, in addition to the model's: the tokenizer's own end token.

    Raises:
        ConfigError: the directory's tokenizer cannot be read.
    """

    def __init__(self, tokenizer: Tokenizer, date: str = "") -> None:
        self.tokenizer = tokenizer
        self._date = date
        self._template, self._special, end = PLAIN_CHAT, dict[str, Any](), None
        if tokenizer.has_template:
            with library_errors(f"the chat template of {tokenizer.directory}"):
                self._template = tokenizer.library.get_chat_template()
                self._special, end = tokenizer.library.special_tokens_map, tokenizer.library.eos_token_id
        self.is_plain = self._template == PLAIN_CHAT
        self.stop = (_PLAIN_STOP,) if self.is_plain else ()
        end = None if self.is_plain else end
        self.end_tokens = frozenset(() if end is None else (int(end),))

    @property
    def identity(self) -> list[Any]:
        """What decides the text of a conversation, as JSON: template, what it finds, and the date if it prints it."""
        dated = "strftime_now" in self._template
        return [self._template, {key: str(value) for key, value in self._special.items()}, self._date if dated else ""]

    @property
    def has_tools(self) -> bool:
        """Whether the template shows tools to the model."""
        return "tools" in self._template

    @property
    def tool_format(self) -> str:
        """How the template writes calls of tools: a name in ``_TOOL_MARKS``, or ``json``."""
        marks = _TOOL_MARKS if self.has_tools else {}
        return next((name for name, mark in marks.items() if mark in self._template), "json")

    def ids(self, turns: Sequence[Turn], tools: str = "") -> list[int]:
        """Prompt ids for the model's next answer. ``tools``: JSON list of those that it may call. Raises ``UserError``
        if the template refuses the turns."""
        (text,) = self._render([([turn.message for turn in turns], True)], json.loads(tools) if tools else None)
        ids = list(self.tokenizer.encodings([text], add_special_tokens=False)[0].ids)
        return [*self.tokenizer.begin, *ids] if self.is_plain else ids

    def encode(self, texts: Sequence[str]) -> list[tokenizers.Encoding]:
        """Ids of texts that a template wrote; each text's special tokens are in it, except in the plain format."""
        return self.tokenizer.encodings(texts, add_special_tokens=self.is_plain)

    def training_texts(self, messages: Sequence[dict[str, Any]]) -> list[TrainingText]:
        """The texts from which a conversation's answers are learned. An answer is what the template adds to the prompt
        for it, so it includes what ends the answer. One of weight 0 is not learned.

        Most templates only add to what they wrote, so one text has all answers. Others change earlier turns, such as
        Qwen3's, which drops earlier thoughts. There an answer is in a text of its own, which ends with it, as the model
        would write it. Raises ``UserError``: the template refuses the messages, or does not write an answer as it
        prompts for it."""
        texts: list[TrainingText] = []
        roles = [(message["role"], message.get("weight")) for message in messages]
        answers = [index for index, (role, weight) in enumerate(roles) if role == ASSISTANT and weight != 0]
        rendered = self._render(
            chat for index in answers for chat in ((messages[:index], True), (messages[: index + 1], False))
        )
        for prompt, answered in zip(rendered, rendered, strict=True):
            if not answered.startswith(prompt):
                raise UserError(
                    f"the chat template of {self._owner} does not write an answer behind the prompt for it",
                    remedy="change the template in the model's directory so that an answer follows the prompt for it",
                )
            bounds = texts.pop().bounds if texts and prompt.startswith(texts[-1].text) else []
            texts.append(TrainingText(answered, [*bounds, len(prompt), len(answered)]))
        return texts

    def _render(
        self, chats: Iterable[tuple[Sequence[dict[str, Any]], bool]], tools: list[Any] | None = None
    ) -> Iterator[str]:
        """The texts of conversations: the messages of each, and whether an answer is to follow. A few are made at once:
        those of all turns of a long conversation would not fit into an answer of the process."""
        settings = self._special | ({"tools": tools} if tools else {})
        tasks = ((messages, settings | {"add_generation_prompt": answer}) for messages, answer in chats)
        while batch := list(islice(tasks, _CHATS_AT_ONCE)):
            yield from TEMPLATES.render(self._template, batch, self._owner, self._date)

    @property
    def _owner(self) -> str:
        return str(self.tokenizer.directory or "a new model")


class Conversation:
    """The turns of a conversation, the system's first, and which of them still go into the prompt."""

    def __init__(self, system: str = "") -> None:
        self._system = system
        self.reset()

    def reset(self) -> None:
        """Start over with the same system text."""
        self.turns = [Turn(SYSTEM, self._system)] if self._system else []
        self._first = len(self.turns)  # index of the first turn in the prompt after the system's

    def ask(self, text: str) -> None:
        self.turns.append(Turn(USER, text))

    def answer(self, text: str) -> None:
        self.turns.append(Turn(ASSISTANT, text))

    def take_back(self) -> None:
        """Remove the last question, which has no answer."""
        assert self.turns[-1].role == USER
        self.turns.pop()

    def fit(
        self, form: ChatFormat, context: int | None, answer_tokens: int | None, tools: str = ""
    ) -> tuple[list[int], int, int]:
        """The prompt's ids, the most tokens of the answer, and the number of turns that are left out from now on.

        The oldest questions and their answers are dropped until the answer has room for ``answer_tokens``, or for a
        quarter of the context if that is less. Dropped turns stay dropped. None, if there is a context: as many as fit;
        the last question may then leave room for one. Raises ``UserError``: the last question alone is too long; or as
        ``ChatFormat.ids``."""
        system = self.turns[: 1 if self._system else 0]

        def ids_from(first: int) -> list[int]:
            return form.ids([*system, *self.turns[first:]], tools)

        ids = ids_from(self._first)
        if context is None:
            assert answer_tokens is not None
            return ids, answer_tokens, 0
        room, dropped = min(answer_tokens or context, max(1, context // 4)), 0
        if len(ids) + room > context:
            # A binary search: there may be thousands of turns, and each try tokenizes all of them.
            firsts = [at for at in range(self._first + 1, len(self.turns)) if self.turns[at].role == USER]
            firsts = firsts or [self._first]
            found = bisect_left(firsts, True, key=lambda first: len(ids_from(first)) + room <= context)
            first = firsts[min(found, len(firsts) - 1)]
            ids = ids_from(first)
            least = 1 if answer_tokens is None else room
            if len(ids) + least > context:
                left = context - len(ids)
                raise TooLong(
                    f"the question has {len(ids)} tokens, the model's context is {context}, and {least} are kept for "
                    "the answer",
                    remedy="shorten the question" + (f", or ask for at most {left} new tokens" if left > 0 else ""),
                )
            dropped, self._first = first - self._first, first
        return ids, min(answer_tokens or context, context - len(ids)), dropped
