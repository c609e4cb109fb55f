"""The files of a corpus: found without reading them, so that a missing path is known before any process starts."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from p2ptrain.core.errors import ConfigError
from p2ptrain.core.extras import install_command

STDLIB = "stdlib"
STDLIB_PARTS = ("asyncio", "email", "xml", "multiprocessing", "importlib", "http", "logging", "urllib")
"""Packages of the standard library of 0.15 MB or more, for workers with a text each: ``stdlib/asyncio`` and so on."""
TEXT_SUFFIXES = frozenset(
    {".txt", ".md", ".rst", ".tex", ".jsonl", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".rs", ".go", ".java"}
    | {".kt", ".js", ".ts", ".rb", ".sh", ".sql", ".toml"}
)
ROW_SUFFIXES = {"jsonl": ".jsonl", "csv": ".csv", "parquet": ".parquet"}
"""Formats of files of rows. With format ``auto`` a file's suffix decides; files of any other suffix are text."""
_SUFFIXES = {
    "auto": TEXT_SUFFIXES | set(ROW_SUFFIXES.values()),
    "text": TEXT_SUFFIXES,
    "chat": frozenset({".jsonl", ".parquet"}),
    **{name: frozenset({suffix}) for name, suffix in ROW_SUFFIXES.items()},
}
"""By format, the suffixes of the files that are read from a directory; a file or a glob may have any suffix."""

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
        ConfigError: there are none, or the package that reads them is not installed.
    """
    if is_stdlib(path) and form in ROW_SUFFIXES:
        remedy = "use data.format = 'auto' or 'chat', or set data.path to a file of your own"
        raise ConfigError(f"data.path = {path!r} has no files of data.format = {form!r}", remedy=remedy)
    found = _stdlib_files(path[len(STDLIB) + 1 :]) if is_stdlib(path) else _named_files(path, _SUFFIXES[form])
    if any(format_of(file, form) == "parquet" for file in found) and find_spec("pyarrow") is None:
        raise ConfigError(
            f"{found[0]} cannot be read: the package pyarrow is not installed",
            remedy=f"run: {install_command('parquet')}",
        )
    return found


def format_of(file: Path, form: str) -> str:
    """How to read one file: ``text``, or a key of ``ROW_SUFFIXES``."""
    by_suffix = next((name for name, suffix in ROW_SUFFIXES.items() if file.suffix == suffix), "text")
    if form == "chat":
        return "parquet" if by_suffix == "parquet" else "jsonl"
    return by_suffix if form == "auto" else form


def _named_files(path: str, suffixes: frozenset[str]) -> list[Path]:
    place = Path(os.path.expanduser(path))
    if place.is_file():
        return [place]
    if place.is_dir():
        found = _sorted_below(place, (item for item in place.rglob("*") if item.suffix in suffixes))
        if not found:
            names = " ".join(sorted(suffixes))
            raise ConfigError(f"data.path = {path!r} has no text files", remedy=f"a directory is searched for {names}")
        return found
    if not glob.has_magic(path):
        raise ConfigError(
            f"data.path = {path!r} does not exist",
            remedy="give stdlib, a file, a directory or a glob; paths are relative to where the worker runs",
        )
    matches = sorted(Path(name) for name in glob.glob(str(place), recursive=True))
    if not (found := [item for item in matches if item.is_file()]):
        raise ConfigError(
            f"data.path = {path!r} matches no file", remedy="quote the glob and check where the worker runs"
        )
    return found


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
