"""Conversion of text to token ids: byte-level by default, or with a ``tokenizer.json``.

The byte-level vocabulary is the 256 byte values, id = byte. It needs no file. A checkpoint stores it as an equivalent
``tokenizer.json`` (byte-level BPE without merges), which ``AutoTokenizer`` can open.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import shutil
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from p2ptrain.compute import first_import
from p2ptrain.core.adapters import file_of
from p2ptrain.core.errors import ConfigError, StorageError
from p2ptrain.core.tokenizer_files import TEMPLATE_FILE, TOKENIZER_FILE, TOKENIZER_FILES, tokenizer_file

if TYPE_CHECKING:
    import tokenizers  # imported late at run time, to start faster

Tokens = npt.NDArray[np.generic]

PLAIN_CHAT = (
    "{% for message in messages %}"
    "{{ '\\n' if not loop.first }}"
    "{{ {'user': 'User: ', 'assistant': 'Assistant: '}.get(message.role, '') + message.content }}"
    "{{ '\\n' if message.role == 'system' }}"
    "{% endfor %}"
    "{{ '\\n' if add_generation_prompt or messages[-1].role == 'assistant' }}"
    "{{ 'Assistant:' if add_generation_prompt else 'User:' if messages[-1].role == 'assistant' }}"
)
"""The chat template of models without one, see ``compute.text``. It needs no special tokens: what ends an answer is the
beginning of the next question, so a model that is trained on conversations learns to write it."""
_MOST_GROWTH = 256
_PROBE = " aA\r\n e\u0301\u200b "
_MOST_SETTING = 1 << 20  # some classes make as many tokens as a number in the settings says


class Tokenizer:
    """One vocabulary.

    Attributes:
        vocab_size: all ids are below this number.
        backend: the equivalent tokenizer of the ``tokenizers`` library.
        is_bytes: whether ids are the bytes of a text, and nothing else.
        directory: the model directory that it came from; None of a new model.
        library: transformers' tokenizer; None for the bytes of a new model.
        has_template: whether the directory has a chat template.
        begin, end: ids around a document: what the tokenizer adds to a prompt, so that a model is trained on what it
            will be asked; and the end token in any case, so that the model learns to stop. Empty if it has none.
    """

    def __init__(self, backend: tokenizers.Tokenizer, directory: Path | None = None, library: Any = None) -> None:
        backend.no_truncation()  # encode a text as ``AutoTokenizer(text)`` does, whatever state its file was saved with
        backend.no_padding()
        if getattr(backend.model, "dropout", None):
            backend.model.dropout = None  # members with equal texts need equal tokens
        self.backend, self.directory, self.library = backend, directory, library
        self.has_template = library is not None and bool(library.chat_template)
        self.vocab_size = 1 + max(backend.get_vocab().values())
        encoding, mask = backend.encode("a"), backend.encode("a").special_tokens_mask
        self.begin = encoding.ids[: [*mask, 0].index(0)]
        self.end = encoding.ids[len(mask) - mask[::-1].index(0) :] if 0 in mask else []
        if not self.end and library is not None and library.eos_token_id is not None:
            self.end = [library.eos_token_id]
        is_plain = backend.encode(_PROBE).ids == list(_PROBE.encode())
        self.is_bytes = is_plain and backend.get_vocab() == _byte_vocabulary()

    @classmethod
    def of_bytes(cls) -> Tokenizer:
        import tokenizers
        from tokenizers.decoders import ByteLevel as ByteLevelDecoder
        from tokenizers.models import BPE
        from tokenizers.pre_tokenizers import ByteLevel

        backend = tokenizers.Tokenizer(BPE(vocab=_byte_vocabulary(), merges=[]))
        backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = ByteLevelDecoder()
        return cls(backend)

    @classmethod
    def of_words(cls, count: int) -> Tokenizer:
        """A vocabulary of ``count`` words: ``w1``, ``w2``, ..., and ``w0`` for any other. Each token of a text is a
        piece that can be seen, so its time can be measured."""
        import tokenizers
        from tokenizers.models import WordLevel
        from tokenizers.pre_tokenizers import WhitespaceSplit

        vocabulary = {f"w{number}": number for number in range(count)}
        backend = tokenizers.Tokenizer(WordLevel(vocabulary, unk_token=next(iter(vocabulary))))
        backend.pre_tokenizer = WhitespaceSplit()
        return cls(backend)

    @classmethod
    def of_directory(cls, directory: Path) -> Tokenizer:
        """The vocabulary of a model directory. Raises ``ConfigError``."""
        path = file_of(directory, TOKENIZER_FILE)
        library = cls._load(path)
        return cls(library.backend_tokenizer, path.parent, library)

    @classmethod
    def of_new_model(cls, place: Path) -> Tokenizer:
        """That of ``model.tokenizer``: a directory, or a file, whose settings are beside it if its name is that of a
        directory's. Raises ``ConfigError``."""
        file = tokenizer_file(place)
        library = cls._load(file, alone=file.name != TOKENIZER_FILE)
        return cls(library.backend_tokenizer, None, library)

    @staticmethod
    def _load(path: Path, *, alone: bool = False) -> Any:
        import tokenizers

        remedy = "save the fast tokenizer there: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        with library_errors(f"the tokenizer {path}", remedy):
            document = json.loads(path.read_bytes(), object_hook=_with_whole_table)
            bare = {"model": {"type": "WordLevel", "vocab": {}, "unk_token": ""}, "added_tokens": []}
            backend = tokenizers.Tokenizer.from_str(json.dumps(document | bare))
            steps = [
                step and json.loads(step.__getstate__())
                for step in (backend.normalizer, backend.pre_tokenizer, backend.post_processor, backend.decoder)
            ]
        if any(_growth(step) > _MOST_GROWTH for step in steps if step):
            raise ConfigError(f"the tokenizer {path} makes more than {_MOST_GROWTH} characters of one", remedy=remedy)
        with library_errors(f"the tokenizer {path}", remedy):
            return _library(path, is_bytes=document["model"].get("vocab") == _byte_vocabulary(), alone=alone)

    @cached_property
    def digest(self) -> str:
        """Digest of the map from ids to tokens, hex.

        It ignores how text is split into tokens, because a drafter gets only ids. So files that differ in the chat
        template, or in the format of merges, have equal digests.
        """
        digest = hashlib.blake2b(digest_size=16)
        for token, number in sorted(self.backend.get_vocab().items(), key=lambda item: (item[1], item[0])):
            name = token.encode("utf-8", "surrogatepass")
            digest.update(struct.pack("<II", number, len(name)) + name)
        return digest.hexdigest()

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Smallest dtype for every id: uint8, uint16, int32 or, of odd files, int64."""
        sizes = ((1 << 8, np.uint8), (1 << 16, np.uint16), (1 << 31, np.int32))
        return np.dtype(next((kind for most, kind in sizes if self.vocab_size <= most), np.int64))

    def save(self, directory: Path, *, chat: bool = False) -> None:
        """Write the files that ``AutoTokenizer.from_pretrained`` reads. ``chat``: the model was trained on
        conversations, so its chat template is among them, be it the plain one. Raises ``StorageError``."""
        try:
            if self.directory is None:
                from transformers import PreTrainedTokenizerFast  # slow to import, and only needed here

                fast: Any = PreTrainedTokenizerFast  # its annotations are partial
                options = {"clean_up_tokenization_spaces": False, "chat_template": PLAIN_CHAT}
                (self.library or fast(tokenizer_object=self.backend, **options)).save_pretrained(directory)
            for name in TOKENIZER_FILES:
                if self.directory is not None and (self.directory / name).is_file():
                    shutil.copyfile(self.directory / name, directory / name)
            if chat and self.library is not None and not self.has_template:
                (directory / TEMPLATE_FILE).write_text(PLAIN_CHAT, "utf-8")
        except OSError as error:
            raise StorageError(f"cannot write the tokenizer to {directory}: {error.strerror or error}") from error

    def encodings(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[tokenizers.Encoding]:
        """Raises ``ConfigError`` if the tokenizer fails."""
        with library_errors(f"the tokenizer of {self.directory or 'a new model'}"):
            return self.backend.encode_batch(list(texts), add_special_tokens=add_special_tokens)


def _settings(directory: Path, *names: str) -> dict[str, Any]:
    """What the small files beside ``tokenizer.json`` say. Raises ``OSError`` and ``ValueError``."""
    found: dict[str, Any] = {}
    for name in names:
        if (directory / name).is_file():
            try:
                found |= dict(json.loads((directory / name).read_bytes()))
            except (ValueError, TypeError, RecursionError) as error:
                raise ValueError(f"{name} beside it: {error}") from error
    return found


def _library(path: Path, *, is_bytes: bool, alone: bool) -> Any:
    """Transformers' tokenizer of a ``tokenizer.json`` and, unless ``alone``, its settings; no code there is run."""
    settings = {} if alone else _settings(path.parent, "special_tokens_map.json", "tokenizer_config.json")
    for key, value in settings.items():
        if type(value) is int and abs(value) > _MOST_SETTING and "length" not in key:
            raise ValueError(f"{key} = {value} in the settings beside it is more than {_MOST_SETTING}")
    places = {"tokenizer_file": str(path), "local_files_only": True, "trust_remote_code": False}
    with first_import():
        import transformers  # what is named below is imported then

        transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        fast: Any = transformers.PreTrainedTokenizerFast
        if alone:
            return fast(tokenizer_file=str(path), clean_up_tokenization_spaces=False)
        # The class of a family may build the tokenizer anew. That would change what was trained on bytes here.
        if not is_bytes and "auto_map" not in settings:
            from transformers.models.auto.tokenization_auto import AutoTokenizer, tokenizer_class_from_name

            named = [table.get("tokenizer_class") for table in (settings, _settings(path.parent, "config.json"))]
            classes = [tokenizer_class_from_name(name) or fast for name in named if name]
            if all(isinstance(kind, type) and issubclass(kind, fast) for kind in classes):  # else it may load anything
                made: Any = AutoTokenizer.from_pretrained(path.parent, **places)
                if isinstance(made, fast):
                    return made
        return fast.from_pretrained(path.parent, **places)


