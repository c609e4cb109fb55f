"""A byte-level BPE vocabulary, made of a text by the ``tokenizers`` library (Sennrich et al., arXiv 1508.07909).

The library keeps the distinct words of the text, not the text. Of source code they took five times its bytes, so a text
is sampled if it is large: 64 KiB pieces at equal distances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2ptrain.compute.rows import Rows
from p2ptrain.compute.tokenizer import PLAIN_CHAT, library_errors
from p2ptrain.core.disk import RealDisk, new_directory
from p2ptrain.core.errors import ConfigError, P2PTrainError
from p2ptrain.core.text_files import search_files

if TYPE_CHECKING:
    import tokenizers

END, ROLES = "<|endoftext|>", ("<|system|>", "<|user|>", "<|assistant|>")
ROLE_CHAT = (
    "{% for message in messages %}"
    "{{ '\\n' if not loop.first }}{{ '<|' + message.role + '|>\\n' + message.content }}"
    "{{ eos_token if message.role == 'assistant' }}"
    "{% endfor %}"
    "{{ '\\n<|assistant|>\\n' if add_generation_prompt }}"
)
"""As OLMo's and Tulu's: a special token for each role, and the end token behind each answer."""
CHATS: dict[str, str | None] = {"": None, "plain": PLAIN_CHAT, "tokens": ROLE_CHAT}
_PIECE_CHARACTERS = 1 << 16
_LEAST = 256  # the bytes


class SampledText:
    """The text of ``data.path``, in pieces; all of it, or an even sample.

    Args:
        path, form, key: ``data.path``, ``data.format`` and ``data.text_key``.
        limit_bytes: about the most bytes of UTF-8 to give.

    Attributes:
        total_bytes: of the files. done_bytes: of the text that was read. sample_bytes: of what was given.
        rows: counts those that cannot be used.

    Raises:
        UserError: as ``search_files``.
    """

    def __init__(self, path: str, form: str, key: str, limit_bytes: int) -> None:
        self._files, self.note = search_files(path, form)
        self._is_chat = form == "chat"
        self.rows = Rows(path, form, key)
        self.total_bytes = sum(file.stat().st_size for file in self._files)
        self.done_bytes = self.sample_bytes = 0
        self._limit_bytes = limit_bytes

    def pieces(self) -> Iterator[str]:
        """Raises ``UserError``: a file cannot be read."""
        share = min(1.0, self._limit_bytes / max(1, self.total_bytes))
        chosen = count = 0
        for text in self._texts():
            for start in range(0, len(text), _PIECE_CHARACTERS):
                piece = text[start : start + _PIECE_CHARACTERS]
                size_bytes, count = len(piece.encode()), count + 1
                self.done_bytes += size_bytes
                if int(count * share) == chosen or self.sample_bytes >= self._limit_bytes:  # what is packed grows
                    continue
                chosen += 1
                self.sample_bytes += size_bytes
                yield piece

    def _texts(self) -> Iterator[str]:
        if not self._is_chat:
            yield from (text for text, _ in self.rows.texts(self._files))
            return
        for (messages,) in self.rows.made_of_rows(self._files, list):
            yield from (message["content"] for message in messages)


def train_vocabulary(
    text: SampledText, vocab: int, *, chat: str, on_read: Callable[[], object]
) -> tokenizers.Tokenizer:
    """A vocabulary of at most ``vocab`` tokens: special ones, the 256 bytes, and what joins them.

    Args:
        chat: a key of ``CHATS``. on_read: called when the text is read, before the merges, which take some seconds.

    Raises:
        ConfigError: ``vocab`` is less than the bytes need, or there is no text. UserError: as ``SampledText``.
    """
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    special = [END, *(ROLES if chat == "tokens" else ())]
    if vocab < (least := _LEAST + len(special)):
        raise ConfigError(f"a vocabulary of {vocab} tokens is too small", remedy=f"give --vocab {least} or more")
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    trainer: Any = BpeTrainer(
        vocab_size=vocab, special_tokens=special, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    problems: list[P2PTrainError] = []

    def pieces() -> Iterator[str]:
        try:
            yield from text.pieces()
        except P2PTrainError as error:  # the library would raise its own
            problems.append(error)
        on_read()

    with library_errors("the text for a tokenizer", "try it with another text"):
        backend.train_from_iterator(pieces(), trainer)
    if problems:
        raise problems[0]
    if not text.sample_bytes:
        raise ConfigError("there is no text for a tokenizer", remedy="name files with text: --data")
    return backend


def save_new(backend: tokenizers.Tokenizer, out: Path, *, chat: str) -> None:
    """Write the new directory ``out``, which ``AutoTokenizer`` opens; a failure leaves none. Raises `StorageError`."""
    from transformers import PreTrainedTokenizerFast

    fast: Any = PreTrainedTokenizerFast  # its annotations are partial
    made = fast(tokenizer_object=backend, eos_token=END, clean_up_tokenization_spaces=False)
    made.chat_template = CHATS[chat]
    with new_directory(RealDisk(), out) as draft:
        made.save_pretrained(draft)
