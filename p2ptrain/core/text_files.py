"""The files of a corpus: found without reading them, so that a missing path is known before any process starts."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from p2ptrain.core.errors import ConfigError

STDLIB = "stdlib"
TEXT_SUFFIXES = frozenset(
    {".txt", ".md", ".rst", ".tex", ".jsonl", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".rs", ".go", ".java"}
    | {".kt", ".js", ".ts", ".rb", ".sh", ".sql", ".toml"}
)
"""Suffixes of the files that are read from a directory; a file or a glob may have any suffix."""

_STDLIB_SKIPPED = frozenset(
    {"__pycache__", "site-packages", "dist-packages"}  # not the library itself
    | {"test", "tests", "idlelib", "turtledemo", "lib2to3"}  # its tests, and programs
    | {"encodings", "pydoc_data"}  # generated tables: code pages, help topics
)
_STDLIB_LOCAL = ("_sysconfigdata", "sitecustomize", "usercustomize")  # differ from machine to machine


def find_files(path: str) -> list[Path]:
    """The files that ``data.path`` names, in the order of their relative paths. Raises ``ConfigError``."""
    if path == STDLIB:
        return _stdlib_files()
    place = Path(os.path.expanduser(path))
    if place.is_file():
        return [place]
    if place.is_dir():
        found = _sorted_below(place, (item for item in place.rglob("*") if item.suffix in TEXT_SUFFIXES))
        if not found:
            names = " ".join(sorted(TEXT_SUFFIXES))
            raise ConfigError(f"data.path = {path!r} has no text files", remedy=f"a directory is searched for {names}")
        return found
    if not glob.has_magic(path):
        raise ConfigError(
            f"data.path = {path!r} does not exist",
            remedy="give stdlib, a file, a directory, a glob or a .jsonl; paths are relative to where the worker runs",
        )
    matches = sorted(Path(name) for name in glob.glob(str(place), recursive=True))
    if not (found := [item for item in matches if item.is_file()]):
        raise ConfigError(
            f"data.path = {path!r} matches no file", remedy="quote the glob and check where the worker runs"
        )
    return found


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    sources: list[Path] = []
    for place, directories, names in os.walk(root):
        directories[:] = [name for name in directories if name not in _STDLIB_SKIPPED]  # os.walk does not enter them
        sources += [Path(place, name) for name in names if name.endswith(".py") and not name.startswith(_STDLIB_LOCAL)]
    found = _sorted_below(root, sources)
    if not found:
        raise ConfigError(f"this Python has no library sources in {root}", remedy="set data.path to a text of your own")
    return found


def _sorted_below(root: Path, files: Iterable[Path]) -> list[Path]:
    return sorted((file for file in files if file.is_file()), key=lambda file: file.relative_to(root).as_posix())