@contextmanager
def library_errors(what: str, remedy: str = "use the tokenizer's files of another model") -> Iterator[None]:
    """Translate errors of the library, which raises bare ``Exception``s, and panics that are not even those."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        lines = str(getattr(error, "strerror", None) or error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(f"cannot use {what}: {lines[0][:300]}", remedy=remedy) from error


def _with_whole_table(table: dict[str, Any]) -> dict[str, Any]:
    """Return a map of the file. Raises ``ValueError``: the size that its characters claim would be allocated."""
    packed = base64.b64decode(table.get("precompiled_charsmap") or "")
    if (size := int.from_bytes(packed[:4], "little")) > len(packed):
        raise ValueError(f"precompiled_charsmap claims {size} bytes and has {len(packed)}")
    return table


def _growth(step: dict[str, Any]) -> float:
    """The most characters, or ids, that a step of a tokenizer makes of one, apart from Unicode's own rules."""
    match step["type"]:
        case "Sequence":
            lists = ("normalizers", "pretokenizers", "processors", "decoders")
            return math.prod(_growth(inner) for name in lists for inner in step.get(name, ()))
        case "Replace":
            pattern = step["pattern"].get("String", "")  # a regular expression may match between all characters
            return max(1.0, len(step["content"]) / len(pattern) if pattern else 1 + len(step["content"]))
        case "Prepend":
            return 1.0 + len(step["prepend"])
        case "ByteLevel":
            return 2.0
        case "TemplateProcessing":
            return float(max(len(step["single"]), len(step["pair"])))
        case "Precompiled":  # the size of an index, the index, and texts that end with a zero byte
            table = base64.b64decode(step["precompiled_charsmap"] or "")
            texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
            return max(map(len, texts), default=1) / 32 + 1  # sentencepiece's own have up to 33 bytes
    return 1.0


def _byte_vocabulary() -> dict[str, int]:
    """The printable character that ``ByteLevel`` uses for each byte → the byte (GPT-2's ``bytes_to_unicode``)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    vocabulary = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in set(plain))
    return vocabulary | {chr(256 + index): byte for index, byte in enumerate(others)}
