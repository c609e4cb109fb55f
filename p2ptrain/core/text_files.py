"""The files of a corpus: found without reading them, so that a missing path is known before any process starts."""

from __future__ import annotations

import glob
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

from p2ptrain.core import plugins
from p2ptrain.core.errors import ConfigError, UserError
from p2ptrain.core.texts import install_command, join_some

STDLIB = "stdlib"
STDLIB_PARTS = ("asyncio", "email", "xml", "multiprocessing", "importlib", "http", "logging", "urllib")
"""Packages of the standard library of 0.15 MB or more, for workers with a text each: ``stdlib/asyncio`` and so on."""
TEXT_SUFFIXES = frozenset(
    {".txt", ".md", ".rst", ".tex", ".jsonl", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".rs", ".go", ".java"}
    | {".kt", ".js", ".ts", ".rb", ".sh", ".sql", ".toml"}
)
ROW_SUFFIXES = {"jsonl": (".jsonl", ".ndjson", ".json"), "csv": (".csv", ".tsv"), "parquet": (".parquet",)}
"""Formats of files of rows. With format ``auto`` a file's suffix decides; files of any other suffix are text."""
STORE_FILES = TOKENS, MARKS, FACTS = "tokens.bin", "marks.bin", "store.json"
"""Files of a token store (``compute.token_store``)."""
_FORMATS = {suffix: form for form, suffixes in ROW_SUFFIXES.items() for suffix in suffixes}
_ANYTHING = ".json"  # in a directory it may be anything, such as settings
_SUFFIXES = {
    "auto": (TEXT_SUFFIXES | set(_FORMATS)) - {_ANYTHING},
    "text": TEXT_SUFFIXES,
    "chat": frozenset({".jsonl", ".ndjson", ".parquet"}),
    "preference": frozenset({".jsonl", ".ndjson", ".csv", ".tsv", ".parquet"}),
    **{name: frozenset(suffixes) - {_ANYTHING} for name, suffixes in ROW_SUFFIXES.items()},
}
"""By format, the suffixes of the files that are read from a directory; a file or a glob may have any suffix."""
_UNPACKERS = {".zst": "zstd -d", ".bz2": "bunzip2", ".xz": "unxz", ".zip": "unzip"}
"""Compressions that are not read, and the programs that undo them."""
_ANY_DEPTH = re.compile(r"(|.*?[/\\])\*\*(?:[/\\](.*))?", re.DOTALL)  # a glob's first ``**`` that is a whole name
_NAMED = 3  # what is not read, in a note

_STDLIB_SKIPPED = frozenset(
    {"__pycache__", "site-packages", "dist-packages"}  # not the library itself
    | {"test", "tests", "idlelib", "turtledemo", "lib2to3"}  # its tests, and programs
    | {"encodings", "pydoc_data"}  # generated tables: code pages, help topics
)
_STDLIB_LOCAL = ("_sysconfigdata", "sitecustomize", "usercustomize")  # differ from machine to machine


def is_stdlib(path: str) -> bool:
    """Whether ``data.path`` names the standard library or, as ``stdlib/email``, a package of it."""
    return path == STDLIB or path.startswith(f"{STDLIB}/")


def find_files(path: str, form: str = "auto") -> list[Path]:
    """The files that ``data.path`` names, in the order of their relative paths. ``form``: ``data.format``.

    Raises:
        UserError: there are none, all are empty, or one cannot be read here: its compression, a missing package.
    """
    return search_files(path, form)[0]


def search_files(path: str, form: str) -> tuple[list[Path], str]:
    """As ``find_files``, and what in a directory is not read though it may hold text; empty if there is nothing."""
    if is_stdlib(path) and form not in ("auto", "text", "chat"):
        remedy = "use data.format = 'auto' or 'chat', or set data.path to a file of your own"
        raise ConfigError(f"data.path = {path!r} has no files of data.format = {form!r}", remedy=remedy)
    found, note = (_stdlib_files(path[len(STDLIB) + 1 :]), "") if is_stdlib(path) else _named_files(path, form)
    if not is_stdlib(path):
        read: dict[Path, Path] = {}  # by the real one, of which there may be several links
        for file in found:
            read.setdefault(file.resolve(), file)
        if again := len(found) - len(read):
            note = f"{note}{note and '; '}{again} links to files that are read already are left out"
        found = list(read.values())
    has_text = False
    for file in found:
        try:
            with file.open("rb") as opened:
                has_text |= bool(opened.read(1))
        except OSError as error:
            raise unreadable(file, error) from error
        packed, is_parquet = kind_of(file)[1], format_of(file, form) == "parquet"
        if packed in _UNPACKERS or (packed and is_parquet):
            remedy = f"unpack it: {_UNPACKERS.get(packed, 'gunzip')} {file}"
            raise ConfigError(f"{file} cannot be read: it is compressed", remedy=remedy)
        if is_parquet and find_spec("pyarrow") is None:
            text = f"{file} cannot be read: the package pyarrow is not installed"
            raise ConfigError(text, remedy=f"run: {install_command('parquet')}")
    if not has_text:
        raise ConfigError(f"data.path = {path!r} names only empty files", remedy="name files with text")
    return found, note


