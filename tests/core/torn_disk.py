"""A disk in memory whose power goes inside any call, and every state in which it may then come back.

Stricter than journalling file systems are: of what was not flushed, *any subset* survives. A file that was not flushed
has its old content, its new, or half of it; of what was done to the entries of a directory since its last flush, each
thing (a rename is one) may be lost by itself, and with it what was done later to an entry that is not there then. Only
within a directory do those that survive keep their order.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import sqlite3
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from p2ptrain.core.disk import Lock
from p2ptrain.core.errors import DiskFull, StorageError

N = TypeVar("N")


class Crash(BaseException):
    """The power went."""


@dataclass(eq=False)
class File:
    data: bytes = b""
    flushed: bytes = b""

    def outcomes(self) -> list[bytes]:
        if self.flushed == self.data:
            return [self.data]
        return list(dict.fromkeys([self.flushed, self.data, self.data[: len(self.data) // 2]]))


@dataclass(eq=False)
class Folder:
    entries: dict[str, File | Folder] = field(default_factory=dict)
    flushed: dict[str, File | Folder] = field(default_factory=dict)
    since: list[Change] = field(default_factory=list)

    def do(self, change: Change) -> None:
        change.apply(self.entries)
        self.since.append(change)

    def flush(self) -> None:
        self.flushed, self.since = dict(self.entries), []

    def fall_back(self, which: tuple[int, ...]) -> None:
        """Only the changes with these numbers survived."""
        entries = dict(self.flushed)
        for index in which:
            self.since[index].apply(entries)
        self.entries, self.flushed, self.since = entries, dict(entries), []


@dataclass(eq=False)
class Change:
    """``node`` was made as ``target``; or what was ``source`` became ``target``, or nothing."""

    source: str = ""
    target: str = ""
    node: File | Folder | None = None

    def apply(self, entries: dict[str, File | Folder]) -> None:
        node = self.node or entries.pop(self.source, None)
        if node is not None and self.target:
            entries[self.target] = node


class TornDisk:
    """Implements ``p2ptrain.core.disk.Disk``.

    Attributes:
        calls: changing calls so far; the one with number ``fail_at`` fails, having been done in part where ``in_part``.
        error: what it raises; every later call, too, if it is a ``Crash``.
    """

    def __init__(self) -> None:
        self.root = Folder()
        self.calls, self.fail_at = 0, 0
        self.in_part = False
        self.error: BaseException = Crash()
        self.free = 1 << 40

    # --------------------------------------------------------------------------------------------------- what may come

    def outcomes(self) -> Iterator[TornDisk]:
        """This disk after a power cut, in every way there is."""
        folders, files = self._unflushed()
        kept = itertools.product(*(_subsets(len(folder.since)) for folder in folders))
        contents = itertools.product(*(file.outcomes() for file in files))
        for survived, held in itertools.product(kept, contents):
            memo: dict[int, object] = {}
            torn = deepcopy(self, memo)
            torn.fail_at = 0
            for folder, which in zip(folders, survived, strict=True):
                copy = memo[id(folder)]
                assert isinstance(copy, Folder)
                copy.fall_back(which)
            for file, data in zip(files, held, strict=True):
                content = memo[id(file)]
                assert isinstance(content, File)
                content.data = content.flushed = data
            yield torn

    def _unflushed(self) -> tuple[list[Folder], list[File]]:
        folders: list[Folder] = []
        files: list[File] = []
        seen: set[int] = set()
        waiting: list[File | Folder] = [self.root]
        while waiting:
            node = waiting.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            if isinstance(node, Folder):
                waiting += [*node.entries.values(), *node.flushed.values()]
                waiting += [change.node for change in node.since if change.node is not None]
                if node.since:
                    folders.append(node)
            elif len(node.outcomes()) > 1:
                files.append(node)
        return folders, files

    # ------------------------------------------------------------------------------------------------------- the calls

    def _called(self, do: Callable[[], None], partly: Callable[[], None] = lambda: None) -> None:
        self.calls += 1
        if self.fail_at and self.calls >= self.fail_at and isinstance(self.error, Crash):
            if self.calls == self.fail_at and self.in_part:
                partly()
            raise self.error
        if self.calls == self.fail_at:
            partly()
            raise self.error
        do()

    def write_file(self, path: Path, data: bytes) -> None:
        def write(content: bytes) -> None:
            file = self._folder(path.parent).entries.get(path.name)
            if not isinstance(file, File):
                file = File()
                self._folder(path.parent).do(Change(target=path.name, node=file))
            file.data = content

        self._called(lambda: write(data), lambda: write(data[: len(data) // 2]))

    def append_file(self, path: Path, data: bytes | memoryview) -> None:
        def append(content: bytes) -> None:
            self._file(path).data += content

        self._called(lambda: append(bytes(data)), lambda: append(bytes(data[: len(data) // 2])))

    def sync_file(self, path: Path) -> None:
        def sync() -> None:
            file = self._file(path)
            file.flushed = file.data

        self._called(sync)

    def sync_dir(self, path: Path) -> None:
        self._called(self._folder(path).flush)

    def make_dir(self, path: Path) -> None:
        missing = [each for each in (path, *path.parents) if not self.is_dir(each)]
        if not missing:
            return

        def make() -> None:
            for each in reversed(missing):
                self._folder(each.parent).do(Change(target=each.name, node=Folder()))

        self._called(make)

    def rename(self, source: Path, target: Path) -> None:
        def rename() -> None:
            folder = self._folder(source.parent)
            assert target.parent == source.parent, "within one directory"
            node, there = folder.entries.get(source.name), folder.entries.get(target.name)
            if node is None:
                raise StorageError(f"cannot rename {source}: No such file or directory")
            if isinstance(there, Folder) and there.entries:
                raise StorageError(f"cannot rename {source}: Directory not empty")
            folder.do(Change(source.name, target.name))

        self._called(rename)

    def remove_tree(self, path: Path) -> None:
        node = self._folder(path.parent).entries.get(path.name)
        if node is None:
            self._called(lambda: None)
            return

        def empty(some: int) -> None:
            if isinstance(node, Folder):
                for name in sorted(node.entries)[:some]:
                    node.do(Change(name))

        def remove() -> None:
            empty(1 << 30)
            self._folder(path.parent).do(Change(path.name))

        self._called(remove, lambda: empty(1))

    def read(self, path: Path, *, max_bytes: int) -> bytes:
        return self._file(path).data

    def hash_file(self, path: Path) -> str:
        return hashlib.sha256(self._file(path).data).hexdigest()

    def list_dir(self, path: Path) -> list[str]:
        return sorted(self._folder(path).entries) if self.is_dir(path) else []

    def is_dir(self, path: Path) -> bool:
        return isinstance(self._find(path), Folder)

    def size(self, path: Path) -> int:
        return len(self._file(path).data)

    def free_bytes(self, path: Path) -> int:
        return self.free

    def fresh_path(self, path: Path) -> Path:
        return path.with_name(f"{path.name}-{self.calls}")

    def set_mode(self, path: Path, mode: int) -> None:
        raise NotImplementedError

    def try_lock(self, path: Path) -> Lock | None:
        raise NotImplementedError

    def connect(self, path: Path) -> sqlite3.Connection:
        raise NotImplementedError

    def _find(self, path: Path) -> File | Folder | None:
        node: File | Folder | None = self.root
        for part in path.parts[1:]:
            node = node.entries.get(part) if isinstance(node, Folder) else None
        return node

    def _folder(self, path: Path) -> Folder:
        return self._of(path, Folder)

    def _file(self, path: Path) -> File:
        return self._of(path, File)

    def _of(self, path: Path, kind: type[N]) -> N:
        node = self._find(path)
        if not isinstance(node, kind):
            raise StorageError(f"cannot read {path}: No such file or directory")
        return node


def no_space(path: Path = Path("x")) -> StorageError:
    """As the real disk's."""
    return DiskFull(f"cannot write {path}: No space left on device ({errno.ENOSPC})", remedy="free some space")


def _subsets(count: int) -> list[tuple[int, ...]]:
    return [which for size in range(count + 1) for which in itertools.combinations(range(count), size)]
