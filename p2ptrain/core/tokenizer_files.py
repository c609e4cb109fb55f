"""The files with which a new model begins: a tokenizer's, and a model directory without weights.

Standard library only, so that a command can refuse what does not fit before any process starts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from p2ptrain.core.errors import ConfigError

TOKENIZER_FILE, TEMPLATE_FILE = "tokenizer.json", "chat_template.jinja"
TOKENIZER_FILES = (
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    TEMPLATE_FILE,
)
TEXT_FILES = ("config.json", "generation_config.json", *TOKENIZER_FILES)
"""Files of a model directory that decide, beside its weights, what it reads and writes."""
_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx"})


def is_without_weights(directory: Path) -> bool:
    """Whether a model directory has a ``config.json`` and no weights in any format: a new model begins from it."""
    names = [path.name for path in directory.glob("*")]
    is_empty = not any(Path(name).suffix in _WEIGHTS or name.endswith(".index.json") for name in names)
    return is_empty and "config.json" in names


def tokenizer_file(place: Path) -> Path:
    """The file of ``model.tokenizer``, a directory or a file. Raises ``ConfigError``: it is not on this machine."""
    file = place / TOKENIZER_FILE if place.is_dir() else place
    if not file.is_file():
        remedy = "every worker needs the same files at this path: copy them there, correct the path, or make them: "
        remedy += "p2ptrain tokenizer train --data PATH"
        raise ConfigError(f"model.tokenizer = '{place}': there is no {file} on this machine", remedy=remedy)
    return file


def vocabulary_size(file: Path, *, with_added: bool = True) -> int:
    """One more than the highest id in a ``tokenizer.json``; without ``with_added``, of what is not only added. Raises
    ``ConfigError``: it cannot be read."""
    try:
        document: Any = json.loads(file.read_bytes())
        vocabulary = document["model"]["vocab"]  # token → id, or of Unigram a list
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))
        added = [token["id"] for token in document.get("added_tokens") or ()] if with_added else []
        return 1 + max(map(int, [*ids, *added]))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        problem = getattr(error, "strerror", None) or type(error).__name__
        remedy = "it must be a file of the tokenizers library, as save_pretrained of a fast tokenizer writes it"
        raise ConfigError(f"cannot read the tokenizer {file}: {problem}", remedy=remedy) from error


def check_fit(directory: Path, tokenizer: Path | None, embedding: int | None) -> None:
    """Raise ``ConfigError`` if the model in ``directory`` cannot use its tokenizer.

    Args:
        tokenizer: ``model.tokenizer``; None: the directory's own.
        embedding: ids of the model; None: not known.
    """
    is_new, file = is_without_weights(directory), directory / TOKENIZER_FILE
    if tokenizer is not None and not is_new:
        text = f"model.tokenizer = '{tokenizer}': the weights in {directory} belong to a tokenizer of their own"
        raise ConfigError(text, remedy="leave model.tokenizer out, or model.path for a new model")
    if tokenizer is not None:
        file = tokenizer_file(tokenizer)
    elif is_new and not file.is_file():
        raise ConfigError(f"{directory} has no {TOKENIZER_FILE}", remedy="name a tokenizer: model.tokenizer = 'DIR'")
    if embedding is None or not file.is_file():
        return
    # A trained model may lack what was added later, such as a token for padding: no text has it.
    tokens = vocabulary_size(file, with_added=is_new)
    if tokens > embedding:
        text = f"the tokenizer {file} has the ids 0 to {tokens - 1}, and the model in {directory} has only {embedding}"
        remedy = f"set vocab_size = {tokens} in its config.json, or train a tokenizer with --vocab {embedding}"
        raise ConfigError(text, remedy=remedy if is_new else "put the tokenizer there that it was trained with")


def embedding_of(directory: Path) -> int | None:
    """The vocabulary's size in a ``config.json``, if it says; else None."""
    try:
        table = json.loads((directory / "config.json").read_bytes())
        size = table.get("vocab_size", (table.get("text_config") or {}).get("vocab_size"))
    except (OSError, ValueError, AttributeError, RecursionError):
        return None  # what reads it for its sizes says so
    return size if type(size) is int else None