def unreadable(file: Path, error: OSError) -> UserError:
    return UserError(f"cannot read {file}: {error.strerror or error}", remedy="check its permissions, or leave it out")


def kind_of(file: Path) -> tuple[str, str]:
    """The suffix of what a file holds, and that of its compression, in lower case; empty if it has none."""
    suffix = file.suffix.lower()
    return (Path(file.stem).suffix.lower(), suffix) if suffix == ".gz" or suffix in _UNPACKERS else (suffix, "")


def format_of(file: Path, form: str) -> str:
    """How to read one file: ``text``, a key of ``ROW_SUFFIXES``, or a plugin's name."""
    by_suffix = _FORMATS.get(kind_of(file)[0], "text")
    if form in ("chat", "preference"):
        return "jsonl" if by_suffix == "text" else by_suffix
    return by_suffix if form == "auto" else form


def _named_files(path: str, form: str) -> tuple[list[Path], str]:
    place = Path(os.path.expanduser(path))
    if place.is_file():
        return [place], ""
    if place.is_dir():
        with plugins.blamed(f"readers:{form}"):
            suffixes = _SUFFIXES.get(form) or frozenset(plugins.load(f"readers:{form}").suffixes)
        found, left = _files_below(place, suffixes)
        note = _note(left)
        if not found:
            remedy = f"a directory is searched for {' '.join(sorted(suffixes))}"
            raise ConfigError(f"data.path = {path!r} has no text files", remedy=f"{remedy}{note and '; '}{note}")
        return found, note
    if not glob.has_magic(path):
        raise ConfigError(
            f"data.path = {path!r} does not exist",
            remedy="give stdlib, a file, a directory or a glob; paths are relative to where the worker runs",
        )
    left = []
    matches = sorted({Path(name) for name in _matches(str(place), left)})
    if not (found := [item for item in matches if item.is_file()]):
        raise ConfigError(
            f"data.path = {path!r} matches no file", remedy="quote the glob and check where the worker runs"
        )
    return found, _note(left)


def _note(left: list[str]) -> str:
    named = join_some(list(dict.fromkeys(left)), most=_NAMED)
    return f"not read: {named}; a glob in data.path can name them" if left else ""


def _matches(pattern: str, left: list[str]) -> Iterator[str]:
    """The names that a glob matches. Unlike Python's, ``**`` enters no link to a folder, which may lead back."""
    if not (found := _ANY_DEPTH.fullmatch(pattern)):
        yield from glob.iglob(pattern)
        return
    for root in glob.iglob(found[1] or "."):
        for place, _ in _folders(root, left):
            yield from _matches(os.path.join(glob.escape(place), found[2] or "*"), left)


def _folders(root: Path | str, left: list[str]) -> Iterator[tuple[str, list[str]]]:
    """The folders of a directory, each with its files. What is hidden is skipped, and what is not entered is added to
    ``left``."""
    unread: list[OSError] = []
    for place, folders, names in os.walk(root, onerror=unread.append):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        left += [f"{Path(place, name)} (a link to a folder)" for name in folders if Path(place, name).is_symlink()]
        yield place, sorted(name for name in names if not name.startswith("."))
    left += [f"{error.filename} ({error.strerror})" for error in unread]


def _files_below(root: Path, suffixes: frozenset[str]) -> tuple[list[Path], list[str]]:
    """The files of a directory, and what else may hold text there. What is hidden is neither."""
    found: list[Path] = []
    left: list[str] = []
    for place, names in _folders(root, left):
        for file in (Path(place, name) for name in names):
            suffix = kind_of(file)[0]
            if suffix == _ANYTHING:
                left.append(f"{file} (a {_ANYTHING} may be anything)")
            elif suffix in suffixes and file.is_file():
                found.append(file)
            elif suffix in suffixes:
                left.append(f"{file} (a broken link, or no file)")
    return _sorted_below(root, found), left


def _stdlib_files(package: str) -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    sources: list[Path] = []
    for place, directories, names in os.walk(root / package if package.isidentifier() else root):
        directories[:] = [name for name in directories if name not in _STDLIB_SKIPPED]  # os.walk does not enter them
        sources += [Path(place, name) for name in names if name.endswith(".py") and not name.startswith(_STDLIB_LOCAL)]
    found = _sorted_below(root, sources)
    if not found or (package and not package.isidentifier()):
        raise ConfigError(
            f"this Python has no library sources in {root / package}", remedy="set data.path to a text of your own"
        )
    return found


def _sorted_below(root: Path, files: Iterable[Path]) -> list[Path]:
    return sorted((file for file in files if file.is_file()), key=lambda file: file.relative_to(root).as_posix())
